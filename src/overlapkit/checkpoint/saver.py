"""The beginning of a save: take the state apart, copy it, hand it to the background."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from overlapkit.checkpoint import rng
from overlapkit.checkpoint.job import Job, Run
from overlapkit.checkpoint.planner import Planner
from overlapkit.checkpoint.remote.upload import LocalJob
from overlapkit.checkpoint.save import Save, Unfinished
from overlapkit.checkpoint.stage import LANE, Stager, Staging
from overlapkit.lane import Lane, Ticket


class Saver:
    """Begins the saves of one checkpointer; `job` makes what the background carries out, of Job's fields.

    Invariant:
        * What was staged is released once, by whoever gets a save's claim: the background, which carries it
          out, or the call that began it and was interrupted.
    """

    def __init__(
        self,
        run: Run,
        job: Callable[..., Job],
        planner: Planner,
        stager: Stager,
        writer: Lane,
        unfinished: Unfinished,
        in_flight: int,
    ) -> None:
        self._run = run
        self._job = job
        self._unfinished = unfinished
        self._in_flight = in_flight
        self._planner = planner
        self._stager = stager
        self._writer = writer
        self._deleted: Ticket[None] | None = None

    def save(
        self, number: int, step: int, state: dict[str, Any], metrics: dict[str, Any], block: bool
    ) -> Save:
        """Begin a save, once there is room for it; `number` is the same on every rank."""
        start = time.perf_counter_ns()
        with self._run.log.host(LANE, "save", exposed=True):
            self._unfinished.make_room(self._in_flight)
            save = self._begin(number, step, state, metrics)
            self._unfinished.add(save)
            if block:
                save._settle()
        save._blocked_s = (time.perf_counter_ns() - start) / 1e9
        return save

    def settle(self) -> None:
        """Wait until what the last save has made surplus is gone."""
        if self._deleted is not None:
            self._deleted.settle()

    def prepare(self, state: dict[str, Any]) -> None:
        """Where the next save would have to plan anew, do that now, and make the memory beside the step."""
        if self._planner.is_behind(state):
            with self._run.log.host(LANE, "prepare", exposed=True):
                self.prewarm(state, beside=True)

    def prewarm(self, state: dict[str, Any], *, beside: bool) -> None:
        """Do what the first save would do: memory, plan, threads."""
        share = self._planner.take(state)
        self._stager.prewarm(share, beside=beside)
        prepared = self._writer.submit(share.plan.prepare)
        prepared.seen = True  # the next save will meet what it met
        if not beside:
            prepared.settle()

    def _begin(self, number: int, step: int, state: dict[str, Any], metrics: dict[str, Any]) -> Save:
        staging: Staging | None = None
        claim = threading.Lock()  # whoever takes it decides: the writer carries out, or this call gives up
        try:
            share = self._planner.take(state)
            generators = rng.capture()
            staging = self._stager.stage(share)
            told = self._run.every.report()
            job = self._job(self._run, number, step, share, staging, generators, metrics, told)
            committed = self._writer.submit(lambda: self._carry_out(job, claim))
            self._deleted = self._writer.submit(self._run.deletion.finish)
            uploaded = job.uploads.submit(job, committed) if isinstance(job, LocalJob) else None
            return Save(step, staging.ticket, committed, staging=staging, uploaded=uploaded)
        except BaseException as error:
            if claim.acquire(blocking=False):
                if staging is not None:
                    staging.ticket.settle()  # the copy must not run into a buffer that is lent again
                    self._stager.release(staging)
                self._tell(f"save/{number}", error)
            raise

    def _carry_out(self, job: Job, claim: threading.Lock) -> Path | None:
        if not claim.acquire(blocking=False):
            return None  # the call of save() was interrupted, and has released everything
        try:
            return job.carry_out()
        finally:
            job.staging.ticket.settle()  # what failed while it was copied must not lend the buffer again
            job.staging.ticket.seen = True  # one error is raised
            self._stager.release(job.staging)

    @contextlib.contextmanager
    def telling(self, key: str) -> Iterator[None]:
        """Whatever is raised in this block fails what the other ranks agree on under `key`, at once."""
        try:
            yield
        except BaseException as error:
            self._tell(key, error)
            raise

    def _tell(self, key: str, error: BaseException) -> None:
        """This rank does not come; the others must not wait for it. Told after what earlier saves say."""
        quorum = self._run.quorum
        if quorum.world > 1:
            ticket = self._writer.submit(lambda: quorum.fail(key, error))
            ticket.seen = True  # the caller gets the error itself
