"""Host memory that a source makes its batches in, so that they go to the device without being packed.

A source offers `iter_into(empty)`, an iterator over batches that are made in what
`empty(shape, dtype)` returns: uninitialised, and lent to that batch alone.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from overlapkit.input.packing import ALIGNMENT, Packing
from overlapkit.pinned import PinnedBuffer, PinnedRing

Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def host_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Ordinary memory, whatever the default device is."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def read(source: Any, empty: Empty | None) -> Iterator[Any]:
    """Begin a pass over `source`, into the memory that `empty` lends where the source can do so."""
    iter_into = getattr(source, "iter_into", None)
    return iter(source) if empty is None or not callable(iter_into) else iter(iter_into(empty))


class Landing:
    """The host memory that a batch is copied from: a buffer of the ring, lent to its source or packed.

    Invariants:
        * A buffer is on loan from the first `empty` of a pull until the batch is laid out, or the pull came
          to nothing: it is taken once, and given back once.
        * Outside of a pull, and where the buffer is too small, `empty` is `host_memory`: such tensors are
          packed as any others, and the next batch finds a buffer of the size that this one needed.

    Args:
        ring: Where buffers come from: at least two.

    Attributes:
        used: Bytes lent to the batch that is being read.
    """

    def __init__(self, ring: PinnedRing) -> None:
        self.used = 0
        self._ring = ring
        self._open = False
        self._needed = 0
        self._buffer: PinnedBuffer | None = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory for the batch that is being read. Called in the reader's thread."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not self._open or nbytes == 0:
            return host_memory(shape, dtype)
        if self._buffer is None:
            self._buffer = self._ring.take(max(self._needed, nbytes))
        start, end = self.used, self.used + nbytes
        if end > self._buffer.nbytes:
            return host_memory(shape, dtype)
        self.used = -(-end // ALIGNMENT) * ALIGNMENT
        return self._buffer.bytes(end)[start:].view(dtype).view(shape)

    def __enter__(self) -> None:
        """A pull begins."""
        self._open = True

    def __exit__(self, *_: object) -> None:
        """It is over. What was lent for a batch that did not come goes back."""
        self._open = False
        buffer, self._buffer, self.used = self._buffer, None, 0
        if buffer is not None:
            buffer.give_back()

    def anew(self) -> None:
        """Lend the same memory again: what it was lent for is dropped."""
        self.used = 0

    def lay_out(self, tensors: list[torch.Tensor]) -> tuple[Packing, list[PinnedBuffer]]:
        """Find a place for each of a batch's packable tensors.

        Returns:
            The layout, and the buffers that are the caller's to give back: the one to fill and copy, and the
            one that the batch was begun in, where that turned out too small.
        """
        if self._buffer is None:
            packing = Packing(tensors)
            return packing, [self._ring.take(packing.nbytes)]
        packing = Packing(tensors, landed=self._buffer.bytes(self.used))
        self._needed = max(self._needed, packing.nbytes)
        buffers = [self._buffer]
        if packing.nbytes > self._buffer.nbytes:
            packing = Packing(tensors)
            buffers.insert(0, self._ring.take(packing.nbytes))
        self._buffer, self.used = None, 0
        return packing, buffers
