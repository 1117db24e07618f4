"""Reading a checkpoint's tensors in slices, so that memory does not grow with them."""

import math
from collections.abc import Iterator

import torch

from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.catalog import Saved
from overlapkit.checkpoint.reader import Reader

SLICE = 64 << 20
"""Bytes read at once; where one row of a tensor is longer, that row."""


def row_slices(shape: tuple[int, ...], itemsize: int, limit: int) -> Iterator[Box]:
    """Boxes of whole rows, of up to `limit` bytes each, that make up a tensor, in order.

    None of an empty one; a row that is longer than `limit` is a box of its own.
    """
    if not math.prod(shape):
        return
    if not shape:
        yield Box((), ())
        return
    rows, rest = max(1, limit // (math.prod(shape[1:]) * itemsize)), len(shape) - 1
    for start in range(0, shape[0], rows):
        yield Box((start, *[0] * rest), (min(rows, shape[0] - start), *shape[1:]))


class SliceReader:
    """Reads tensors of one checkpoint, slice by slice, into one buffer."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def read(self, saved: Saved) -> Iterator[torch.Tensor]:
        """The values of a tensor, in order, each checked; a slice is valid until the next one.

        Raises:
            DamagedCheckpoint: A checksum differs.
        """
        for box in row_slices(saved.shape, saved.dtype.itemsize, SLICE):
            nbytes = box.numel * saved.dtype.itemsize
            if nbytes > self._memory.numel():
                self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            target = self._memory[:nbytes].view(saved.dtype).view(box.shape)
            self._reader.fill(target, box, saved)
            yield target
