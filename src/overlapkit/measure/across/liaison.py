"""One thread a rank that hands in windows of steps through the job's store, and brings back the verdict."""

import json
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Any

from overlapkit.measure.across.at_exit import end_at_exit
from overlapkit.measure.across.handed import Handed, decode, hand_in
from overlapkit.measure.across.judge import LOCAL, JudgedWindow, judge, sum_up
from overlapkit.measure.across.ranks import Ranks
from overlapkit.measure.across.sequence import Issues, read_issues
from overlapkit.measure.ledger import Ledger
from overlapkit.quorum import Quorum

WINDOW = 20
"""Steps that are compared at a time; the first windows end after steps 5 and 10, for short runs."""

_WINDOWS = 6  # that the verdict covers: the last 100 steps and some
_ISSUES_EVERY = 32  # windows: reading the flight recorder holds the GIL for some milliseconds
_PATIENCE_S = 10.0  # for a rank that hands in late
_CLOSE_S = 5.0  # for the last window, and again for the others to leave
_BATCH = 64  # reports that are fetched at a time


def window_end(number: int) -> int:
    """The step at which a window ends, as a count of measured steps."""
    return (5, 10)[number] if number < 2 else WINDOW * (number - 1)


class Liaison:
    """Compares this rank's steps with the others'.

    Invariants:
        * Only its own thread talks to the store; nobody waits for it longer than asked.
        * Every rank hands in every window once, in order; rank 0 judges it when all are there, or after 10 s
          without those that are not, and overwrites the one verdict. A window's reports are deleted then.
        * A liaison that is forgotten ends its thread.

    Args:
        ledger: Of the meter.
        every: Distance of measured steps.
        quorum: Of all ranks.
        local: See `judge`.
        unseen: What cannot be told, and why; None where all can be.
    """

    def __init__(
        self,
        ledger: Ledger,
        every: int,
        quorum: Quorum,
        local: Sequence[str] = LOCAL,
        unseen: str | None = None,
    ) -> None:
        self._desk = _Desk(ledger, every, quorum, local, unseen)
        weakref.finalize(self, self._desk.forget).atexit = False
        self._thread: threading.Thread | None = None

    @property
    def handed_bytes(self) -> list[int]:
        """Size of what this rank has handed in, by window."""
        return self._desk.handed_bytes

    def step_ended(self, step: int) -> None:
        """In the training thread: wakes the other one where a window may be complete."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._desk.run, name="overlapkit-ranks", daemon=True)
            self._thread.start()
            end_at_exit(self._thread, self._desk.forget)
        measured = step // self._desk.every + 1
        if measured % WINDOW == 0 or measured in (5, 10):
            self._desk.due = measured
            self._desk.wake.set()

    def latest(self, patience: float = 0.0) -> Ranks | str:
        """The verdict on the latest windows; or why there is none.

        Args:
            patience: Seconds to wait for windows that are complete here and not yet judged.
        """
        desk = self._desk
        if self._thread is not None and patience > 0:
            desk.wake.set()
            with desk.news:
                desk.news.wait_for(lambda: desk.known >= desk.complete() or desk.over, patience)
        return desk.verdict if desk.verdict is not None else desk.why_none()

    def close(self) -> None:
        """Hand in what is left, and wait for the verdict: 10 s at most."""
        self._desk.closing = True
        self._desk.wake.set()
        if self._thread is not None:
            self._thread.join(2 * _CLOSE_S + 1.0)


class _Desk:
    """The thread's own side of it, which does not keep the liaison alive."""

    def __init__(
        self, ledger: Ledger, every: int, quorum: Quorum, local: Sequence[str], unseen: str | None
    ) -> None:
        self.every = every
        self.wake = threading.Event()
        self.news = threading.Condition()
        self.closing = False
        self.over = False
        self.due = 0  # measured steps that ended, as of the last end of a window
        self.known = -1  # the latest window whose verdict is here
        self.verdict: Ranks | None = None
        self.handed_bytes: list[int] = []
        self._ledger = ledger
        self._quorum = quorum
        self._local = tuple(local)
        self._unseen = unseen
        self._forgotten = False
        self._error: str | None = None
        self._next = 0  # window to hand in
        self._last = False  # rank 0 has judged its last one
        self._pending: deque[tuple[int, Handed, float]] = deque()  # rank 0: windows to judge
        self._judged: deque[JudgedWindow] = deque(maxlen=_WINDOWS)
        self._newest = -1  # rank 0: the window that was judged last
        self._name = quorum.name  # now: every rank makes its meters in the same order

    def forget(self) -> None:
        """End the thread without another word to the others."""
        self._forgotten = True
        self.wake.set()

    def complete(self) -> int:
        """The latest window that is complete here, or -1."""
        records = self._ledger.records
        measured = records[-1].index // self.every + 1 if records else 0
        return measured // WINDOW + 1 if measured >= WINDOW else bisect_right((5, 10), measured) - 1

    def why_none(self) -> str:
        if self._error is not None:
            return f"ranks could not be compared: {self._error}"
        if self.handed_bytes:
            return "the ranks' first window of steps has not been judged yet"
        return f"ranks are compared after {window_end(0)} measured steps, then every {WINDOW}, and at close()"

    def run(self) -> None:
        """The thread's life."""
        try:
            while not self._forgotten and not self._over():
                self.wake.wait(self._tick())
                self.wake.clear()
                self._work()
            if self.closing:
                self._quorum.leave()
        except Exception as error:  # of the store: whoever serves it is gone
            self._error = f"{type(error).__name__}: {error}"
        finally:
            with self.news:
                self.over = True
                self.news.notify_all()

    def _over(self) -> bool:
        if not self.closing:
            return False
        deadline = time.monotonic() + _CLOSE_S
        self._hand_in_rest()
        while time.monotonic() < deadline and not self._forgotten and not self._settled():
            self._work()
            time.sleep(0.01)
        if self._quorum.rank == 0:
            while self._pending:
                self._judge(*self._pending.popleft()[:2])
            self._last = True
            self._publish()
        return True

    def _settled(self) -> bool:
        if self._quorum.rank == 0:
            return not self._pending
        return self._last or self.known >= self._next - 1

    def _tick(self) -> float:
        if self._quorum.rank == 0 and self._pending:
            return 0.05
        if self.known < self._next - 1 or self.due >= window_end(self._next):
            return 0.05 * max(1.0, self._quorum.world / 64)
        return 1.0

    def _work(self) -> None:
        while self.complete() >= self._next and len(self._pending) < 8:
            self._hand_in(window_end(self._next))
        if self._quorum.rank == 0:
            while self._pending and self._ready():
                self._judge(*self._pending.popleft()[:2])
                self._publish()
        elif self.known < self._next - 1:
            self._fetch()

    def _hand_in_rest(self) -> None:
        self._work()
        with self._ledger.lock:
            measured = self._ledger.records[-1].index // self.every + 1 if self._ledger.records else 0
        begin = window_end(self._next - 1) if self._next else 0
        if measured > max(begin, 1):  # there is more than the very first step
            self._hand_in(measured)

    def _hand_in(self, end: int) -> None:
        """Steps from the last window's end to this one; never the very first, which pays for what is once."""
        number, begin = self._next, window_end(self._next - 1) if self._next else 1
        with self._ledger.lock:
            records = {one.index: one for one in list(self._ledger.records)[-2 * WINDOW - 64 :]}
            traces = list(self._ledger.traces)
        steps = [
            (records[trace.index], trace)
            for trace in traces
            if begin <= trace.index // self.every < end and trace.index in records
        ]
        issued = read_issues() if number < 2 or number % _ISSUES_EVERY == 0 else ""
        handed = hand_in(steps, every=self.every, issued=issued if isinstance(issued, Issues) else None)
        payload = handed.encode()
        self.handed_bytes.append(len(payload))
        self._next += 1
        if self._quorum.rank == 0:
            self._pending.append((number, handed, time.monotonic()))
        else:
            self._quorum.store.set(self._key(number, self._quorum.rank), payload)

    def _key(self, number: int, rank: int) -> str:
        return f"{self._name}/w{number}/{rank}"

    def _keys(self, number: int) -> list[str]:
        return [self._key(number, rank) for rank in range(1, self._quorum.world)]

    def _ready(self) -> bool:
        """Whether the oldest window can be judged: all that came for the last are there, or time is up."""
        number, _, since = self._pending[0]
        if self._quorum.store.check(self._keys(number)):
            return True
        waited = time.monotonic() - since
        silent = set(self._judged[-1].missing) if self._judged else set()
        if waited < _PATIENCE_S and silent:
            awaited = [self._key(number, rank) for rank in range(1, self._quorum.world) if rank not in silent]
            return waited >= _PATIENCE_S / 10 and bool(self._quorum.store.check(awaited))
        return waited >= _PATIENCE_S

    def _judge(self, number: int, own: Handed) -> None:
        store, keys = self._quorum.store, self._keys(number)
        there = list(range(1, self._quorum.world))
        if not store.check(keys):
            there = [rank for rank in there if store.check([keys[rank - 1]])]
        handed = {0: own}
        for begin in range(0, len(there), _BATCH):
            batch = there[begin : begin + _BATCH]
            payloads = store.multi_get([keys[rank - 1] for rank in batch])
            handed.update((rank, decode(payload)) for rank, payload in zip(batch, payloads, strict=True))
        for key in [*keys, *(self._keys(number - 1) if number and len(there) < len(keys) else ())]:
            store.delete_key(key)  # the one before: what came too late for it
        handed = {rank: one for rank, one in handed.items() if len(one.steps)}
        self._judged.append(judge(handed, self._quorum.world, self._local))
        self._newest = number

    def _publish(self) -> None:
        if self._judged:
            self._tell(self._newest, sum_up(list(self._judged), self._quorum.world, self._unseen))
        said = {"window": self.known, "last": self._last, "ranks": self.verdict and self.verdict.to_dict()}
        self._quorum.store.set(f"{self._name}/verdict", json.dumps(said))

    def _fetch(self) -> None:
        key = f"{self._name}/verdict"
        if self._quorum.store.check([key]):
            said: dict[str, Any] = json.loads(self._quorum.store.get(key))
            self._last = said["last"]
            if said["window"] > self.known:
                self._tell(said["window"], Ranks.from_dict(said["ranks"]))

    def _tell(self, window: int, ranks: Ranks) -> None:
        with self.news:  # both at once: who asks in between would take the verdict before it for this one
            self.known, self.verdict = window, ranks
            self.news.notify_all()
