"""One save: the folder that it writes into, which rank 0 makes known to all ranks."""

import contextlib
import json
import zlib
from datetime import timedelta
from typing import Any

from overlapkit.checkpoint.dcp.place import Place
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.errors import RankFailed
from overlapkit.checkpoint.fileplan import FilePlan
from overlapkit.checkpoint.once import Files, one_save
from overlapkit.checkpoint.writer import Bytes

_PATIENCE_S = 60.0
"""How long a rank looks for what rank 0 announced before DCP sent out the plans."""


class Saving:
    """One save of one checkpoint, on one rank.

    Invariants:
        * Nobody else writes into its folder, nor sweeps it: the folder is that of a run of its own.
        * The ranks agree on it through the store of the default process group. DCP's plans cannot carry
          it: a planner that caches them hands out those of an earlier save.

    Attributes:
        rank: This rank, in the group that saves.
    """

    def __init__(self, place: Place, rank: int, disk: Disk) -> None:
        self.rank = rank
        self._place = place
        self._save = one_save(place.root, place.step, disk)
        self._world = 1

    def begin(self, world: int) -> None:
        """Rank 0 makes ready, before any rank writes. Raises what `OneSave.begin` does."""
        self._save.begin()
        self._world = world
        if world > 1:
            _store().set(self._key, json.dumps([self._save.run, world]))

    def write(self, plan: FilePlan, entries: dict[str, Any], data: Bytes) -> Files:
        """Write this rank's share. Raises what `OneSave.write` does."""
        about = {"step": self._place.step, "rank": self.rank, "world": self._world, "rng": None}
        return self._save.write(plan, entries, data, about)

    def join(self) -> None:
        """The other ranks find out where to write.

        Raises:
            RankFailed: Rank 0 saves to another path.
        """
        if self._save.run:
            return
        store = _store()
        try:
            store.wait([self._key], timedelta(seconds=_PATIENCE_S))
            self._save.run, self._world = json.loads(store.get(self._key))
        except RuntimeError as error:  # DistStoreError
            raise RankFailed(
                f"rank 0 announced no save to {self._place.folder} within {_PATIENCE_S:g} s: every rank must "
                f"give the same checkpoint_id ({error})"
            ) from error

    def commit(self, files: Files) -> None:
        """Rank 0 commits what all have written. Raises what `OneSave.commit` does."""
        self._forget()
        self._save.commit(files, self._world)

    def end(self) -> None:
        """It is committed, or has failed: what is left of it may be swept. Safe to call twice."""
        self._save.end()

    def _forget(self) -> None:
        """All ranks have written: rank 0 takes back what it announced."""
        if self._world > 1:
            with contextlib.suppress(RuntimeError):  # a store that is gone has forgotten
                _store().delete_key(self._key)

    @property
    def _key(self) -> str:
        return f"overlapkit/dcp/{zlib.crc32(str(self._place.folder).encode()):08x}"


def _store() -> Any:
    """The job's store, through a connection of our own: a save may run in a thread."""
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    return store.clone()
