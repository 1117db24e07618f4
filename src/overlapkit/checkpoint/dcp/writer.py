"""SafetensorsWriter: torch.distributed.checkpoint saves in overlapkit's format."""

import contextlib
import json
import os
import warnings
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from overlapkit.checkpoint.commit import RunLock, commit, sweep, tidy
from overlapkit.checkpoint.dcp.place import checkpoint_path, is_checkpoint_path
from overlapkit.checkpoint.dcp.share import take_share
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.errors import CheckpointError, RankFailed
from overlapkit.checkpoint.manifest import is_ours, step_of
from overlapkit.checkpoint.opening import open_directory
from overlapkit.checkpoint.writer import remove_share, write_share
from overlapkit.device import rank_and_world

_PATIENCE_S = 60.0
"""How long a rank looks for what rank 0 announced before it sent out the plan."""


class SafetensorsWriter(StorageWriter):
    """A StorageWriter whose checkpoints appear by one rename, after all their bytes are on disk.

    For `dcp.save` and `dcp.async_save` (thread or process), with plan caching or without. Every rank writes
    one safetensors file and one JSON part, with checksums; rank 0 commits when all have. A checkpoint of
    the same step is replaced then, and not before. A save that fails or is killed leaves what was there;
    its files are swept by the next save into the same folder.

    Tensors need no planner; other values need `planner=SafetensorsSavePlanner()`. Tensors on a device are
    copied to the host before anything is written.

    Invariants:
        * Ranks write into a folder that only this save uses: rank 0 announces its name, through the store
          of the default process group, before DCP sends out the plans.
        * Its run lock is held from then until the commit, or this rank's failure; a save that failed
          elsewhere lets go of it with the writer's next use, or with the writer.

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
        self._lock: RunLock | None = None
        self._rank = 0
        self._world = 1
        self.reset(path)

    def __reduce__(self) -> tuple[Any, ...]:
        """On its way to DCP's saving process; a lock stays where it is."""
        return type(self), (self._path,)

    @property
    def checkpoint_id(self) -> str | None:
        """The checkpoint to write; DCP's logs show it."""
        return None if self._path is None else os.fspath(self._path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path that ends in step-N."""
        return is_checkpoint_path(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins, to another checkpoint if one is given."""
        self._release()
        if checkpoint_id is not None:
            self._path = checkpoint_path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See StorageWriter. DCP passes `rank` and `use_collectives` because there is a `kwargs`.

        Raises:
            ValueError: No checkpoint is named; or every rank would commit a checkpoint of its own.
        """
        if self._path is None:
            raise ValueError("no checkpoint_id: give one to dcp.save, or a path to SafetensorsWriter")
        if not kwargs.get("use_collectives", True) and rank_and_world()[1] > 1:
            raise ValueError(
                "use_collectives=False: each rank would commit a checkpoint of its own to one path; leave it "
                "True, or give each rank its own path and no_dist=True"
            )
        self._rank = kwargs.get("rank", 0 if is_coordinator else rank_and_world()[0])

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See StorageWriter."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Rank 0 makes ready, before any rank writes.

        Raises:
            PermissionError: The folder above cannot be made or written to.
            CheckpointError: Something that is no checkpoint is in the way, or ranks disagree on a tensor.
        """
        _check_agreement(plans)
        path = self._where
        open_directory(path.parent)
        if path.exists() and not is_ours(path):
            raise CheckpointError(f"{path} exists and is no checkpoint: move it away")
        self._release()
        sweep(self._disk, path.parent)
        self._lock, self._world = RunLock(path.parent), len(plans)
        if self._world > 1:
            _store().set(_key(path), json.dumps([self._lock.run, self._world]))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share, and wait until it is on disk.

        Returns:
            Done; its one result describes the rank's files.

        Raises:
            TypeError: Something cannot be kept; the message names it.
            OSError: The file system refused.
        """
        if self._lock is None:
            run, self._world = _announced(self._where)
        else:
            run = self._lock.run
        temporary = _temporary(self._where, run)
        about = {"step": step_of(self._where.name), "rank": self._rank, "world": self._world, "rng": None}
        try:
            inventory, rows = take_share(plan, planner)
            files = write_share(self._disk, temporary, inventory, rows, about)
        except BaseException:
            with contextlib.suppress(OSError):  # swept later; the error that led here matters more
                remove_share(self._disk, temporary, self._rank)
            self._release()
            raise
        size = sum(file["bytes"] for file in files.values())
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(f"rank-{self._rank:05d}"), size, files)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0 commits, when every rank has written.

        Raises:
            CheckpointError: A file is not there: the ranks do not share this folder.
            OSError: The file system refused. Nothing is committed.
        """
        path, lock = self._where, self._lock
        assert lock is not None
        temporary = _temporary(path, lock.run)
        files = {
            name: file for rank in results for share in rank for name, file in share.storage_data.items()
        }
        step = step_of(path.name)
        assert step is not None
        try:
            commit(self._disk, temporary, step, files, {"world": self._world, "metrics": {}})
        except BaseException:
            with contextlib.suppress(OSError):
                self._disk.remove(temporary)
            self._release()
            raise
        try:
            tidy(self._disk, path.parent, lock.run)
        except OSError as error:
            warnings.warn(
                f"{path} is committed; what it replaced stays until the next save: {error}", stacklevel=2
            )
        self._release()
        if self._world > 1:
            _store().delete_key(_key(path))

    @property
    def _where(self) -> Path:
        assert self._path is not None  # set_up_storage_writer has looked
        return self._path

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _temporary(path: Path, run: str) -> Path:
    return path.parent / f".tmp-{run}-0"


def _key(path: Path) -> str:
    return f"overlapkit/dcp/{zlib.crc32(os.fspath(path).encode()):08x}"


def _store() -> Any:
    """The job's store, through a connection of our own: this may run in a thread."""
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    return store.clone()


def _announced(path: Path) -> tuple[str, int]:
    """The name of the run that rank 0 writes as, and the number of ranks."""
    store, key = _store(), _key(path)
    try:
        store.wait([key], timedelta(seconds=_PATIENCE_S))
        run, world = json.loads(store.get(key))
    except RuntimeError as error:  # DistStoreError
        raise RankFailed(
            f"rank 0 announced no save to {path} within {_PATIENCE_S:g} s: every rank must give the same "
            f"checkpoint_id ({error})"
        ) from error
    return run, world


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
