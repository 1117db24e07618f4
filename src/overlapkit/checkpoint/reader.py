"""Reading boxes out of a checkpoint: each rank reads the bytes it needs, and checks what it reads.

Every rank reads replicated tensors itself. A broadcast would want collectives on the device's own network,
which the values do not cross: they are read into host memory. On one machine the page cache is that
broadcast, at the speed of memory; beyond, ranks begin at different places, so that no two are in step.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from overlapkit.checkpoint.blocks import Block, batches, bytes_of, covering, slabs, stretch, whole_rows
from overlapkit.checkpoint.box import Box, tiles
from overlapkit.checkpoint.catalog import Chunk, DataFile, Saved, Wanted
from overlapkit.checkpoint.errors import DamagedCheckpoint
from overlapkit.checkpoint.hashing import HASHES
from overlapkit.checkpoint.remote.place import StorePath
from overlapkit.checkpoint.turns import many_at_once, take_turns
from overlapkit.lane import Lane

_AHEAD = 256 << 20  # bytes that are asked for before they are read
_FILES = 64  # that a thread has open: thousands of ranks may have written one tensor


class Reader:
    """Reads the files of one checkpoint.

    Invariant:
        * A descriptor belongs to one thread: none is closed, and its number used again, while another reads.
    """

    def __init__(self) -> None:
        self._open: dict[int, dict[Path, int]] = {}  # for each thread, the one used last at the end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mine in self._open.values():
            for fd in mine.values():
                os.close(fd)
        self._open.clear()

    def fill(self, target: torch.Tensor, box: Box, saved: Saved) -> None:
        """Read a box of a tensor.

        Args:
            target: Contiguous host memory, of the saved dtype and of shape `box.shape`.
            box: Which part of the global tensor.
            saved: The tensor.

        Raises:
            DamagedCheckpoint: A checksum differs, or some of the box is in no file.
        """
        for job in self.jobs([(target, box, saved)]):
            job()

    def jobs(self, targets: Iterable[tuple[torch.Tensor, Box, Saved]]) -> list[Callable[[], None]]:
        """What fills many boxes, piece by piece, in the order of the files; see `fill`."""
        blocks: list[Block] = []
        cuts: list[tuple[str, int, Callable[[], None]]] = []
        for target, box, saved in targets:
            found: list[Box] = []
            for chunk in saved.chunks if target.numel() else []:
                both = chunk.box if chunk.box == box else box.meet(chunk.box)
                if both is None:
                    continue
                found.append(both)
                if both.shape[1:] == box.shape[1:] == chunk.box.shape[1:]:
                    blocks += whole_rows(chunk, target, box, both, saved)
                else:
                    for slab in slabs(chunk, both):
                        cut = partial(self._cut, chunk, target, box, slab, saved)
                        cuts.append((str(chunk.path), chunk.start, cut))
            if found != [box] and not tiles(found, box):
                parts = (
                    f"{sum(both.numel for both in found)} of {target.numel()} elements of this rank's part"
                )
                raise DamagedCheckpoint(f"{saved.name!r}: {parts} are in the files, or some twice")
        cuts.sort(key=lambda cut: cut[:2])
        return [partial(self._read, batch) for batch in batches(blocks)] + [job for _, _, job in cuts]

    def check(self, saved: Saved) -> None:
        """Read every byte of a tensor against its checksums.

        Raises:
            DamagedCheckpoint: One differs.
        """
        for chunk in saved.chunks:
            for block in covering(chunk, 0, chunk.nbytes, saved.name):
                self._read([block])

    def check_header(self, file: DataFile) -> None:
        """Check a safetensors file's header, which only other readers need.

        Raises:
            DamagedCheckpoint: It differs from what was written.
        """
        header = memoryview(bytearray(file.header))
        self._read_all(file.path, [header], 0)
        if HASHES[file.hash](header) != file.header_sum:
            raise DamagedCheckpoint(f"{file.path}: the checksum of its header differs from the part's")

    def _read(self, blocks: Sequence[Block]) -> None:
        """Read blocks that lie one after the other, and check them."""
        views = [memoryview(bytearray(b.nbytes)) if b.into is None else b.into for b in blocks]
        path = blocks[0].chunk.path
        self._read_all(path, views, blocks[0].offset)
        for block, view in zip(blocks, views, strict=True):
            block.check(view)

    def _cut(self, chunk: Chunk, target: torch.Tensor, box: Box, both: Box, saved: Saved) -> None:
        """Read some columns: their rows are read whole, into memory of their own."""
        first, length = stretch(chunk.box, both, saved)
        blocks = list(covering(chunk, first, first + length, saved.name))
        memory = torch.empty(sum(block.nbytes for block in blocks), dtype=torch.uint8, device="cpu")
        view, start = bytes_of(memory), blocks[0].at
        self._read([b._replace(into=view[b.at - start : b.at - start + b.nbytes]) for b in blocks])
        rows = memory[first - start : first - start + length].view(saved.dtype)
        columns = both.inside(chunk.box)[1:]
        target[both.inside(box)] = rows.view(both.shape[0], *chunk.box.shape[1:])[(slice(None), *columns)]

    def _read_all(self, path: Path, views: list[memoryview], offset: int) -> None:
        if isinstance(path, StorePath):
            path.read_into(views, offset)
        else:
            _read_all(self._fd(path), views, offset, path)

    def _fd(self, path: Path) -> int:
        mine = self._open.setdefault(threading.get_ident(), {})
        fd = mine.pop(path, None)
        if fd is None:
            while len(mine) >= _FILES:
                os.close(mine.pop(next(iter(mine))))
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError as error:
                raise DamagedCheckpoint(f"{path}: cannot be opened ({error.strerror})") from error
        mine[path] = fd
        return fd


def _read_all(fd: int, views: list[memoryview], offset: int, path: Path) -> None:
    left = views
    while left:
        try:
            got = os.preadv(fd, left, offset)
        except OSError as error:  # a bad sector is as bad as a flipped bit
            raise DamagedCheckpoint(f"{path}: cannot be read ({error.strerror})") from error
        if got == 0:
            raise DamagedCheckpoint(f"{path}: ends at byte {offset}, before its tensors do")
        offset += got
        while left and got >= left[0].nbytes:
            got -= left[0].nbytes
            left = left[1:]
        if got:
            left = [left[0][got:], *left[1:]]


def read_ahead(path: Path) -> None:
    """Have the system begin to read a file, beside what must be done before its places are known."""
    with contextlib.suppress(OSError):  # if there is something in it, the reading itself will tell
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            os.posix_fadvise(fd, 0, _AHEAD, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


def room(wanted: Wanted) -> int:
    """Bytes that `read_boxes` takes, with each tensor on a 64-byte boundary."""
    return sum(_room(saved, box) for saved, box in wanted.values())


def read_boxes(
    wanted: Wanted, memory: torch.Tensor, helper: Lane, turn: float = 0.0
) -> dict[str, torch.Tensor]:
    """Read and check everything that is wanted.

    Args:
        wanted: What to read.
        memory: Host memory for it, uint8 (room(wanted),).
        helper: A thread that takes half of the reading.
        turn: Where to begin, from 0 to 1: other ranks begin elsewhere.

    Returns:
        Name -> view of `memory` of the box's shape.

    Raises:
        DamagedCheckpoint: Something differs from what was written, or is not there.
    """
    values: dict[str, torch.Tensor] = {}
    at = 0
    for name, (saved, box) in wanted.items():
        flat = memory[at : at + box.numel * saved.dtype.itemsize].view(saved.dtype)
        values[name] = flat.view(box.shape)
        at += _room(saved, box)
    with Reader() as reader:
        jobs = reader.jobs((values[name], box, saved) for name, (saved, box) in wanted.items())
        first = int(turn * len(jobs))
        jobs = jobs[first:] + jobs[:first]
        if any(isinstance(chunk.path, StorePath) for saved, _ in wanted.values() for chunk in saved.chunks):
            many_at_once(jobs)
        else:
            take_turns(jobs, helper)
    return values


def _room(saved: Saved, box: Box) -> int:
    return -(-box.numel * saved.dtype.itemsize // 64) * 64
