"""One save: the folder that it writes into, which rank 0 makes known to all ranks."""

import contextlib
import json
import os
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

from overlapkit.checkpoint.commit import RunLock, sweep
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.errors import CheckpointError, RankFailed
from overlapkit.checkpoint.manifest import is_ours, step_of
from overlapkit.checkpoint.opening import open_directory

_PATIENCE_S = 60.0
"""How long a rank looks for what rank 0 announced before DCP sent out the plans."""


class Saving:
    """One save of one checkpoint, on one rank.

    Invariants:
        * Nobody else writes into its folder, nor sweeps it: the folder is that of a run of its own, whose
          lock rank 0 holds.
        * The ranks agree on it through the store of the default process group. DCP's plans cannot carry
          it: a planner that caches them hands out those of an earlier save.

    Attributes:
        path: The checkpoint.
        step: Its step.
        rank: This rank, in the group that saves.
        world: How many ranks save.
    """

    def __init__(self, path: Path, rank: int) -> None:
        step = step_of(path.name)
        assert step is not None  # checkpoint_path has looked
        self.path, self.step, self.rank, self.world = path, step, rank, 1
        self.run: str | None = None
        self._lock: RunLock | None = None

    @property
    def temporary(self) -> Path:
        """The folder, until the commit."""
        assert self.run is not None
        return self.path.parent / f".tmp-{self.run}-0"

    def begin(self, disk: Disk, world: int) -> None:
        """Rank 0 makes ready, before any rank writes.

        Raises:
            ValueError: The folder above is a file.
            PermissionError: It cannot be made or written to.
            CheckpointError: Something that is no checkpoint is in the way.
        """
        root = self.path.parent
        open_directory(root)
        if self.path.exists() and not is_ours(self.path):
            raise CheckpointError(f"{self.path} exists and is no checkpoint: move it away")
        sweep(disk, root)
        self._lock = RunLock(root)
        self.run, self.world = self._lock.run, world
        if world > 1:
            _store().set(self._key, json.dumps([self.run, world]))

    def join(self) -> None:
        """The other ranks find out where to write.

        Raises:
            RankFailed: Rank 0 saves to another path.
        """
        if self.run is not None:
            return
        store = _store()
        try:
            store.wait([self._key], timedelta(seconds=_PATIENCE_S))
            self.run, self.world = json.loads(store.get(self._key))
        except RuntimeError as error:  # DistStoreError
            raise RankFailed(
                f"rank 0 announced no save to {self.path} within {_PATIENCE_S:g} s: every rank must give the "
                f"same checkpoint_id ({error})"
            ) from error

    def end(self) -> None:
        """It is committed, or has failed: what is left of it may be swept. Safe to call twice."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def forget(self) -> None:
        """All ranks have written: rank 0 takes back what it announced."""
        if self.world > 1:
            with contextlib.suppress(RuntimeError):  # a store that is gone has forgotten
                _store().delete_key(self._key)

    @property
    def _key(self) -> str:
        return f"overlapkit/dcp/{zlib.crc32(os.fspath(self.path).encode()):08x}"


def _store() -> Any:
    """The job's store, through a connection of our own: a save may run in a thread."""
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    return store.clone()
