"""Checkpointer: saves beside the step, and restores whole checkpoints or none."""

import atexit
import functools
import itertools
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from overlapkit.checkpoint import rng
from overlapkit.checkpoint.collector import collector_paused
from overlapkit.checkpoint.commit import RunLock, sweep
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.errors import RankFailed
from overlapkit.checkpoint.job import Job, Run, sound_steps
from overlapkit.checkpoint.layout import check_state
from overlapkit.checkpoint.opening import check_metrics, check_options, check_step, open_directory
from overlapkit.checkpoint.planner import Planner
from overlapkit.checkpoint.restorer import Restorer
from overlapkit.checkpoint.save import Save, Unfinished, not_due
from overlapkit.checkpoint.stage import LANE, Stager, Staging
from overlapkit.checkpoint.verification import verify
from overlapkit.device import rank_and_world
from overlapkit.lane import Lane
from overlapkit.quorum import Quorum, Report
from overlapkit.span import Span, SpanLog


class Checkpointer:
    """Saves a training state beside the step, and restores it bit for bit.

    A checkpoint is a folder `step-N` that appears by one rename, after all its bytes are on disk: a crash at
    any instant leaves the old ones or the new one. Its tensors are safetensors files, all else is JSON;
    nothing is ever unpickled.

    With several ranks every rank makes the same calls, on a directory that all of them share. A save uses
    no collectives: the ranks report through the store of the default process group. Close it before that
    group is destroyed.

    What is saved, beside the random generators of torch (CPU and current device), numpy and random:
        * Modules and optimizers: their state_dict. DTensors by shards, replicated tensors by rank 0. They
          can be restored at any world size. DistributedDataParallel and torch.compile make no difference.
        * Objects with state_dict and load_state_dict (schedulers, loaders), tensors and plain values: each
          rank its own. At another world size every rank gets rank 0's, and generators only where there was
          a rank of the same number.

    Invariants:
        * With stage="late", parameters and state of an optimizer in the state are copied during the next
          forward and backward, and its next step begins after that copy. They must change in its step
          only until `Save.staged` is done: a change that moves the tensor's version counter fails the save.
          Changes through `.data` or by kernels of your own move none, and go unseen; and so does one to a
          single tensor of an optimizer's state, right after a save of hundreds of them (see late.py).
        * A save takes the state apart only where it has other tensors than at the save before. That, the
          threads, and memory for the copies are made by `restore`, else by the first `save` that is not due,
          else by the first that is: fresh pages cost twenty times the copy, and a save is on the critical
          path. Memory is touched beside the step then; it is this rank's share, times `in_flight`.
        * Everything else is copied before `save` returns; so are parameters of an optimizer that is
          capturable or runs in backward, whose steps pass no hook.
        * At most `in_flight` saves are in memory, each once.
        * A failed save changes nothing on disk. Its error is raised by its tickets and, where nobody
          waited for those, once by the next `save`, `wait` or `close`; that `save` has begun nevertheless.

    Args:
        directory: Where the checkpoints are. Made if it does not exist.
        every: Save only at multiples of this step; None saves at every call.
        keep: How many of the newest checkpoints stay, at least 1; None keeps all.
        keep_every: Multiples of this step stay for ever; needs `keep`.
        best: Not there yet.
        in_flight: How many saves may be unfinished; one more waits in `save`.
        stage: "late" or "now" (everything is copied inside `save`).
        timeout: Seconds that ranks wait for each other in a save or a restore.

    Raises:
        ValueError: An argument is out of range, or the directory is a file.
        PermissionError: The directory cannot be written to.
        RuntimeError: WORLD_SIZE is set and there is no process group.
    """

    _disk = Disk()

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int | None = None,
        keep_every: int | None = None,
        best: str | None = None,
        in_flight: int = 1,
        stage: Literal["late", "now"] = "late",
        timeout: float = 600.0,
    ) -> None:
        check_options(directory, every, keep, keep_every, best, in_flight, stage, timeout)
        self._every, self._in_flight = every, in_flight
        self._root = Path(directory)
        self._quorum = Quorum(f"checkpoint/{os.fspath(directory)}", timeout, failure=RankFailed)
        self._lock: RunLock | None = None
        opened = self._quorum.together("open", self._open, self._open_run)
        self._log = SpanLog()
        self._writer, self._helper = Lane(LANE, kind="thread"), Lane(LANE, kind="thread")
        self._run = Run(
            self._root, opened["run"], self._quorum, self._disk, self._log, self._helper, keep, keep_every
        )
        self._planner = Planner(self._quorum.rank, late=stage == "late")
        self._stager = Stager(in_flight, self._log)
        self._unfinished = Unfinished(self._log)
        self._restorer = Restorer(self._root, self._quorum, self._stager, self._helper)
        self._saves = itertools.count()
        self._closing = False
        self._closed = False
        self._unseen: list[BaseException] = []
        self._pid = os.getpid()
        at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        self._at_exit = weakref.finalize(self, atexit.unregister, at_exit)
        self._at_exit.atexit = False
        atexit.register(at_exit)

    def save(
        self,
        step: int,
        state: dict[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        block: bool = False,
    ) -> Save:
        """Begin to save a state, and return before it is written.

        Args:
            step: The training step that the state stands at, 0 or more. An existing checkpoint of that step
                is replaced.
            state: Modules, optimizers, objects with state_dict and load_state_dict, tensors and plain
                values, by name.
            metrics: Numbers to keep beside it.
            block: Return only when it is committed.

        Returns:
            Its handle; `Save.due` is False where `every` skipped it.

        Raises:
            TypeError: Something in the state cannot be kept; the message names it. Nothing is saved.
            Exception: An earlier save has failed (this one has begun), or, with `block`, this one.
        """
        self._check_open()
        step, kept_metrics = check_step(step), check_metrics(metrics)
        check_state(state)
        if self._every is not None and step % self._every:
            self._unfinished.surface()
            if not len(self._unfinished) and self._planner.is_behind(state):
                with self._log.host(LANE, "prepare", exposed=True):
                    self._prewarm(state, beside=True)
            return not_due(step)
        start = time.perf_counter_ns()
        with self._log.host(LANE, "save", exposed=True):
            self._unfinished.make_room(self._in_flight)
            save = self._begin(step, state, kept_metrics)
            self._unfinished.add(save)
            if block:
                save.committed.settle()
        save._blocked_s = (time.perf_counter_ns() - start) / 1e9
        self._unfinished.surface(None if block else save)
        return save

    def restore(
        self,
        state: dict[str, Any],
        step: int | Literal["latest"] = "latest",
        *,
        only: tuple[str, ...] | None = None,
        strict: bool = True,
    ) -> int:
        """Put a checkpoint into a state, in place; plain values are replaced in the dict.

        The state is changed only when everything that it takes has been read and checked, on all ranks.
        Afterwards the memory that saves will take is held ready.

        Args:
            state: What was given to `save`, newly built. Optimizers need not have taken a step.
            step: Which checkpoint; "latest" falls back to the newest sound one, with a warning.
            only: The keys to restore, such as ("model",); generators are then left alone.
            strict: Raise where state and checkpoint do not fit; otherwise warn, and restore what does.

        Returns:
            The step restored, 0 where "latest" finds none.

        Raises:
            FileNotFoundError: There is no checkpoint of this step.
            DamagedCheckpoint: It is damaged; with "latest", all of them are.
            MismatchError: Missing or unexpected keys, other shapes or dtypes.
        """
        self._check_open()
        check_state(state)
        if only is not None and not (
            isinstance(only, tuple | list | set) and all(isinstance(key, str) for key in only)
        ):
            raise TypeError(f"only={only!r}: give a tuple of keys, such as ('model',)")
        if step != "latest":
            check_step(step)
        if absent := [key for key in only or () if key not in state]:
            raise ValueError(
                f"only={only!r}: the state has no {', '.join(map(repr, absent))}, but {list(state)}"
            )
        self._unfinished.settle()
        self._planner.forget()
        with collector_paused():
            restored = self._restorer.restore(state, step, only, strict)
            if only is None:
                self._prewarm(state, beside=False)
        return restored

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, ascending: those with a sound manifest and all files."""
        return sound_steps(self._root)

    def latest(self) -> int | None:
        """The highest of `steps()`, or None."""
        return max(self.steps(), default=None)

    def verify(self, step: int) -> None:
        """Read a whole checkpoint against its checksums.

        Raises:
            FileNotFoundError: There is none of this step.
            DamagedCheckpoint: Something differs; the message names file, tensor and bytes.
        """
        verify(self._root, check_step(step))

    def wait(self) -> None:
        """Block until all saves are committed.

        Raises:
            Exception: Whatever made one of them fail, once.
        """
        self._unfinished.settle()
        self._unfinished.surface()

    def timings(self) -> list[Span]:
        """The spans finished since the last call, lane "checkpoint".

        Exposed are save (the call) and wait for staging (in the optimizer's step). Beside the step run
        stage and write (with bytes), and commit.
        """
        return self._log.take()

    def close(self) -> None:
        """Finish all saves, free the memory, take the hooks out of the optimizers. Safe to call twice.

        When it is interrupted, no more saves can begin, and the next call goes on with it. At the exit of
        the interpreter, whatever is still open is closed.

        Raises:
            Exception: Whatever made a save fail, unless it was raised before.
        """
        if self._closed:
            return
        self._closing = True
        self._unfinished.settle()
        self._unseen += self._unfinished.unseen()
        self._writer.close()
        self._helper.close()
        self._planner.forget()
        self._stager.close()
        self._quorum.leave()
        if self._lock is not None:
            self._lock.release()
        self._closed = True
        self._at_exit()
        errors, self._unseen = self._unseen, []
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"another save failed, too: {other!r}")
            raise errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as late:
            if error is None:
                raise
            error.add_note(f"a save also failed: {late!r}")

    def _open(self) -> Report:
        open_directory(self._root)
        return {}

    def _open_run(self, reports: list[Report]) -> Report:
        """Rank 0's share of the construction."""
        try:
            sweep(self._disk, self._root)
            self._lock = RunLock(self._root)
        except OSError as error:
            raise PermissionError(f"directory={str(self._root)!r} cannot be written to: {error}") from error
        return {"run": self._lock.run}

    def _check_open(self) -> None:
        if self._closing:
            raise RuntimeError("this Checkpointer is closed: make a new one")
        if rank_and_world() != (self._quorum.rank, self._quorum.world):
            raise RuntimeError(
                "the process group is not the one that this Checkpointer was made in: make it after "
                "init_process_group(), and a new one after each"
            )

    def _prewarm(self, state: dict[str, Any], *, beside: bool) -> None:
        """Do what the first save would do: memory, plan, threads."""
        share = self._planner.take(state)
        self._stager.prewarm(share, beside=beside)
        prepared = self._writer.submit(share.plan.prepare)
        prepared.seen = True  # the next save will meet what it met
        if not beside:
            prepared.settle()

    def _begin(self, step: int, state: dict[str, Any], metrics: dict[str, Any]) -> Save:
        number = next(self._saves)
        staging: Staging | None = None
        claim = threading.Lock()  # whoever takes it decides: the writer carries out, or this call gives up
        try:
            share = self._planner.take(state)
            generators = rng.capture()
            staging = self._stager.stage(share)
            job = Job(self._run, number, step, share, staging, generators, metrics)
            committed = self._writer.submit(lambda: self._carry_out(job, claim))
            return Save(step, staging.ticket, committed, staging=staging)
        except BaseException as error:
            if claim.acquire(blocking=False):
                if staging is not None:
                    staging.ticket.settle()  # the copy must not run into a buffer that is lent again
                    self._stager.release(staging)
                self._report_failure(number, error)
            raise

    def _carry_out(self, job: Job, claim: threading.Lock) -> Path | None:
        if not claim.acquire(blocking=False):
            return None  # the call of save() was interrupted, and has released everything
        try:
            return job.carry_out()
        finally:
            self._stager.release(job.staging)

    def _report_failure(self, number: int, error: BaseException) -> None:
        """This rank's save did not begin; the others must not wait for it."""
        if self._quorum.world > 1:

            def fail() -> Report:
                raise error

            ticket = self._writer.submit(lambda: self._quorum.together(f"save/{number}", fail, _nothing))
            ticket.seen = True  # the caller gets the error from save() itself


def _close_at_exit(alive: "weakref.ref[Checkpointer]") -> None:
    """Finish what was left open, before the lanes' own hook, which has less patience than a slow disk."""
    checkpointer = alive()
    if checkpointer is None or checkpointer._pid != os.getpid():
        return
    try:
        checkpointer.close()
    except Exception as error:
        print(f"overlapkit: a save to {checkpointer._root} failed at exit:", file=sys.stderr)
        traceback.print_exception(error)


def _nothing(reports: list[Report]) -> Report:
    return {}
