"""Reused host buffers, page-locked where there is a GPU, guarded by tickets.

torch's pinned allocator rounds sizes up to powers of two and guards only what is freed through it,
never a buffer that is filled again. These are sized in pages, and filled again only when the ticket
of their last use is done.
"""

import contextlib
import mmap
import weakref
from collections import deque
from types import TracebackType
from typing import Any, Self

import torch

from overlapkit.lane import Ticket


def _round_to_pages(nbytes: int) -> int:
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE


class _Pages(mmap.mmap):
    """Anonymous memory. A subclass, because only a subclass tells its finalizers before it is unmapped."""


def _map_pages(nbytes: int, pin: bool, present: bool = True) -> torch.Tensor:
    """`nbytes` of zeroed memory as a uint8 tensor, pages present: faulting them in later costs 20 copies."""
    pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or a kernel that has none
        pages.madvise(mmap.MADV_HUGEPAGE)  # one fault for 2 MiB
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if present or pin:
        memory.zero_()  # MAP_POPULATE would fault the pages in, too, but under the interpreter's lock
    if pin:
        pages.madvise(mmap.MADV_DONTFORK)  # a fork would make a copy on write of what the GPU reads
        runtime: Any = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(memory.data_ptr(), nbytes, 0))
        if status != 0:
            raise MemoryError(
                f"cannot page-lock {nbytes} bytes (CUDA error {status}): lower depth=, in_flight= or "
                "the batch size, or raise the limit of locked memory (ulimit -l)"
            )
        weakref.finalize(pages, runtime.cudaHostUnregister, memory.data_ptr())
    return memory


class PinnedBuffer:
    """One buffer on loan from a PinnedRing, until `give_back`."""

    def __init__(self, ring: "PinnedRing") -> None:
        self._ring = ring
        self._memory: torch.Tensor | None = None
        self._busy: Ticket[Any] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held, a whole number of pages."""
        return 0 if self._memory is None else self._memory.numel()

    def bytes(self, nbytes: int) -> torch.Tensor:
        """The first `nbytes` as a uint8 tensor (n,): a view, valid until the buffer is given back."""
        assert self._memory is not None
        return self._memory[:nbytes]

    def give_back(self, after: Ticket[Any] | None = None) -> None:
        """Return the buffer. It is handed out again once `after` is done."""
        self._busy = after
        self._ring._free.append(self)


class PinnedRing:
    """`slots` reused buffers; the one that was given back first is handed out first.

    Invariants:
        * A buffer is handed out only when the ticket it was given back with is done.
        * The bytes held are at most slots x the largest request, rounded to pages.

    Args:
        slots: How many buffers there are, at least 1.
        pin: Page-lock them for copies from and to a GPU.
    """

    def __init__(self, slots: int, *, pin: bool) -> None:
        if slots < 1:
            raise ValueError(f"slots={slots}: a ring needs at least one buffer")
        self._pin = pin
        self._slots = tuple(PinnedBuffer(self) for _ in range(slots))
        self._free: deque[PinnedBuffer] = deque(self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes held by all buffers."""
        return sum(slot.nbytes for slot in self._slots)

    def take(self, nbytes: int, *, present: bool = True) -> PinnedBuffer:
        """Borrow a buffer of at least `nbytes`, after the work that last used it is done.

        Args:
            nbytes: Its least size.
            present: Touch the pages of new memory. Not where a file is read into it at once, which does that.

        Raises:
            RuntimeError: All buffers are on loan (the ring cannot know when one will come back).
            MemoryError: The memory cannot be had or page-locked.
        """
        if not self._free:
            raise RuntimeError(f"all {len(self._slots)} buffers are on loan: give one back first")
        buffer = self._free.popleft()  # before it grows: another thread may take one meanwhile
        try:
            if buffer._busy is not None:
                buffer._busy.settle()
                buffer._busy = None
            if buffer._memory is None or buffer.nbytes < nbytes:
                buffer._memory = None  # freed first: growing must not hold both
                buffer._memory = _map_pages(_round_to_pages(nbytes), self._pin, present)
        except BaseException:
            self._free.appendleft(buffer)
            raise
        return buffer

    def is_warm(self, nbytes: int) -> bool:
        """Whether `take` would return without making new memory."""
        return bool(self._free) and self._free[0].nbytes >= nbytes

    def close(self) -> None:
        """Wait for the last uses and free all memory. Buffers on loan are freed with their last view."""
        for slot in self._slots:
            if slot._busy is not None:
                slot._busy.settle()
                slot._busy = None
            slot._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
