"""Checkpointer: saves beside the step, and restores whole checkpoints or none."""

import os
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

from torch.optim import Optimizer

from overlapkit.checkpoint.at_exit import close_at_exit
from overlapkit.checkpoint.auto import schedule
from overlapkit.checkpoint.branch import Branch
from overlapkit.checkpoint.collector import collector_paused
from overlapkit.checkpoint.commit import RunLock
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.errors import RankFailed
from overlapkit.checkpoint.job import Run
from overlapkit.checkpoint.layout import check_state, without_wrappers
from overlapkit.checkpoint.opening import (
    check_alike,
    check_best,
    check_metrics,
    check_only,
    check_options,
    check_step,
    check_which,
    open_run,
)
from overlapkit.checkpoint.planner import Planner
from overlapkit.checkpoint.preemptible import Preemptible
from overlapkit.checkpoint.remote.earlier import Earlier
from overlapkit.checkpoint.restorer import Restorer
from overlapkit.checkpoint.retention import Policy
from overlapkit.checkpoint.save import Save, Unfinished, not_due
from overlapkit.checkpoint.saver import Saver
from overlapkit.checkpoint.shelf import Shelf
from overlapkit.checkpoint.stage import LANE, Stager
from overlapkit.checkpoint.tiers import Tiers
from overlapkit.device import rank_and_world
from overlapkit.lane import Lane
from overlapkit.options import named_options
from overlapkit.quorum import Quorum, Report
from overlapkit.span import Span, SpanLog


class Checkpointer(Shelf, Preemptible):
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
        directory: Where the checkpoints are: a path, which is made if it does not exist, or an fsspec URL
            such as "s3://bucket/run" (docs/object_stores.md says what holds there).
        local: A directory before it, such as "/nvme/run", that all ranks share. Saves are committed there as
            anywhere, and uploaded behind training; so is, first, what a run that died had not uploaded yet.
        every: Save only at multiples of this step; None saves at every call. "auto" counts calls of `save`,
            and saves as often as costs least: see Auto in auto.py. `Save.due` tells whether a call was one.
        mtbf: With every="auto", the mean time between failures of the whole job, in seconds.
        keep: How many of the newest verified checkpoints stay, at least 1; None keeps all. Verified are those
            that this run wrote, restored whole, or read through: after a restart the old ones stay until that
            many newer ones are there.
        keep_every: Multiples of this step stay for ever; needs `keep`.
        best: The best by one of the `metrics` stays, too: `best="val_loss"` (or another name with "loss" in
            it) is the lowest, `best=("val_acc", "max")` the highest. Rank 0's metrics count; NaN never wins.
        in_flight: How many saves may be unfinished; one more waits in `save`.
        stage: "late" or "now" (everything is copied inside `save`).
        timeout: Seconds that ranks wait for each other in a save or a restore.

    Raises:
        ValueError: An argument is out of range, or the directory is a file.
        PermissionError: The directory, or the store, cannot be written to.
        ImportError: fsspec, or its package for the URL, is not installed.
        RuntimeError: WORLD_SIZE is set and there is no process group.
    """

    _disk = Disk()

    @named_options
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        local: str | os.PathLike[str] | None = None,
        every: int | Literal["auto"] | None = None,
        mtbf: float | None = None,
        keep: int | None = None,
        keep_every: int | None = None,
        best: str | tuple[str, Literal["min", "max"]] | None = None,
        in_flight: int = 1,
        stage: Literal["late", "now"] = "late",
        timeout: float = 600.0,
    ) -> None:
        self._quorum = Quorum("checkpoint", failure=RankFailed)
        with self._quorum.telling("open"):
            check_options(directory, every, mtbf, keep, keep_every, in_flight, stage, timeout, local)
            self._best = check_best(best)
            self._every = schedule(every, mtbf, in_flight)
        self._quorum.timeout = timeout
        self._given: Report = {"directory": os.fsdecode(directory), "every": every}
        self._lock: RunLock | None = None
        self._earlier = Earlier()
        opened = self._quorum.together("open", lambda: self._open(directory, local), self._open_run)
        self._tiers.check_shared(self._quorum, f".run-{opened['run']}.lock")
        self._log = SpanLog()
        self._writer, self._helper = Lane(LANE, kind="thread"), Lane(LANE, kind="thread")
        name, policy = opened["run"], Policy(keep, keep_every, self._best)
        self._deletion = self._tiers.deletion(
            self._disk, name, policy if self._quorum.rank == 0 else Policy()
        )
        self._run = Run(
            self._tiers.root,
            name,
            self._quorum,
            self._disk,
            self._log,
            self._helper,
            self._deletion,
            self._every,
            self._lock,
        )
        self._uploads = self._tiers.uploads(name, timeout, self._log, policy)
        self._planner = Planner(self._quorum.rank, late=stage == "late")
        self._stager = Stager(in_flight, self._log)
        self._unfinished, self._unsent = Unfinished(self._log), Unfinished(self._log)
        self._restorer = Restorer(self._tiers.places, self._best, self._quorum, self._stager, self._helper)
        job = partial(self._tiers.job, self._uploads)
        self._saver = Saver(
            self._run, job, self._planner, self._stager, self._writer, self._unfinished, in_flight
        )
        self._calls = 0
        self._closing = self._closed = False
        self._pid = os.getpid()
        self._unseen: list[BaseException] = []
        self._stay_open = close_at_exit(self, self._tiers.root)
        if self._uploads is not None and opened["earlier"]:
            sent = self._uploads.submit_earlier(self._earlier)
            self._unsent.add(Save(0, not_due(0).staged, sent))
        del self._earlier  # the manifests of all that is there

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
            metrics: Numbers to keep beside it. With `best=`, the one that it names must be among them, or
                there must be none (it was not evaluated). A save that is not due keeps none.
            block: Return only when it is committed.

        Returns:
            Its handle; `Save.due` is False where `every` skipped it.

        Raises:
            TypeError: Something in the state cannot be kept; the message names it. Nothing is saved.
            ValueError: The metrics lack the one that `best=` names.
            Exception: An earlier save has failed (this one has begun), or, with `block`, this one.
        """
        self._check_open()
        self._calls += 1  # the number of a save: every rank makes the same calls
        with self._saver.telling(f"save/{self._calls}"):
            step, kept_metrics = check_step(step), check_metrics(metrics, self._best)
            check_state(state)
            state = without_wrappers(state)
        leaving = self._preemption is not None and self._preemption.is_now(self._calls)
        if not self._every.enter(self._calls, step) and not leaving:
            self._unfinished.surface()
            self._unsent.surface()
            if not len(self._unfinished):
                self._saver.prepare(state)
            self._every.leave(None, len(self._unfinished) > 0)
            return not_due(step)
        if self._lock is not None:
            self._lock.saves()
        save = self._saver.save(self._calls, step, state, kept_metrics, block)
        sent = None if save.uploaded is None else Save(step, save.staged, save.uploaded)
        if sent is not None:
            self._unsent.add(sent)
        if leaving and self._preemption is not None:
            self._preemption.finish(save, self)
        if self._quorum.rank == 0:
            self._branch.saves(step)
        self._unfinished.surface(None if block else save)
        self._unsent.surface(sent)
        self._every.leave(save, len(self._unfinished) > 0)
        return save

    def restore(
        self,
        state: dict[str, Any],
        step: int | Literal["latest", "best"] = "latest",
        *,
        only: tuple[str, ...] | None = None,
        strict: bool = True,
    ) -> int:
        """Put a checkpoint into a state, in place; plain values are replaced in the dict.

        The state is changed only when everything that it takes has been read and checked, on all ranks.
        Afterwards the memory that saves will take is held ready.

        Args:
            state: What was given to `save`, newly built. Optimizers need not have taken a step.
            step: Which checkpoint; "latest" falls back to the newest sound one, with a warning, and "best"
                (see `best=`) to the next best.
            only: The keys to restore, such as ("model",); generators are then left alone.
            strict: Raise where state and checkpoint do not fit; otherwise warn, and restore what does.

        Returns:
            The step restored, 0 where "latest" finds none.

        Raises:
            FileNotFoundError: There is no checkpoint of this step, or none with the metric of `best=`.
            DamagedCheckpoint: It is damaged; with "latest" or "best", all of them are.
            MismatchError: Missing or unexpected keys, other shapes or dtypes.
        """
        self._check_open()
        with self._saver.telling(self._restorer.begin()):
            check_state(state)
            check_only(only, state)
            check_which(step, self._best)
            inner = without_wrappers(state)
        self._unfinished.settle()
        self._planner.forget()
        with collector_paused():
            restored = self._restorer.restore(inner, step, only, strict)
            if only is None:
                self._saver.prewarm(inner, beside=False)
        state.update({key: value for key, value in inner.items() if not isinstance(value, Optimizer)})
        if step == "latest":
            self._branch.restored(restored)
        if self._restorer.read_all:
            self._deletion.read_whole(restored)
        return restored

    def wait(self) -> None:
        """Block until all saves are committed, and with `local=` uploaded; so is then what earlier runs left.

        What is surplus is gone by then.

        Raises:
            CheckpointError: It cannot be deleted.
            Exception: Whatever made one of the saves fail, once.
        """
        self._unfinished.settle()
        self._saver.settle()
        self._unsent.settle()
        self._unfinished.surface()
        self._unsent.surface()
        if undeleted := self._deletion.unseen():
            raise undeleted[0]

    def timings(self) -> list[Span]:
        """The spans finished since the last call, lane "checkpoint".

        Exposed are save (the call) and wait for staging (in the optimizer's step). Beside the step run
        stage, write and upload (with bytes), and commit.
        """
        return self._log.take()

    def close(self) -> None:
        """Finish all saves and their uploads, free the memory, take the hooks out of the optimizers.

        Of what earlier runs have left to upload it waits for the one that has begun and for what stays for
        ever. Safe to call twice. When it is interrupted, no more saves can begin, and the next call goes on
        with it. At the exit of the interpreter, whatever is still open is closed.

        Raises:
            Exception: Whatever made a save fail, unless it was raised before.
        """
        if self._closed or self._pid != os.getpid():  # in a forked child all of it is the parent's
            return
        self._closing = True
        if self._preemption is not None:
            self._preemption.retire()
        if self._uploads is not None:
            self._uploads.give_up_earlier()
        self._unfinished.settle()
        self._unsent.settle()
        self._unseen += self._unfinished.unseen() + self._unsent.unseen()
        self._writer.close()
        if self._uploads is not None:
            self._uploads.close()
        self._helper.close()
        self._deletion.close()
        self._unseen += self._deletion.unseen()
        self._planner.forget()
        self._stager.close()
        self._quorum.leave()
        if self._lock is not None:
            self._lock.release()
        self._closed = True
        self._stay_open()
        if self._preemption is not None:
            self._preemption.close()
        errors, self._unseen = self._unseen, []
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"another save failed, too: {other!r}")
            raise errors[0]

    def __reduce__(self) -> NoReturn:
        raise TypeError(  # two would close one file descriptor, the lock's
            "a Checkpointer cannot be copied or pickled: its lock and its threads belong to it alone. Keep "
            "it out of what is copied (a module's attributes, say), and make one in each process that saves"
        )

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

    def _open(self, directory: str | os.PathLike[str], local: str | os.PathLike[str] | None) -> Report:
        self._tiers = Tiers(directory, local)
        self._tiers.open(self._quorum.rank)
        self._branch = Branch(self._tiers.places)
        return self._given

    def _open_run(self, reports: list[Report]) -> Report:
        """Rank 0's share of the construction."""
        check_alike(reports)
        run = self._tiers.sweep()
        if not self._tiers.direct:
            self._lock = open_run(self._disk, self._tiers.root)
            run = self._lock.run
        self._earlier = self._tiers.earlier(run)
        self._branch.open()
        return {"run": run, "earlier": bool(self._earlier.there)}

    def _check_open(self) -> None:
        if self._closing:
            raise RuntimeError("this Checkpointer is closed: make a new one")
        if rank_and_world() != (self._quorum.rank, self._quorum.world):
            raise RuntimeError(
                "the process group is not the one that this Checkpointer was made in: make it after "
                "init_process_group(), and a new one after each"
            )
        if self._pid != os.getpid():
            raise RuntimeError(
                f"this Checkpointer was made in process {self._pid}, before the fork, and its files are that "
                "process's: make one here"
            )
