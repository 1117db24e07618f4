"""Uploads: what is committed locally goes to the store behind training, from the local files."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlapkit.checkpoint.codec import decode
from overlapkit.checkpoint.deletion import delete_surplus
from overlapkit.checkpoint.errors import RankFailed
from overlapkit.checkpoint.job import Job, files_of
from overlapkit.checkpoint.manifest import step_name
from overlapkit.checkpoint.remote.earlier import Earlier, Pending, take
from overlapkit.checkpoint.remote.publish import Withdrawal, publish_together
from overlapkit.checkpoint.remote.store import Store
from overlapkit.checkpoint.retention import Policy
from overlapkit.checkpoint.stage import LANE
from overlapkit.lane import Lane, Ticket
from overlapkit.quorum import Quorum, Report
from overlapkit.span import SpanLog

PATIENCE = 6
"""How many times `timeout` ranks wait for each other's uploads."""


class Cargo:
    """A rank's files of one save, held open: no rename and no deletion takes them away before the upload.

    Attributes:
        files: What they are, by name.
        committed: Whether rank 0 has said that the save is. All ranks go by that: one on which something
            fails later, such as a deletion, must not leave the others waiting for it.
    """

    committed = False

    def __init__(self) -> None:
        self.files: dict[str, dict[str, Any]] = {}
        self._open: dict[str, int] = {}

    def take(self, folder: Path, files: dict[str, dict[str, Any]]) -> None:
        """Open files that have just been written."""
        self.files = files
        for name in files:
            self._open[name] = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)

    def paths(self) -> dict[str, str]:
        """By name, a path under which each is found until `let_go`."""
        return {name: f"/proc/{os.getpid()}/fd/{fd}" for name, fd in self._open.items()}

    def let_go(self) -> None:
        """Close them. Safe to call twice."""
        while self._open:
            os.close(self._open.popitem()[1])

    __del__ = let_go


@dataclass(frozen=True)
class LocalJob(Job):
    """A save that is committed locally and uploaded then."""

    uploads: "Uploads" = field(kw_only=True)
    cargo: Cargo = field(default_factory=Cargo)

    def _verdict(self, reports: list[Report]) -> Report:
        return {**super()._verdict(reports), "metrics": self.metrics}

    def _after(self, verdict: Report) -> Path:
        self.cargo.committed = True
        self.uploads.give_up_before(self.number, verdict["metrics"])
        return super()._after(verdict)

    def _write(self, temporary: Path) -> Report:
        report = super()._write(temporary)
        self.cargo.take(temporary, report["files"])
        return report


class Uploads:
    """The uploads of a checkpointer's saves, in their order, on a thread of their own.

    Invariants:
        * Each rank uploads its own files; rank 0 writes the manifest when all have.
        * One upload runs at a time. A save that waits for its turn is given up when a later one is committed,
          unless it is one of `keep_every`'s, or the best so far by rank 0's metrics; where one rank has given
          it up, none uploads it.
        * What earlier runs have committed and not uploaded comes first, the newest of it first. It is given
          up in the same way, and by `close`: the next run will find it. It is opened when its turn comes:
          what is gone by then is not wanted.
        * Nothing of a save is in memory; its files are held open while it is uploaded or waits.

    Args:
        store: Where to.
        local: Where earlier runs committed.
        run: The run's name.
        timeout: Seconds that ranks wait for each other in a save; here it is six times as long.
        log: Takes the spans.
        policy: What stays in the store.
    """

    def __init__(
        self, store: Store, local: Path, run: str, timeout: float, log: SpanLog, policy: Policy
    ) -> None:
        self._store, self._local, self._run, self._log, self._policy = store, local, run, log, policy
        self._withdrawal = Withdrawal(store, policy)
        self._quorum = Quorum(f"upload/{store.url}", PATIENCE * timeout, failure=RankFailed)
        self._lane = Lane(LANE, kind="thread")
        self._waiting: dict[int, Cargo] = {}  # by the save's number: what may be given up
        self._best: dict[int, dict[str, float]] = {}  # its metrics, by the save's number
        self._lock = threading.Lock()
        self._only_what_stays = False  # of what earlier runs have left: the rest is given up

    def submit_earlier(self, earlier: Earlier) -> Ticket[Path | None]:
        """Upload what earlier runs have left; rank 0 says what. On all ranks, before any `submit`."""
        return self._lane.submit(lambda: self._carry_out_earlier(earlier))

    def submit(self, job: LocalJob, committed: Ticket[Path | None]) -> Ticket[Path | None]:
        """Upload a save once it is committed.

        Returns:
            A ticket; its result is where it is, or None where it was given up or not committed.
        """
        number, step, cargo, metrics = job.number, job.step, job.cargo, job.metrics
        if self._policy.keep_every is None or step % self._policy.keep_every:
            with self._lock:
                self._waiting[number] = cargo
        return self._lane.submit(lambda: self._carry_out(number, step, cargo, metrics, committed))

    def give_up_before(self, number: int, metrics: dict[str, Any]) -> None:
        """This save is committed: earlier ones that still wait are not worth the time, but for the best.

        Args:
            number: The save's.
            metrics: Rank 0's, typed JSON.
        """
        self.give_up_earlier()
        with self._lock:
            if self._policy.best is not None:
                seen = self._best | {number: decode(metrics, str)}
                self._best = {best: seen[best] for best in self._policy.best.ranked(seen)[:1]}
            for other in [other for other in self._waiting if other < number and other not in self._best]:
                self._waiting.pop(other).let_go()

    def give_up_earlier(self) -> None:
        """What earlier runs have left and still waits is not worth the time, but for what stays."""
        self._only_what_stays = True

    def close(self) -> None:
        """Wait until all is done."""
        self._lane.close()
        self._quorum.leave()

    def _carry_out(
        self,
        number: int,
        step: int,
        cargo: Cargo,
        metrics: dict[str, Any],
        committed: Ticket[Path | None],
    ) -> Path | None:
        try:
            committed.settle()
            with self._lock:
                self._waiting.pop(number, None)
            if not cargo.committed or not self._wanted(f"turn/{number}", lambda: bool(cargo.paths())):
                return None
            self._upload(number, step, cargo, {"world": self._quorum.world, "metrics": metrics})
            return self._store.root / step_name(step)
        finally:
            cargo.let_go()

    def _carry_out_earlier(self, earlier: Earlier) -> Path | None:
        """One after the other, until one fails: a store that is away would take its time for each."""

        def look(_: list[Report]) -> Report:
            return {"pending": earlier.pending(self._store, self._policy)}

        for turn, one in enumerate(self._quorum.together("earlier", dict, look)["pending"]):
            with self._quorum.telling(f"turn/earlier/{turn + 1}"):  # what fails on one rank alone
                self._bring(f"turn/earlier/{turn}", Pending(*one))
        return None

    def _bring(self, turn: str, one: Pending) -> None:
        cargo = Cargo()
        about: dict[str, Any] = {}

        def held() -> bool:
            if one.stays or not self._only_what_stays:
                about.update(take(cargo, self._local, one, self._quorum.rank, self._quorum.world))
            return bool(about)

        try:
            if self._wanted(turn, held):
                self._upload(0, one.step, cargo, about)  # a number that no save of a run has
        finally:
            cargo.let_go()

    def _wanted(self, key: str, held: Callable[[], bool]) -> bool:
        """Whether no rank has given the save up."""

        def judge(reports: list[Report]) -> Report:
            return {"held": all(report["held"] for report in reports)}

        return bool(self._quorum.together(key, lambda: {"held": held()}, judge)["held"])

    def _upload(self, number: int, step: int, cargo: Cargo, about: dict[str, Any]) -> None:
        save = f"{self._run}-{number}"

        def work() -> Report:
            with self._log.host(LANE, "upload", bytes=sum(file["bytes"] for file in cargo.files.values())):
                for name, path in cargo.paths().items():
                    self._store.put_file(path, f"{step_name(step)}/{save}/{name}")
            return {"files": cargo.files}

        key = f"upload/{number}/{step}"
        publish_together(self._store, self._quorum, key, step, save, work, files_of, about)
        if self._quorum.rank == 0:
            delete_surplus(self._withdrawal, step, self._store.root / step_name(step))
