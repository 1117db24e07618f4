"""A safetensors file of any writer: what its header says, checked, and reading a box of a tensor."""

import itertools
import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.errors import DamagedCheckpoint
from overlapkit.checkpoint.pieces import DTYPES

_DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}
_LONGEST = 100_000_000  # bytes of a header, as in safetensors itself
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: `nbytes` bytes from `start`, row after row.

    Attributes:
        dtype: None where torch has none that is meant by the header's name.
    """

    name: str
    path: Path
    dtype: torch.dtype | None
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def open_plain(path: Path) -> int:
    """Open a file for reading. What is no plain file (a pipe, a device) is refused, and never waited for.

    Raises:
        DamagedCheckpoint: It is none, or cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: cannot be opened ({error})") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedCheckpoint(f"{path}: is no plain file")
    return fd


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, by name.

    Raises:
        DamagedCheckpoint: The header cannot be read, contradicts itself, or points out of the file.
    """
    fd = open_plain(path)
    try:
        size = os.fstat(fd).st_size
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if size < 8 or length > min(_LONGEST, size - 8):
            raise DamagedCheckpoint(f"{path}: no safetensors file, or cut short ({size} bytes)")
        text = os.pread(fd, length, 8)
    finally:
        os.close(fd)
    try:
        table = json.loads(text, object_pairs_hook=_unique)
        table.pop("__metadata__", None)
        found = {name: _stored(name, entry, path, 8 + length, size) for name, entry in table.items()}
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: its header contradicts itself ({error})") from error
    at = 0
    for stored in sorted(found.values(), key=lambda stored: (stored.start, stored.nbytes)):
        if stored.nbytes and stored.start < at:
            raise DamagedCheckpoint(f"{path}: the bytes of {stored.name!r} are another tensor's, too")
        at = max(at, stored.start + stored.nbytes)
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name is there twice")
    return made


def _stored(name: str, entry: dict[str, Any], path: Path, data: int, size: int) -> Stored:
    shape, (start, stop), kind = tuple(entry["shape"]), entry["data_offsets"], entry["dtype"]
    if any(type(n) is not int or n < 0 for n in (*shape, start, stop)) or not isinstance(kind, str):
        raise ValueError(f"{name!r} has a shape or place that is none")
    dtype = _DTYPE_OF.get(kind)
    if not start <= stop <= size - data:
        raise ValueError(f"{name!r} lies outside of the file")
    if dtype is not None and math.prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"{name!r} has {stop - start} bytes, which are not its shape's")
    return Stored(name, path, dtype, kind, shape, data + start, stop - start)


def read_box(fd: int, stored: Stored, box: Box, memory: torch.Tensor) -> torch.Tensor:
    """Read a box of a tensor.

    Only the box's own bytes are read, and, where a page holds several runs of them, what lies between.

    Args:
        fd: The open file.
        stored: The tensor, of a dtype that torch has.
        box: Which part of it.
        memory: Host memory, uint8, of at least `room(stored, box)` bytes.

    Returns:
        A view of `memory`, or a copy, of the box's shape.

    Raises:
        DamagedCheckpoint: The file ends too early.
    """
    assert stored.dtype is not None
    whole = _read_as(stored, box)
    at = 0
    for start, nbytes in runs(stored.shape, whole, stored.dtype.itemsize):
        _read(fd, memory[at : at + nbytes], stored.start + start, stored.path)
        at += nbytes
    values = memory[:at].view(stored.dtype).view(whole.shape)
    return values if whole == box else values[box.inside(whole)]


def room(stored: Stored, box: Box) -> int:
    """Bytes of memory that `read_box` takes."""
    assert stored.dtype is not None
    return _read_as(stored, box).numel * stored.dtype.itemsize


def runs(shape: tuple[int, ...], box: Box, itemsize: int) -> Iterator[tuple[int, int]]:
    """The stretches of a row-major tensor that make up a box, in order: (first byte, bytes), not empty."""
    if not box.numel:
        return
    split = _split(shape, box)
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    nbytes = math.prod(box.shape[split:]) * itemsize
    first = sum(at * stride for at, stride in zip(box.offset, strides, strict=True))
    for index in itertools.product(*(range(n) for n in box.shape[:split])):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), nbytes


def _split(shape: tuple[int, ...], box: Box) -> int:
    """The last dimension of which the box holds a part only; 0 where it is the whole tensor."""
    return max((dim for dim in range(len(shape)) if box.shape[dim] != shape[dim]), default=0)


def _read_as(stored: Stored, box: Box) -> Box:
    """What is read for a box: where a page holds several of its runs, also what lies between these."""
    assert stored.dtype is not None
    shape, itemsize = stored.shape, stored.dtype.itemsize
    while (split := _split(shape, box)) and math.prod(shape[split:]) * itemsize <= _PAGE:
        rest = shape[split:]
        box = Box((*box.offset[:split], *[0] * len(rest)), (*box.shape[:split], *rest))
    return box


def _read(fd: int, memory: torch.Tensor, offset: int, path: Path) -> None:
    view = memoryview(memory.numpy().data)
    while view.nbytes:
        got = os.preadv(fd, [view], offset)
        if got == 0:
            raise DamagedCheckpoint(f"{path}: ends at byte {offset}, before its tensors do")
        view, offset = view[got:], offset + got
