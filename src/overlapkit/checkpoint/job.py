"""The part of a save that runs in the background: write, report, commit, delete what is surplus."""

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlapkit.checkpoint import rng
from overlapkit.checkpoint.commit import RunLock, commit
from overlapkit.checkpoint.deletion import Deleting, delete_surplus
from overlapkit.checkpoint.disk import Disk, saying_what_has_no_room
from overlapkit.checkpoint.errors import RankFailed
from overlapkit.checkpoint.every import Every
from overlapkit.checkpoint.manifest import step_name
from overlapkit.checkpoint.planner import Share
from overlapkit.checkpoint.stage import LANE, Staging
from overlapkit.checkpoint.writer import remove_share, write_share
from overlapkit.lane import Lane
from overlapkit.quorum import Quorum, Report
from overlapkit.span import SpanLog


@dataclass(frozen=True)
class Run:
    """What all saves of one checkpointer share."""

    root: Path
    name: str
    quorum: Quorum
    disk: Disk
    log: SpanLog
    helper: Lane
    deletion: Deleting
    every: Every
    lock: RunLock | None  # held as long as a save runs, should the checkpointer be forgotten


@dataclass(frozen=True)
class Job:
    """One save, taken apart and on its way into host memory.

    Attributes:
        run: The checkpointer's.
        number: Of the call of save() that began it; the same on every rank.
        step: The step.
        share: What this rank writes of the state.
        staging: Its tensors.
        generators: The random generators' states.
        metrics: Typed JSON.
        about_rank: What this rank says of itself beside its share.
        began: Of `time.monotonic`.
    """

    run: Run
    number: int
    step: int
    share: Share
    staging: Staging
    generators: dict[str, Any]
    metrics: dict[str, Any]
    about_rank: Report
    began: float = field(default_factory=time.monotonic)

    def carry_out(self) -> Path:
        """Write, and commit when every rank has written.

        Returns:
            The committed checkpoint.

        Raises:
            RankFailed: Another rank could not; nothing was committed.
            Exception: This rank could not; nothing was committed on any.
        """
        run = self.run
        temporary = run.root / f".tmp-{run.name}-{self.number}"
        try:
            verdict = run.quorum.together(
                f"save/{self.number}",
                lambda: self._write(temporary),
                lambda reports: self._commit(temporary, reports),
            )
        except BaseException as error:
            with contextlib.suppress(OSError):  # swept later; the error that led here matters more
                if run.quorum.rank == 0:
                    run.disk.remove(temporary)
                elif not getattr(error, "undecided", False):  # rank 0 may be about to commit these files
                    remove_share(run.disk, temporary, run.quorum.rank)  # a late rank makes the folder anew
            raise
        return self._after(verdict)

    def _after(self, verdict: Report) -> Path:
        """What follows the commit, on every rank."""
        self.run.every.follow(verdict)
        final = self.run.root / step_name(self.step)
        if self.run.quorum.rank == 0:
            delete_surplus(self.run.deletion, self.step, final)
        return final

    def _write(self, temporary: Path) -> Report:
        data, nbytes = self.staging.ahead(), self.share.plan.nbytes
        about = self._about()
        with (
            self.run.log.host(LANE, "write", bytes=nbytes),
            saying_what_has_no_room(f"step-{self.step}", self.run.root, nbytes),
        ):
            files = write_share(
                self.run.disk,
                temporary,
                self.share.plan,
                self.share.entries,
                data,
                about,
                self.run.helper,
            )
        self.staging.memory()  # is what was written what there was at the save?
        return self._report(files)

    def _report(self, files: dict[str, dict[str, Any]]) -> Report:
        plain = self.share.plan.plain_tensors
        return {"step": self.step, "files": files, "plain": plain, **self.about_rank}

    def _about(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "rank": self.run.quorum.rank,
            "world": self.run.quorum.world,
            "rng": rng.typed(self.generators),
        }

    def _commit(self, temporary: Path, reports: list[Report]) -> Report:
        with self.run.log.host(LANE, "commit"):
            commit(self.run.disk, temporary, self.step, self._agreed(reports), self._about_all())
        return self._verdict(reports)

    def _verdict(self, reports: list[Report]) -> Report:
        """What rank 0 says to all when a save is committed."""
        return self.run.every.decide(self.number, time.monotonic() - self.began, reports)

    def _about_all(self) -> dict[str, Any]:
        return {"world": self.run.quorum.world, "metrics": self.metrics}

    def _agreed(self, reports: list[Report]) -> dict[str, dict[str, Any]]:
        """The files of all ranks, which must have saved the same."""
        for rank, report in enumerate(reports):
            if report["step"] != self.step:
                raise RankFailed(f"rank {rank} saved step {report['step']}, rank 0 step {self.step}")
            if report["plain"] != reports[0]["plain"]:
                raise RankFailed(
                    f"rank {rank} has other plain (not DTensor) tensors in its modules or optimizers than "
                    "rank 0: they would be lost, as rank 0 writes plain tensors for all ranks"
                )
        return files_of(reports)


def files_of(reports: list[Report]) -> dict[str, dict[str, Any]]:
    """The files that all ranks have reported."""
    return {name: file for report in reports for name, file in report["files"].items()}
