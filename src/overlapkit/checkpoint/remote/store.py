"""Store: a folder of an object store, through fsspec. What may pass when it is asked again is asked again."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from overlapkit.checkpoint.errors import CheckpointError, StoreError
from overlapkit.checkpoint.opening import is_url
from overlapkit.checkpoint.remote.place import StorePath
from overlapkit.extras import require

T = TypeVar("T")

_BLOCK = 64 << 20  # bytes of one part of a multipart upload: 10,000 of them are the most that S3 takes
_FINAL = (PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, TypeError)


class Store:
    """A folder of an object store: objects by name, below one URL.

    It must put an object there at once or not at all, as S3, GCS and Azure do. Credentials and other options
    of the file system are fsspec's own affair: its configuration files and the environment.

    Invariant:
        * A request that failed in a way that may pass is made four times, after pauses of 1, 2 and 4 s; then
          its error is raised whole, as the cause of one that names the object.

    Args:
        url: Such as "s3://bucket/run".

    Attributes:
        url: Without a slash at its end.
        pauses_s: Before each further try.

    Raises:
        ImportError: fsspec, or its package for this kind of store, is not installed.
        ValueError: There is no such kind, or the URL has characters that fsspec reads as a pattern.
    """

    pauses_s: tuple[float, ...] = (1.0, 2.0, 4.0)

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        if self.url.endswith(":"):
            raise ValueError(f"{url!r} names no folder: give one, such as {self.url}//run")
        if found := set("*?[") & set(url) or "::" in url:
            raise ValueError(f"{url!r} has {found if isinstance(found, set) else '::'}: give a plain URL")
        fsspec = require("fsspec", "remote")
        try:
            self._fs, self._base = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            raise ImportError(f"{url!r}: {error} (with pip install)") from error
        except ValueError as error:
            raise ValueError(f"{url!r}: {error}") from error

    @property
    def root(self) -> Path:
        """The folder, to read in."""
        return StorePath(self)

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """An object's bytes, or a range of them.

        Raises:
            FileNotFoundError: There is no such object.
        """
        return bytes(self._ask(name, lambda: self._fs.cat_file(self._at(name), start=start, end=stop)))

    def size(self, name: str) -> int | None:
        """An object's length; None where there is none."""
        self._fs.invalidate_cache()
        try:
            info = self._ask(name, lambda: self._fs.info(self._at(name)))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def sizes(self, folder: str) -> dict[str, int]:
        """The lengths of all objects below a folder, by their names within it."""
        self._fs.invalidate_cache()
        found = self._ask(folder, lambda: self._fs.find(self._at(folder), detail=True))
        prefix = len(self._at(folder)) + 1
        return {name[prefix:]: int(info["size"]) for name, info in found.items() if len(name) > prefix}

    def folders(self, folder: str) -> list[str]:
        """The names of the folders in a folder, sorted."""
        self._fs.invalidate_cache()
        try:
            entries = self._ask(folder, lambda: self._fs.ls(self._at(folder), detail=True))
        except FileNotFoundError:
            return []
        found = {e["name"].rstrip("/").rpartition("/")[2] for e in entries if e["type"] == "directory"}
        return sorted(found)

    def is_folder(self, folder: str) -> bool:
        """Whether anything is in a folder."""
        self._fs.invalidate_cache()
        return bool(self._ask(folder, lambda: self._fs.isdir(self._at(folder))))

    def modified(self, name: str) -> datetime | None:
        """When an object was written (UTC), by the store's clock; None where it does not tell."""
        try:
            when: datetime = self._ask(name, lambda: self._fs.modified(self._at(name)))
        except FileNotFoundError:
            return None
        except StoreError as error:
            if isinstance(error.__cause__, NotImplementedError):
                return None
            raise
        return when if when.tzinfo is not None else when.replace(tzinfo=UTC)

    def put(self, name: str, data: bytes, aside: str = "") -> None:
        """Write a small object, at once or not at all. `aside` is where a file system prepares it."""
        self._ask(name, lambda: self._fs.pipe_file(self._at(name), data))

    def put_file(self, source: str, name: str) -> None:
        """Make an object of a local file: in several parts at a time, where the store has such."""
        self._ask(name, lambda: self._fs.put_file(source, self._at(name)))

    def write(self, name: str, views: Callable[[], Iterable[memoryview]]) -> None:
        """Make an object of pieces of memory, one after the other; `views` is called for each try."""

        def send() -> None:
            with self._fs.open(self._at(name), "wb", block_size=_BLOCK) as file:
                for view in views():
                    file.write(view)

        self._ask(name, send)

    def remove(self, names: Sequence[str]) -> None:
        """Delete objects. It is no error if another process was faster."""
        if not names:
            return
        try:
            self._ask(names[0], lambda: self._fs.rm([self._at(name) for name in names]))
        except FileNotFoundError:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._ask(name, lambda name=name: self._fs.rm_file(self._at(name)))  # type: ignore[misc]

    def probe(self, rank: int) -> None:
        """Write, look at and delete an object.

        Raises:
            PermissionError: One of them failed; the message names the URL.
        """
        name = f".probe-{rank}"
        try:
            self.put(name, b"overlapkit")
            if self.size(name) != 10:
                raise StoreError("an object that was just written is not there")
            self.remove([name])
        except (StoreError, OSError) as error:
            reason = error.__cause__ or error
            raise PermissionError(
                f"{self.url!r} cannot be read, written to and deleted from: {type(reason).__name__}: {reason}"
            ) from error

    def _at(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def _ask(self, name: str, what: Callable[[], T]) -> T:
        for pause in (*self.pauses_s, None):
            try:
                return what()
            except (FileNotFoundError, CheckpointError):  # the latter of what was to be written
                raise
            except Exception as error:
                if pause is None or isinstance(error, _FINAL):
                    place = f"{self.url}/{name}" if name else self.url
                    raise StoreError(f"{place}: {type(error).__name__}: {error}") from error
            time.sleep(pause)
        raise AssertionError


def local_path(where: str | os.PathLike[str]) -> Path | None:
    """The path that a path or a file:// URL names; None for any other URL."""
    if not is_url(where):
        return Path(where)
    protocol, _, path = str(where).partition("://")
    return Path(path) if protocol in ("file", "local") else None


def place_of(where: str | os.PathLike[str]) -> Path:
    """The place that a path or a URL names."""
    if isinstance(where, StorePath):
        return where
    path = local_path(where)
    return path if path is not None else Store(str(where)).root


def open_store(where: str | os.PathLike[str]) -> Store:
    """The store that a URL, or the path of a folder that all nodes see, names."""
    from overlapkit.checkpoint.remote.folder import FolderStore

    path = local_path(where)
    return Store(str(where)) if path is None else FolderStore(path)
