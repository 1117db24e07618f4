"""Blocks: which checksummed stretches of a file hold a box, where each goes, and which are read together."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.catalog import Chunk, Saved
from overlapkit.checkpoint.errors import DamagedCheckpoint
from overlapkit.checkpoint.hashing import HASHES

_AT_ONCE = 16 << 20  # bytes that one read takes
_BUFFERS = 512  # and the buffers that it fills; IOV_MAX is 1024


class Block(NamedTuple):
    """One block on its way into memory: `into`, or memory of its own that `then` is called with."""

    chunk: Chunk
    name: str
    at: int
    nbytes: int
    into: memoryview | None
    then: Callable[[memoryview], None] | None = None

    @property
    def offset(self) -> int:
        """Where it is in its file."""
        return self.chunk.start + self.at

    def check(self, view: memoryview) -> None:
        """Compare what was read with its checksum, and hand it on.

        Raises:
            DamagedCheckpoint: It differs.
        """
        chunk = self.chunk
        if HASHES[chunk.hash](view) != chunk.sums[self.at // chunk.block]:
            where = f"bytes {self.offset} to {self.offset + self.nbytes}"
            raise DamagedCheckpoint(f"{chunk.path}: tensor {self.name!r}, {where}: the checksum differs")
        if self.then is not None:
            self.then(view)


def whole_rows(chunk: Chunk, target: torch.Tensor, box: Box, both: Box, saved: Saved) -> Iterator[Block]:
    """Whole rows, which are one stretch of the chunk and one of the target: blocks go right there."""
    memory = bytes_of(target)
    if chunk.box == box:
        for at in range(0, chunk.nbytes, chunk.block):
            nbytes = min(chunk.block, chunk.nbytes - at)
            yield Block(chunk, saved.name, at, nbytes, memory[at : at + nbytes])
        return
    first, length = stretch(chunk.box, both, saved)
    shift = stretch(box, both, saved)[0] - first  # from a place in the chunk to that in the target
    for block in covering(chunk, first, first + length, saved.name):
        a, b = max(first, block.at), min(first + length, block.at + block.nbytes)
        there = memory[a + shift : b + shift]
        if b - a == block.nbytes:
            yield block._replace(into=there)
        else:  # the others' rows are in it, too

            def copy(view: memoryview, there: memoryview = there, skip: int = a - block.at) -> None:
                there[:] = view[skip : skip + there.nbytes]

            yield block._replace(then=copy)


def slabs(chunk: Chunk, both: Box) -> Iterator[Box]:
    """A box in parts of a few rows, so that the memory which these are read into stays small."""
    rows = max(1, _AT_ONCE * chunk.box.shape[0] // chunk.nbytes)
    for start in range(0, both.shape[0], rows):
        offset = (both.offset[0] + start, *both.offset[1:])
        yield Box(offset, (min(rows, both.shape[0] - start), *both.shape[1:]))


def batches(blocks: list[Block]) -> list[list[Block]]:
    """Blocks that lie one after the other in a file, as far as one read takes them."""
    found: list[list[Block]] = []
    nbytes = 0
    end = "", 0
    for block in sorted(blocks, key=lambda block: (str(block.chunk.path), block.offset)):
        place = str(block.chunk.path), block.offset
        if place == end and nbytes + block.nbytes <= _AT_ONCE and len(found[-1]) < _BUFFERS:
            found[-1].append(block)
            nbytes += block.nbytes
        else:
            found.append([block])
            nbytes = block.nbytes
        end = place[0], block.offset + block.nbytes
    return found


def stretch(outer: Box, inner: Box, saved: Saved) -> tuple[int, int]:
    """The bytes, from and how many, of the rows of `inner` in the rows of `outer`."""
    if not outer.shape:
        return 0, saved.dtype.itemsize
    row = math.prod(outer.shape[1:]) * saved.dtype.itemsize
    return (inner.offset[0] - outer.offset[0]) * row, inner.shape[0] * row


def covering(chunk: Chunk, start: int, stop: int, name: str) -> Iterator[Block]:
    """The blocks that hold these bytes of a chunk."""
    for at in range(start // chunk.block * chunk.block, stop, chunk.block):
        yield Block(chunk, name, at, min(chunk.block, chunk.nbytes - at), None)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of contiguous host memory, to be read or filled."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
