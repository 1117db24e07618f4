"""Many files in one stretch of addresses, so that one gather can read from all of them.

The whole stretch is reserved first, and each file is then mapped over its part of it.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_GRAIN = 2 << 20
"""Files start at multiples of a huge page: only there can the kernel map those that it cached in such."""

_MAP_FIXED = 0x10
_PROT_NONE = 0
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_files(files: Sequence[tuple[Path, int]]) -> tuple[np.ndarray, list[int]]:
    """Map files read-only, one behind the other.

    Args:
        files: Paths of regular files and the size in bytes, not 0, that each was seen to have.

    Returns:
        The stretch of addresses as uint8 (bytes of all files, each filled up to 2 MiB), and where in it
        each file starts. Whatever views it keeps the mapping alive. It must not be written to, and a file
        that is cut short while it is mapped ends the process with SIGBUS when the part cut off is read.

    Raises:
        ValueError: A file no longer has its size.
        OSError: A file cannot be opened or mapped.
    """
    spans = [-(-size // _GRAIN) * _GRAIN for _, size in files]
    stretch = _Stretch(sum(spans))
    starts = [0, *np.cumsum(spans, dtype=np.int64).tolist()][:-1]
    for (path, size), start in zip(files, starts, strict=True):
        stretch.place(path, size, start)
    return np.asarray(stretch), starts


class _Stretch:
    """Reserved addresses, given back when nothing refers to them any more."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        reserved = _map(0, nbytes + _GRAIN, _PROT_NONE, flags, -1, f"reserving {nbytes} bytes of addresses")
        self._base = -(-reserved // _GRAIN) * _GRAIN
        # numpy asks for this; marked writable because torch warns of arrays that are not
        self.__array_interface__: dict[str, Any] = {
            "shape": (nbytes,), "typestr": "|u1", "data": (self._base, False), "version": 3
        }  # fmt: skip
        weakref.finalize(self, _libc.munmap, reserved, nbytes + _GRAIN).atexit = False

    def place(self, path: Path, size: int, start: int) -> None:
        """Map a file over the addresses from `start` on."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if (now := os.fstat(fd).st_size) != size:
                raise ValueError(
                    f"{path} has {now} bytes, and had {size} a moment ago: somebody writes to it"
                )
            flags = mmap.MAP_SHARED | _MAP_FIXED
            _map(self._base + start, size, mmap.PROT_READ, flags, fd, f"mapping {path}")
        finally:
            os.close(fd)


def _map(address: int, nbytes: int, protection: int, flags: int, fd: int, what: str) -> int:
    mapped = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if mapped == _FAILED:
        code = ctypes.get_errno()
        raise OSError(
            code,
            f"{what}: {os.strerror(code)}. The limits are ulimit -v and vm.max_map_count, of one mapping a "
            "file: write fewer, larger shards",
        )
    return int(mapped)
