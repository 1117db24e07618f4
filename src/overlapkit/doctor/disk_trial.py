"""How fast a folder's file system writes (fsync included), makes a small file last, and reads."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CHUNK = 4 << 20
_WRITTEN = 32 << 20  # and once more: the better one counts, for others write, too
_READ = 128 << 20
_FILES = 512  # of a folder of data: the first ones that are found, and of those the largest
LEAST = 8 << 20
"""Bytes: what fewer took says more about opening files than about reading them."""
_SYNCS = 5


class Written(NamedTuple):
    """Bytes per second, the last fsync included, and the seconds that 4 KiB take to be on the disk."""

    rate: float
    sync_s: float


def write(folder: Path, seconds: float = 3.0) -> Written:
    """Write a temporary file that has no name, or loses it at once.

    Args:
        folder: Where.
        seconds: After so long it writes no more, and counts what it has.

    Raises:
        OSError: It cannot be written.
    """
    chunk = memoryview(os.urandom(_CHUNK))  # a file system may compress
    with tempfile.TemporaryFile(dir=folder, prefix=".overlapkit-doctor-", buffering=0) as file:
        rate = max(_write(file.fileno(), chunk, seconds) for _ in range(2))
        took = []
        for _ in range(_SYNCS):
            start = time.perf_counter()
            os.write(file.fileno(), chunk[:4096])
            os.fsync(file.fileno())
            took.append(time.perf_counter() - start)
            if sum(took) > seconds:
                break
    return Written(rate, sorted(took)[len(took) // 2])


def _write(fd: int, chunk: memoryview, seconds: float) -> float:
    done, began = 0, time.perf_counter()
    while done < _WRITTEN and time.perf_counter() - began < seconds:
        done += os.write(fd, chunk)
    os.fsync(fd)
    return done / (time.perf_counter() - began)


class Reading(NamedTuple):
    """Bytes that were read, past the page cache, and the seconds that it took."""

    nbytes: int
    seconds: float


def read(folder: Path, share: tuple[int, int] = (0, 1), seconds: float = 3.0) -> Reading:
    """Read files that are there.

    Args:
        folder: Holds files, at any depth.
        share: This rank of how many on this machine: each reads other bytes, or one would fill the page cache
            for the next.
        seconds: After so long it reads no more.

    Raises:
        OSError: A file cannot be read.
    """
    (rank, ranks), sizes = share, {path: path.stat().st_size for path in _some_files(folder)}
    paths = sorted(sizes, key=lambda path: -sizes[path])
    own = paths[rank::ranks] if len(paths) >= ranks else paths
    done, took, buffer = 0, 0.0, bytearray(_CHUNK)
    for path in own:
        start = time.perf_counter()
        with open(path, "rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if own is paths:
                file.seek(sizes[path] * rank // ranks)
            while (
                done < _READ and took + time.perf_counter() - start < seconds and (n := file.readinto(buffer))
            ):
                done += n
        took += time.perf_counter() - start
        if done >= _READ or took > seconds:
            break
    return Reading(done, took)


def _some_files(folder: Path) -> Iterator[Path]:
    found = 0
    for where, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(where, name)
            if path.is_file():
                yield path
                found += 1
                if found == _FILES:
                    return
