"""Which files a trace is made of: .json, .json.gz, .tar.gz or a folder of ranks, opened one after the other.

What a file is follows from its first bytes, not from its name. Nothing is written to disk, and what is
unpacked is read in pieces of bounded size.
"""

import gzip
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import BinaryIO, Protocol

Progress = Callable[[int, int], object]
"""Called with the bytes read so far and the bytes of all files, as they lie on disk."""

ENDINGS = (".json", ".json.gz", ".tar.gz", ".tgz", ".tar")
_PIECE = 64 << 20  # the most that anything asks for at once: tar's own headers may claim any size
_SMALL = 256 << 20  # what may be unpacked from however little
_RATIO = 100  # beyond that; Kineto's JSON shrinks 10 to 30 times


class TraceError(RuntimeError):
    """A trace that cannot be read; the message names the file and the place in it."""


class Stream(Protocol):
    """Bytes, from the first to the last."""

    def read(self, size: int, /) -> bytes:
        """At most `size` of them; none at the end."""


class _Bounded:
    """One layer of a file: told bytes may be given again, errors name the file, growth is limited.

    Args:
        name: Of the file, for errors.
        stream: The layer.
        packed: How many bytes of the disk were read so far; None for what was not packed.
    """

    def __init__(self, name: str, stream: Stream, packed: Callable[[], int] | None = None) -> None:
        self._name = name
        self._stream = stream
        self._packed = packed
        self._given = 0
        self._again = b""

    def begins(self, size: int) -> bytes:
        """The first `size` bytes, which are read again afterwards."""
        parts = [self.read(size)]
        while parts[-1] and sum(map(len, parts)) < size:
            parts.append(self.read(size - sum(map(len, parts))))
        self._again = b"".join(parts)
        return self._again

    def read(self, size: int) -> bytes:
        """At most `size` bytes."""
        if self._again:
            head, self._again = self._again[:size], self._again[size:]
            return head
        if not 0 <= size <= _PIECE:
            raise TraceError(f"{self._name}: damaged after byte {self._given}: a header claims {size} bytes")
        try:
            piece = self._stream.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{self._name}: damaged after byte {self._given} unpacked: {error}") from None
        self._given += len(piece)
        if self._packed is not None and self._given > max(_SMALL, _RATIO * self._packed()):
            raise TraceError(
                f"{self._name}: unpacks to more than {_RATIO} times its size ({self._given >> 20} MiB "
                "so far): no profiler's trace does; unpack it first if it is one"
            )
        return piece


def find_files(trace: str | PathLike[str] | Sequence[str | PathLike[str]]) -> list[Path]:
    """The files that `trace` names.

    Raises:
        TypeError: It is neither a path nor a list of paths.
        ValueError: It names nothing.
        FileNotFoundError: A path does not exist.
    """
    paths = [trace] if isinstance(trace, str | PathLike) else trace
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str | PathLike) for path in paths):
        raise TypeError(f"trace={trace!r}: give a path, or a list of paths")
    if not paths:
        raise ValueError("trace=[]: give at least one file or folder")
    files: list[Path] = []
    for path in (Path(fspath(path)) for path in paths):
        files += _within(path) if path.is_dir() else [path]
        if not files[-1].exists():
            raise FileNotFoundError(f"{path}: no such file or folder")
    return files


def _within(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.name.endswith(ENDINGS) and path.is_file())
    if not files:
        raise ValueError(f"{folder}: no trace in this folder (names that end in {', '.join(ENDINGS)})")
    return files


def open_traces(files: Sequence[Path], progress: Progress | None) -> Iterator[tuple[str, Stream]]:
    """Each trace with its name; it must be read before the next is asked for.

    Raises:
        TraceError: A file is damaged, or holds no trace.
    """
    total, before = sum(path.stat().st_size for path in files), 0
    for path in files:
        with path.open("rb") as file:
            counted = _Counted(file, before, total, progress)
            yield from _unpack(str(path), _Bounded(str(path), counted), file.tell)
        before += path.stat().st_size
        if progress is not None:
            progress(before, total)


class _Counted:
    def __init__(self, file: BinaryIO, before: int, total: int, progress: Progress | None) -> None:
        self._file = file
        self._before = before
        self._total = total
        self._progress = progress

    def read(self, size: int) -> bytes:
        piece = self._file.read(size)
        if self._progress is not None:
            self._progress(self._before + self._file.tell(), self._total)
        return piece


def _unpack(
    name: str, layer: _Bounded, packed: Callable[[], int], depth: int = 0
) -> Iterator[tuple[str, Stream]]:
    head = layer.begins(512)
    is_gzip, is_tar = head[:2] == b"\x1f\x8b", head[257:262] == b"ustar"
    if (is_gzip or is_tar) and depth == 3:  # a .json.gz within a .tar.gz
        raise TraceError(f"{name}: packed more than three times")
    if is_gzip:
        inner = gzip.GzipFile(fileobj=layer, mode="rb")  # type: ignore[call-overload]  # it only reads
        yield from _unpack(name, _Bounded(name, inner, packed), packed, depth + 1)
    elif is_tar:
        yield from _members(name, layer, packed, depth)
    else:
        yield name, layer


def _members(
    name: str, layer: _Bounded, packed: Callable[[], int], depth: int
) -> Iterator[tuple[str, Stream]]:
    found = False
    try:
        with tarfile.open(fileobj=layer, mode="r|") as archive:  # type: ignore[call-overload]
            for member in archive:
                if not member.isfile() or not member.name.endswith(ENDINGS):
                    continue
                found = True
                inner = archive.extractfile(member)
                assert inner is not None
                full = f"{name}/{member.name}"
                yield from _unpack(full, _Bounded(full, inner), packed, depth + 1)
    except tarfile.TarError as error:
        raise TraceError(f"{name}: a damaged archive: {error}") from None
    if not found:
        raise TraceError(f"{name}: no trace in this archive (names that end in {', '.join(ENDINGS)})")
