"""FolderStore: a folder used like an object store, such as a parallel file system behind local disks."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from overlapkit.checkpoint.opening import open_directory, sync_parent
from overlapkit.checkpoint.remote.store import Store


class FolderStore(Store):
    """A folder whose files are written like objects: those that count at once, by rename, and on disk.

    Args:
        path: The folder; made where it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.url = str(path)
        self._path = path

    @property
    def root(self) -> Path:
        """The folder."""
        return self._path

    def sizes(self, folder: str) -> dict[str, int]:
        """See Store."""
        top = self._path / folder
        files = [Path(where) / name for where, _, names in os.walk(top) for name in names]
        return {str(file.relative_to(top)): file.lstat().st_size for file in files}

    def modified(self, name: str) -> datetime | None:
        """See Store."""
        return datetime.fromtimestamp((self._path / name).lstat().st_mtime, UTC)

    def put(self, name: str, data: bytes, aside: str = "") -> None:
        """See Store."""
        self.write(aside, lambda: [memoryview(data)])
        os.replace(self._path / aside, self._path / name)
        sync_parent(self._path / name)

    def put_file(self, source: str, name: str) -> None:
        """See Store."""

        def copy() -> None:
            path = self._make_room(name)
            shutil.copyfile(source, path)
            _sync(path)

        self._ask(name, copy)

    def write(self, name: str, views: Callable[[], Iterable[memoryview]]) -> None:
        """See Store."""

        def write() -> None:
            path = self._make_room(name)
            with open(path, "wb") as file:
                for view in views():
                    file.write(view)
            _sync(path)

        self._ask(name, write)

    def remove(self, names: Sequence[str]) -> None:
        """See Store. Folders that become empty go, too."""
        for name in names:
            path = self._path / name
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty
                while (path := path.parent) != self._path:
                    path.rmdir()

    def probe(self, rank: int) -> None:
        """See Store."""
        open_directory(self._path)

    def _make_room(self, name: str) -> Path:
        path = self._path / name
        missing = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        for made in missing:
            sync_parent(made)
        return path


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_parent(path)
