"""Mapped rows that are not in memory: their pages are asked for together, before the first of them is read.

Read as they are met, each miss is one wait for the disk, and the kernel reads all that its readahead reaches,
128 KiB or megabytes, for a row of two. Asked for together, a batch's rows are read alone, and side by side
where the disk can do that.
"""

import ctypes
import mmap
import resource

import numpy as np

_ASKED = 16
"""Batches that are asked for after one that was not in memory: if they all are, asking ends."""

# Not CDLL: to let go of the interpreter at each row can cost a millisecond or five, beside one that has it.
# (process_madvise takes all rows at once, and is not allowed in most containers.)
_madvise = ctypes.PyDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def read_alone(memory: np.ndarray) -> None:
    """Let the kernel read no page of mapped memory that was not asked for, or met."""
    address = memory.ctypes.data
    page = address & -mmap.PAGESIZE
    _madvise(page, address + memory.nbytes - page, mmap.MADV_RANDOM)


class Paging:
    """Asks for the pages of rows, as long as there are some that are not in memory.

    Whether there are is seen from what this thread has had to read: to ask for what is in memory takes as
    long as to gather it. All is advice: where a system takes none, rows are read as they are met.

    Args:
        memory: All that is mapped, from the start of a page on.
        unit: Bytes in which places are counted.
        nbytes: Of a row.
    """

    def __init__(self, memory: np.ndarray, unit: int, nbytes: int) -> None:
        self._address = memory.ctypes.data
        self._unit = unit
        self._nbytes = nbytes
        self._read: int | None = None
        self._left = 0

    def ask(self, places: np.ndarray) -> None:
        """Have rows read that are needed now: where they begin, int64 (n,), from the first address on."""
        used = resource.getrusage(resource.RUSAGE_THREAD)
        read = used.ru_inblock + used.ru_majflt  # not every file system counts blocks
        if read != self._read:
            self._read, self._left = read, _ASKED
        if self._left == 0:
            return
        self._left -= 1
        starts = self._address + places * self._unit
        pages = starts & -mmap.PAGESIZE
        for page, length in zip(pages.tolist(), (starts + self._nbytes - pages).tolist(), strict=True):
            _madvise(page, length, mmap.MADV_WILLNEED)
