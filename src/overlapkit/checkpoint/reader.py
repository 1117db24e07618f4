"""Reading boxes out of a checkpoint: each rank reads the bytes it needs, and checks what it reads."""

import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.codec import decode
from overlapkit.checkpoint.errors import DamagedCheckpoint
from overlapkit.checkpoint.layout import DTYPES
from overlapkit.checkpoint.manifest import Manifest

_DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Chunk:
    """One rank's box of a tensor: bytes `start` to `start + nbytes` of a file, with a checksum a block."""

    path: Path
    box: Box
    start: int
    nbytes: int
    block: int
    sums: list[int]


@dataclass(slots=True)
class Saved:
    """A tensor in a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sharded: bool
    device: str
    chunks: list[Chunk]


class Catalog:
    """What a checkpoint holds for one rank.

    Attributes:
        step: Its step.
        world: The number of ranks that wrote it.
        entries: For each key of the state its kind and typed JSON: this rank's own where as many ranks wrote
            the checkpoint as read it, else rank 0's.
        rng: The generators' states of the rank with this number; None where there was no such rank.
        tensors: By name. Tensors that every rank has of its own are those of the same rank as `entries`.

    Raises:
        DamagedCheckpoint: A part differs from what was written, or makes no sense.
    """

    def __init__(self, manifest: Manifest, rank: int, world: int) -> None:
        self.step = manifest.step
        self.world = manifest.world
        self.tensors: dict[str, Saved] = {}
        self.rng: Any = None
        mine = rank if world == manifest.world else 0
        aliases: dict[str, str] = {}
        for number in range(manifest.world):
            part = manifest.part(number)
            path = manifest.folder / f"rank-{number:05d}.json"
            try:
                for saved, own in saved_tensors(part, manifest, path):
                    if number == mine or not own:
                        self._merge(saved, path)
                aliases |= {name: e["alias"] for name, e in part["tensors"].items() if "alias" in e}
                if number == mine:
                    self.entries: dict[str, dict[str, Any]] = part["state"]
                    decode([entry["value"] for entry in self.entries.values()], self.tensors.get)
                if number == rank:
                    self.rng = part["rng"]
                    decode(self.rng, self.tensors.get)
            except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
                raise DamagedCheckpoint(f"{path}: not a part ({type(error).__name__}: {error})") from error
        for saved in self.tensors.values():
            found, whole = sum(chunk.box.numel for chunk in saved.chunks), math.prod(saved.shape)
            if found != whole:
                raise DamagedCheckpoint(
                    f"{manifest.folder}: holds {found} of {whole} elements of {saved.name!r}"
                )
        for name, first in aliases.items():
            if first not in self.tensors:
                raise DamagedCheckpoint(
                    f"{manifest.folder}: {name!r} shares the data of {first!r}, which is missing"
                )
            self.tensors[name] = self.tensors[first]

    def _merge(self, saved: Saved, path: Path) -> None:
        known = self.tensors.setdefault(saved.name, saved)
        if known is saved:
            return
        if (known.dtype, known.shape) != (saved.dtype, saved.shape):
            raise DamagedCheckpoint(
                f"{path}: {saved.name!r} is {saved.dtype} {saved.shape}, in other parts {known}"
            )
        known.chunks += saved.chunks


def saved_tensors(part: dict[str, Any], manifest: Manifest, path: Path) -> Iterator[tuple[Saved, bool]]:
    """The tensors that one part lists, and whether each is the rank's own."""
    for name, entry in part["tensors"].items():
        if "alias" not in entry:
            dtype, shape = _DTYPE_OF[entry["dtype"]], tuple(entry["shape"])
            saved = Saved(name, dtype, shape, entry["sharded"], entry["device"], [])
            saved.chunks.append(_chunk(entry, saved, part, manifest, path))
            yield saved, entry["own"]


def _chunk(
    entry: dict[str, Any], saved: Saved, part: dict[str, Any], manifest: Manifest, path: Path
) -> Chunk:
    """A chunk whose place and shape have been checked: a part's word alone opens and allocates nothing."""
    file, block = part["file"], part["block"]
    box = Box(tuple(entry["offset"]), tuple(entry["local"]))
    nbytes = box.numel * saved.dtype.itemsize
    start = file["header"] + entry["at"]
    name = path.with_suffix(".safetensors").name
    sound = (
        file["name"] == name
        and len(box.offset) == len(box.shape) == len(saved.shape)
        and all(
            min(a, n) >= 0 and a + n <= whole
            for a, n, whole in zip(box.offset, box.shape, saved.shape, strict=True)
        )
        and file["header"] <= start
        and start + nbytes <= manifest.files[name]["bytes"]
        and block > 0
        and len(entry["crc32"]) == math.ceil(nbytes / block)
    )
    if not sound:
        raise DamagedCheckpoint(f"{path}: the entry of {saved.name!r} contradicts itself")
    return Chunk(manifest.folder / name, box, start, nbytes, block, entry["crc32"])


class Reader:
    """Open files of one checkpoint."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._open.values():
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
        found = 0
        for chunk in saved.chunks:
            if not target.numel():
                continue
            if chunk.box == box:
                self._bytes(chunk, 0, chunk.nbytes, saved.name, target.view(-1).view(torch.uint8))
                found += box.numel
            elif (both := box.meet(chunk.box)) is not None:
                found += both.numel
                target[both.inside(box)] = self._cut(chunk, both, saved)
        if found != target.numel():
            raise DamagedCheckpoint(
                f"{saved.name!r}: {found} of {target.numel()} elements of this rank's part are in the files"
            )

    def check(self, saved: Saved) -> None:
        """Read every byte of a tensor against its checksums.

        Raises:
            DamagedCheckpoint: One differs.
        """
        for chunk in saved.chunks:
            for start in range(0, chunk.nbytes, chunk.block):
                self._bytes(chunk, start, min(start + chunk.block, chunk.nbytes), saved.name)

    def check_header(self, part: dict[str, Any], folder: Path) -> None:
        """Check a safetensors file's header, which only other readers need.

        Raises:
            DamagedCheckpoint: It differs from what was written.
        """
        file = part["file"]
        if file is not None:
            path = folder / file["name"]
            header = os.pread(self._fd(path), file["header"], 0)
            if zlib.crc32(header) != file["crc32"]:
                raise DamagedCheckpoint(f"{path}: the checksum of its header differs from the part's")

    def _cut(self, chunk: Chunk, box: Box, saved: Saved) -> torch.Tensor:
        """A box that lies inside a chunk: its rows are read, whole blocks at a time."""
        rows = box.inside(chunk.box)
        row_bytes = chunk.nbytes // chunk.box.shape[0]
        first, last = rows[0].start * row_bytes, rows[0].stop * row_bytes
        start = first // chunk.block * chunk.block
        data = self._bytes(chunk, start, min(-(-last // chunk.block) * chunk.block, chunk.nbytes), saved.name)
        cut = data[first - start : last - start].view(saved.dtype)
        return cut.view(-1, *chunk.box.shape[1:])[(slice(None), *rows[1:])]

    def _bytes(
        self, chunk: Chunk, start: int, stop: int, name: str, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Whole blocks of a chunk, `start` to `stop`, checked."""
        memory = torch.empty(stop - start, dtype=torch.uint8, device="cpu") if into is None else into
        view = memoryview(memory.numpy().data)
        for at in range(start, stop, chunk.block):
            piece = view[at - start : min(at + chunk.block, stop) - start]
            _read_all(self._fd(chunk.path), piece, chunk.start + at, chunk.path)
            if zlib.crc32(piece) != chunk.sums[at // chunk.block]:
                where = f"bytes {chunk.start + at} to {chunk.start + at + piece.nbytes}"
                raise DamagedCheckpoint(f"{chunk.path}: tensor {name!r}, {where}: the checksum differs")
        return memory

    def _fd(self, path: Path) -> int:
        if path not in self._open:
            try:
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:
                raise DamagedCheckpoint(f"{path}: cannot be opened ({error})") from error
        return self._open[path]


def _read_all(fd: int, view: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < view.nbytes:
        got = os.preadv(fd, [view[done:]], offset + done)
        if got == 0:
            raise DamagedCheckpoint(f"{path}: ends at byte {offset + done}, before its tensors do")
        done += got


Wanted = dict[str, tuple[Saved, Box]]
"""Name -> (tensor, the box of it that this rank needs)."""


def room(wanted: Wanted) -> int:
    """Bytes that `read_boxes` takes, with each tensor on a 64-byte boundary."""
    return sum(_room(saved, box) for saved, box in wanted.values())


def read_boxes(wanted: Wanted, memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Read and check everything that is wanted.

    Args:
        wanted: What to read.
        memory: Host memory for it, uint8 (room(wanted),).

    Returns:
        Name -> view of `memory` of the box's shape.

    Raises:
        DamagedCheckpoint: Something differs from what was written, or is not there.
    """
    values: dict[str, torch.Tensor] = {}
    at = 0
    with Reader() as reader:
        for name, (saved, box) in wanted.items():
            flat = memory[at : at + box.numel * saved.dtype.itemsize].view(saved.dtype)
            values[name] = flat.view(box.shape)
            reader.fill(values[name], box, saved)
            at += _room(saved, box)
    return values


def _room(saved: Saved, box: Box) -> int:
    return -(-box.numel * saved.dtype.itemsize // 64) * 64
