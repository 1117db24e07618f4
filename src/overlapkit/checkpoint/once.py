"""A save that DCP or an import makes, and no Checkpointer: to a folder or a store."""

import contextlib
import uuid
import warnings
from pathlib import Path
from typing import Any, Protocol

from overlapkit.checkpoint.commit import RunLock, commit, replaced, sweep
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.errors import CheckpointError
from overlapkit.checkpoint.fileplan import FilePlan
from overlapkit.checkpoint.manifest import MANIFEST, is_ours, step_name
from overlapkit.checkpoint.opening import open_directory
from overlapkit.checkpoint.remote.direct import send_share
from overlapkit.checkpoint.remote.place import StorePath
from overlapkit.checkpoint.remote.publish import abandon, publish, sweep_store
from overlapkit.checkpoint.remote.store import Store
from overlapkit.checkpoint.stage import LANE
from overlapkit.checkpoint.writer import Bytes, remove_share, stem_of, write_share
from overlapkit.lane import Lane

Files = dict[str, dict[str, Any]]


class OneSave(Protocol):
    """One save of one step. Rank 0 begins, commits and ends it; each rank writes its share.

    Attributes:
        run: Its name, which rank 0 makes in `begin` and the other ranks must be given.
    """

    run: str

    def there(self) -> bool:
        """Whether a checkpoint of this step is there."""

    def begin(self) -> None:
        """Make sure that it can be written, and sweep what dead saves left.

        Raises:
            ValueError: The folder is a file.
            PermissionError: It cannot be made or written to.
            CheckpointError: Something that is no checkpoint is in the way.
        """

    def write(self, plan: FilePlan, entries: dict[str, Any], data: Bytes, about: dict[str, Any]) -> Files:
        """Write a rank's share, and wait until it is there to stay; see `write_share`.

        Raises:
            OSError: The file system refused. What was written of this share is removed.
            StoreError: The store failed.
        """

    def commit(self, files: Files, world: int) -> Path:
        """Make a checkpoint of what all ranks have written, in place of an earlier one of this step.

        Raises:
            CheckpointError: A file is not there: the ranks do not share this folder.
            OSError: The file system refused. Nothing is committed.
        """

    def discard(self) -> None:
        """It has failed: remove what was written of it, as far as that is possible now."""

    def end(self) -> None:
        """It is over: what is left of it may be swept. Safe to call twice."""


def one_save(root: Path, step: int, disk: Disk) -> OneSave:
    """A save into a directory of checkpoints, on this disk or on a store."""
    return _StoreSave(root.store, step) if isinstance(root, StorePath) else _FolderSave(root, step, disk)


class _FolderSave:
    """Into a folder. Its lock keeps other runs from sweeping it."""

    run = ""

    def __init__(self, root: Path, step: int, disk: Disk) -> None:
        self._root, self._step, self._disk = root, step, disk
        self._final = root / step_name(step)
        self._lock: RunLock | None = None

    @property
    def _temporary(self) -> Path:
        return self._root / f".tmp-{self.run}-0"

    def there(self) -> bool:
        return self._final.exists()

    def begin(self) -> None:
        open_directory(self._root)
        if self._final.exists() and not is_ours(self._final):
            raise CheckpointError(f"{self._final} exists and is no checkpoint: move it away")
        sweep(self._disk, self._root)
        self._lock = RunLock(self._root)
        self.run = self._lock.run

    def write(self, plan: FilePlan, entries: dict[str, Any], data: Bytes, about: dict[str, Any]) -> Files:
        try:
            with Lane(LANE, kind="thread") as helper:
                return write_share(self._disk, self._temporary, plan, entries, data, about, helper)
        except BaseException:
            with contextlib.suppress(OSError):  # swept later; the error that led here matters more
                remove_share(self._disk, self._temporary, about["rank"])
            raise

    def commit(self, files: Files, world: int) -> Path:
        try:
            final = commit(self._disk, self._temporary, self._step, files, {"world": world, "metrics": {}})
        except BaseException:
            self.discard()
            raise
        try:
            for path in replaced(self._root, self.run):
                self._disk.remove(path)
        except OSError as error:
            warnings.warn(
                f"{final} is committed; what it replaced stays until the next save: {error}", stacklevel=4
            )
        return final

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._disk.remove(self._temporary)

    def end(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class _StoreSave:
    """Into a store. What a failed save leaves there is swept when it is a day old."""

    run = ""

    def __init__(self, store: Store, step: int) -> None:
        self._store, self._step = store, step

    @property
    def _folder(self) -> str:
        return f"{step_name(self._step)}/{self.run}-0"

    def there(self) -> bool:
        return (self._store.root / step_name(self._step) / MANIFEST).exists()

    def begin(self) -> None:
        self._store.probe(0)
        sweep_store(self._store)
        self.run = uuid.uuid4().hex[:12]

    def write(self, plan: FilePlan, entries: dict[str, Any], data: Bytes, about: dict[str, Any]) -> Files:
        try:
            return send_share(self._store, self._folder, plan, entries, data, about)
        except BaseException:
            abandon(self._store, self._folder, stem_of(about["rank"]))
            raise

    def commit(self, files: Files, world: int) -> Path:
        about = {"world": world, "metrics": {}}
        publish(self._store, self._step, f"{self.run}-0", files, about)
        return self._store.root / step_name(self._step)

    def discard(self) -> None:
        abandon(self._store, self._folder)

    def end(self) -> None:
        pass
