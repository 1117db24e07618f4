"""SafetensorsWriter: torch.distributed.checkpoint saves in overlapkit's format."""

import contextlib
import os
import threading
import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from overlapkit.checkpoint.commit import commit, tidy
from overlapkit.checkpoint.dcp.place import AtStep, checkpoint_path
from overlapkit.checkpoint.dcp.saving import Saving
from overlapkit.checkpoint.dcp.share import take_share
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.errors import CheckpointError
from overlapkit.checkpoint.stage import LANE
from overlapkit.checkpoint.writer import remove_share, write_share
from overlapkit.device import rank_and_world
from overlapkit.lane import Lane


class SafetensorsWriter(AtStep, StorageWriter):
    """A StorageWriter whose checkpoints appear by one rename, after all their bytes are on disk.

    For `dcp.save` and `dcp.async_save` (thread or process), with plan caching or without. Every rank writes
    one safetensors file and one JSON part, with checksums; rank 0 commits when all have. A checkpoint of
    the same step is replaced then, and not before. A save that fails or is killed leaves what was there;
    its files are swept by the next save into the same folder.

    Tensors need no planner; other values need `planner=SafetensorsSavePlanner()`. Tensors are copied into
    host memory a few MiB at a time, whatever device they are on.

    Invariant:
        * DCP runs a save in one thread, and each thread has its own: async saves of one writer that
          overlap do not meet.

    Args:
        path: The checkpoint to write: a path that ends in step-N, on a file system that all ranks share.
            None where `checkpoint_id` of each save says it.

    Raises:
        TypeError: It is no path.
        ValueError: It does not end in step-N.
        NotImplementedError: It is the URL of an object store.
    """

    _disk = Disk()

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path: Path | None = None
        self._mine = threading.local()  # asked: the path of a save that comes next; saving: the one that runs
        self.reset(path)

    def __reduce__(self) -> tuple[Any, ...]:
        """On its way to DCP's saving process."""
        return type(self), (self._path,)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins, to another checkpoint if one is given."""
        self._end()
        if checkpoint_id is not None:
            self._path = self._mine.asked = checkpoint_path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See StorageWriter. DCP passes `rank` and `use_collectives` because there is a `kwargs`.

        Raises:
            ValueError: No checkpoint is named; or every rank would commit a checkpoint of its own.
        """
        path = self._mine.__dict__.pop("asked", self._path)
        if path is None:
            raise ValueError("no checkpoint_id: give one to dcp.save, or a path to SafetensorsWriter")
        if not kwargs.get("use_collectives", True) and rank_and_world()[1] > 1:
            raise ValueError(
                "use_collectives=False: each rank would commit a checkpoint of its own to one path; leave it "
                "True, or give each rank its own path and no_dist=True"
            )
        self._end()  # of a save that failed on another rank
        self._mine.saving = Saving(path, kwargs.get("rank", 0 if is_coordinator else rank_and_world()[0]))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See StorageWriter."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Rank 0 makes ready, before any rank writes.

        Raises:
            ValueError: The folder above is a file.
            PermissionError: It cannot be made or written to.
            CheckpointError: Something that is no checkpoint is in the way, or ranks disagree on a tensor.
        """
        _check_agreement(plans)
        self._saving.begin(self._disk, len(plans))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share, and wait until it is on disk.

        Returns:
            Done; its one result describes the rank's files.

        Raises:
            TypeError: Something cannot be kept; the message names it.
            OSError: The file system refused.
        """
        saving = self._saving
        saving.join()
        about = {"step": saving.step, "rank": saving.rank, "world": saving.world, "rng": None}
        try:
            entries, file_plan, data = take_share(plan, planner)
            with Lane(LANE, kind="thread") as helper:
                files = write_share(self._disk, saving.temporary, file_plan, entries, data, about, helper)
        except BaseException:
            with contextlib.suppress(OSError):  # swept later; the error that led here matters more
                remove_share(self._disk, saving.temporary, saving.rank)
            self._end()
            raise
        size = sum(file["bytes"] for file in files.values())
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(f"rank-{saving.rank:05d}"), size, files)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0 commits, when every rank has written.

        Raises:
            CheckpointError: A file is not there: the ranks do not share this folder.
            OSError: The file system refused. Nothing is committed.
        """
        saving = self._saving
        saving.forget()
        files: dict[str, dict[str, Any]] = {}
        for (result,) in results:
            files |= result.storage_data
        try:
            about = {"world": saving.world, "metrics": {}}
            commit(self._disk, saving.temporary, saving.step, files, about)
            self._tidy(saving)
        except BaseException:
            with contextlib.suppress(OSError):
                self._disk.remove(saving.temporary)
            raise
        finally:
            self._end()

    def _tidy(self, saving: Saving) -> None:
        assert saving.run is not None
        try:
            tidy(self._disk, saving.path.parent, saving.run)
        except OSError as error:
            warnings.warn(
                f"{saving.path} is committed; what it replaced stays until the next save: {error}",
                stacklevel=3,
            )

    @property
    def _saving(self) -> Saving:
        saving: Saving = self._mine.saving
        return saving

    def _end(self) -> None:
        saving: Saving | None = self._mine.__dict__.pop("saving", None)
        if saving is not None:
            saving.end()


def _check_agreement(plans: list[SavePlan]) -> None:
    """Raise where ranks hold parts of one tensor that cannot be parts of one tensor."""
    first: dict[str, tuple[str, int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if (data := item.tensor_data) is not None:
                here = f"{data.properties.dtype} {tuple(data.size)}"
                there, other = first.setdefault(item.index.fqn, (here, rank))
                if here != there:
                    raise CheckpointError(
                        f"state {item.index.fqn!r} is {here} on rank {rank}, but {there} on rank {other}"
                    )
