"""SafetensorsWriter: torch.distributed.checkpoint saves in overlapkit's format."""

import os
import threading
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from overlapkit.checkpoint.dcp.place import AtStep, Place, place_or_refusal
from overlapkit.checkpoint.dcp.saving import Saving
from overlapkit.checkpoint.dcp.share import take_share
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.errors import CheckpointError
from overlapkit.checkpoint.once import Files
from overlapkit.device import rank_and_world


class SafetensorsWriter(AtStep, StorageWriter):
    """A StorageWriter whose checkpoints appear at once, after all their bytes are on disk or in the store.

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
        path: The checkpoint to write: a path that ends in step-N, on a file system that all ranks share, or
            such a URL, as in docs/object_stores.md. None where `checkpoint_id` of each save says it.

    Raises:
        TypeError: It is no path. With several ranks this and the following is raised by the save, on all.
        ValueError: It does not end in step-N, or there is no such kind of store.
        ImportError: What reads this kind of store is not installed.
    """

    _disk = Disk()

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._place: Place | Exception | None = None
        self._mine = threading.local()  # asked: the path of a save that comes next; saving: the one that runs
        self.reset(path)

    def __reduce__(self) -> tuple[Any, ...]:
        """On its way to DCP's saving process."""
        return type(self), (self.checkpoint_id,)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins, to another checkpoint if one is given."""
        self._end()
        if checkpoint_id is not None:
            self._place = self._mine.asked = place_or_refusal(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See StorageWriter. DCP passes `rank` and `use_collectives` because there is a `kwargs`.

        Raises:
            TypeError: What was named is no path.
            ValueError: It names no checkpoint; or every rank would commit a checkpoint of its own.
        """
        place = self._mine.__dict__.pop("asked", self._place)
        if isinstance(place, Exception):
            raise place
        if place is None:
            raise ValueError("no checkpoint_id: give one to dcp.save, or a path to SafetensorsWriter")
        if not kwargs.get("use_collectives", True) and rank_and_world()[1] > 1:
            raise ValueError(
                "use_collectives=False: each rank would commit a checkpoint of its own to one path; leave it "
                "True, or give each rank its own path and no_dist=True"
            )
        self._end()  # of a save that failed on another rank
        rank = kwargs.get("rank", 0 if is_coordinator else rank_and_world()[0])
        self._mine.saving = Saving(place, rank, self._disk)

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
        self._saving.begin(len(plans))
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
        try:
            entries, file_plan, data = take_share(plan, planner)
            files = saving.write(file_plan, entries, data)
        except BaseException:
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
        files: Files = {}
        for (result,) in results:
            files |= result.storage_data
        try:
            self._saving.commit(files)
        finally:
            self._end()

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
