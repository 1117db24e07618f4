"""Watches for a job that hangs: ranks say where they are, and when nobody goes on, who is missing."""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import HashStore

from overlapkit.measure.across.at_exit import end_at_exit
from overlapkit.measure.across.hang import HANG_EXIT_CODE, HangReport, Statement, hangs, make_report
from overlapkit.measure.across.sequence import Issues, read_issues
from overlapkit.measure.across.stacks import all_stacks
from overlapkit.measure.across.where import AwakeClock, Progress, Where
from overlapkit.quorum import Quorum, await_keys

OnHang = str | Callable[[HangReport], object]

_TESTIFY_S = 5.0  # how long the other ranks may take to answer an alarm
_VERDICT_S = 15.0  # how long whoever gave it may take to judge
_PART_S = 2.0  # how long a rank stays for the others to have read the verdict
_BATCH = 64
_ISSUES = 64  # of each group, the last ones


class HangWatch:
    """Two threads of each rank: one looks where the rank is, one tells the others through the job's store.

    Invariants:
        * The first thread never talks to the store, so one that does not answer is noticed.
        * An alarm is given when all ranks that have not closed their meter were without progress for the
          timeout, or fell silent. Whoever gives it judges; all others say the same as it does.
        * A watch that is forgotten ends its threads.

    Args:
        progress: Of this rank.
        quorum: Of all ranks.
        timeout: Seconds without progress that are a hang.
        on_hang: "exit", "wait", or what is called with a HangReport, and then waited.
    """

    def __init__(self, progress: Progress, quorum: Quorum, timeout: float, on_hang: OnHang) -> None:
        self._post = post = _Post(progress, quorum, timeout, on_hang)
        weakref.finalize(self, post.stop.set).atexit = False
        self._threads = [
            threading.Thread(target=target, name=f"overlapkit-{name}", daemon=True)
            for name, target in (("watch", post.watch), ("beat", post.talk))
        ]
        for thread in self._threads:
            thread.start()
            end_at_exit(thread, post.leave)

    def close(self) -> None:
        """Say that this rank has left, and end the threads; waits for each 5 s at most."""
        self._post.leave()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5.0)


def beat_s(timeout: float) -> float:
    """Seconds between two looks."""
    return min(max(timeout / 10, 0.05), 5.0)


class _Post:
    """The threads' own side of it."""

    def __init__(self, progress: Progress, quorum: Quorum, timeout: float, on_hang: OnHang) -> None:
        self.progress = progress
        self.stop = threading.Event()
        self._rank, self._world = quorum.rank, quorum.world
        self._store: Any = quorum.store if quorum.store is not None else HashStore()
        self._name = f"{quorum.name}/hang"
        self._timeout = timeout
        self._beat_s = beat_s(timeout)
        self._awake = AwakeClock(2 * self._beat_s)
        self._on_hang = on_hang
        self._where = progress.look()
        self._answered = time.monotonic()  # when the store last did
        self._error: str | None = None
        self._heard: dict[int, tuple[int, float]] = {}  # of each rank the latest beat, and when it was new
        self._known: set[int] = set()  # ranks that have said something
        self._looked = 0.0
        self._alarms = 0  # that this rank has answered
        self._acting = threading.Lock()
        self._acted = False

    def leave(self) -> None:
        """This rank goes: that is the last thing to say."""
        self.progress.left = True
        self.stop.set()

    def watch(self) -> None:
        """The thread that does without the store."""
        while not self.stop.wait(self._beat_s) and not self.progress.left:
            self._where = where = self.progress.look()
            if where.still_s < self._timeout / 2:
                self._acted = False
            deaf_s = time.monotonic() - self._answered
            if where.inside and min(where.still_s, deaf_s) >= self._timeout:
                self._act(self._alone(where, deaf_s))

    def talk(self) -> None:
        """The thread that talks to the store."""
        try:
            last = False
            while True:
                self._awake()
                where = self.progress.look() if last else self._where
                self._ask("set", self._key(self._rank), json.dumps(where.to_dict()))
                if last:
                    return
                if where.still_s >= self._timeout / 2 and not self._acted:
                    self._look_around(where)
                last = self.stop.wait(self._beat_s) or self.progress.left
        except Exception as error:  # whoever serves the store is gone: the other thread will say so
            self._error = f"{type(error).__name__}: {error}"

    def _ask(self, call: str, *arguments: Any) -> Any:
        answer = getattr(self._store, call)(*arguments)
        self._answered = time.monotonic()
        return answer

    def _key(self, rank: int) -> str:
        return f"{self._name}/at/{rank}"

    def _look_around(self, where: Where) -> None:
        now = time.monotonic()
        if now - self._looked < self._world / 100:  # a thousand ranks ask a thousand each: not all the time
            return
        self._looked = now
        alarms = self._ask("add", f"{self._name}/alarms", 0)
        if alarms > self._alarms:
            self._alarms = alarms
            given = json.loads(self._ask("get", f"{self._name}/alarm/{alarms}"))
            if given["at"] >= time.time() - where.still_s:  # else it was about another time
                self._answer(alarms, judges=False)
            return
        said, silent = self._listen()
        others = {rank: one for rank, one in said.items() if rank != self._rank}
        if hangs(where, others, silent, self._timeout):
            self._give_alarm(alarms + 1)

    def _give_alarm(self, number: int) -> None:
        """The first to set the key gives it; the count tells that it is there."""
        mine = json.dumps({"rank": self._rank, "at": time.time()})
        given = self._ask("compare_set", f"{self._name}/alarm/{number}", "", mine)
        if given != mine.encode():
            return  # the next look sees it
        self._alarms = self._ask("add", f"{self._name}/alarms", 1)
        self._answer(number, judges=True)

    def _listen(self) -> tuple[dict[int, Where], dict[int, float]]:
        """What each rank last said, and for how long those that should have said more did not."""
        unknown = [rank for rank in range(self._world) if rank not in self._known]
        if unknown and self._ask("check", [self._key(rank) for rank in unknown]):
            self._known.update(unknown)
        else:
            self._known.update(rank for rank in unknown if self._ask("check", [self._key(rank)]))
        said = {
            rank: Where(**json.loads(text)) for rank, text in self._fetch("at", sorted(self._known)).items()
        }
        now, silent = self._awake(), {}
        for rank, where in said.items():
            if self._heard.get(rank, (-1,))[0] != where.beat:
                self._heard[rank] = where.beat, now
            quiet_s = now - self._heard[rank][1]
            if quiet_s > max(3 * self._beat_s, 1.0 if self._timeout > 5 else 0.0):
                silent[rank] = quiet_s
        return said, silent

    def _fetch(self, what: str, ranks: list[int]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for begin in range(0, len(ranks), _BATCH):
            batch = ranks[begin : begin + _BATCH]
            texts = self._ask("multi_get", [f"{self._name}/{what}/{rank}" for rank in batch])
            found.update(zip(batch, texts, strict=True))
        return found

    def _answer(self, number: int, *, judges: bool) -> None:
        """Tell where this rank is, and say what the judge says."""
        where = self.progress.look()
        issued = read_issues()
        known = issued.latest(_ISSUES) if isinstance(issued, Issues) else None
        statement = Statement(where, all_stacks(self.progress.thread), known)
        self._ask("set", f"{self._name}/{number}/{self._rank}", json.dumps(statement.to_dict()))
        verdict = f"{self._name}/verdict/{number}"
        if judges:
            self._ask("set", verdict, json.dumps(self._judge(number, where).to_dict()))
        elif not await_keys(self._store, [verdict], _VERDICT_S, self.stop.is_set):
            self._act(self._alone(where, 0.0))
            return
        self._act(HangReport.from_dict(json.loads(self._ask("get", verdict))), number)

    def _judge(self, number: int, where: Where) -> HangReport:
        said, silent = self._listen()
        awaited = [rank for rank, one in said.items() if rank not in silent and not one.left]
        await_keys(self._store, [f"{self._name}/{number}/{rank}" for rank in awaited], _TESTIFY_S)
        there = [rank for rank in awaited if self._ask("check", [f"{self._name}/{number}/{rank}"])]
        texts = self._fetch(str(number), there)
        told = {rank: Statement.from_dict(json.loads(text)) for rank, text in texts.items()}
        said.update((rank, one.where) for rank, one in told.items())
        silent.update((rank, 0.0) for rank in awaited if rank not in told and rank not in silent)
        silent = {rank: max(quiet_s, time.time() - said[rank].at) for rank, quiet_s in silent.items()}
        unheard = [rank for rank in range(self._world) if rank not in said]
        return make_report(told, said, silent, where.still_s, unheard)

    def _alone(self, where: Where, deaf_s: float) -> HangReport:
        """What can be said without the others."""
        why = f"the job's store has not answered for {deaf_s:.1f} s"
        if self._error is not None:
            why = f"the job's store is gone ({self._error})"
        why += ": the host of rank 0, or of torchrun's rendezvous, is stopped, dead or cut off"
        return HangReport(
            missing=(),
            step=None,
            phase=None,
            why=why,
            waited_s=where.still_s,
            where={self._rank: where.text},
            stacks={self._rank: all_stacks(self.progress.thread)},
            mismatch=None,
        )

    def _act(self, report: HangReport, number: int | None = None) -> None:
        """Once for each hang, whichever thread comes first."""
        with self._acting:
            if self._acted or self.stop.is_set():
                return
            self._acted = True
        os.write(2, f"[rank {self._rank}] {report}\n".encode())  # the lock of sys.stderr may be held for ever
        if callable(self._on_hang):
            try:
                self._on_hang(report)
            except Exception:
                traceback.print_exc(file=sys.stderr)
        elif self._on_hang == "exit":
            if number is not None:
                self._part(number)
            os._exit(HANG_EXIT_CODE)

    def _part(self, number: int) -> None:
        """Let the others read the verdict before this process, which may serve the store, is gone."""
        with contextlib.suppress(Exception):
            key, deadline = f"{self._name}/{number}/read", time.monotonic() + _PART_S
            awaited = len(self._known) or self._world
            self._ask("add", key, 1)
            while self._ask("add", key, 0) < awaited and time.monotonic() < deadline:
                time.sleep(0.02)
