"""Reading a checkpoint's tensors in slices, so that memory does not grow with them."""

import math
from collections.abc import Iterator

import torch

from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.reader import Reader, Saved

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


def read_slices(reader: Reader, saved: Saved) -> Iterator[torch.Tensor]:
    """The values of a tensor, slice by slice, each checked; a slice is valid until the next one.

    Raises:
        DamagedCheckpoint: A checksum differs.
    """
    memory: torch.Tensor | None = None
    for box in row_slices(saved.shape, saved.dtype.itemsize, SLICE):
        if memory is None:  # the first slice is the longest
            memory = torch.empty(box.numel, dtype=saved.dtype, device="cpu")
        target = memory[: box.numel].view(box.shape)
        reader.fill(target, box, saved)
        yield target
