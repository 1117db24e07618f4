"""Catalog: what a checkpoint holds for one rank, and where, as its parts say; all of that is checked."""

import functools
import itertools
import math
import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from overlapkit.checkpoint.box import Box, tiles
from overlapkit.checkpoint.codec import decode
from overlapkit.checkpoint.errors import DamagedCheckpoint
from overlapkit.checkpoint.hashing import WIDTH
from overlapkit.checkpoint.manifest import Manifest, making_sense_of
from overlapkit.checkpoint.pieces import DTYPES

_DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}
_KINDS = ("module", "optimizer", "object", "tensor", "value", "tree")
_ADDRESSABLE = 1 << 60  # elements


@dataclass(frozen=True, slots=True)
class Chunk:
    """One rank's box of a tensor: bytes `start` to `start + nbytes` of a file, with a checksum a block."""

    path: Path
    box: Box
    start: int
    nbytes: int
    block: int
    hash: str
    sums: list[Any]


@dataclass(slots=True)
class Saved:
    """A tensor in a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sharded: bool
    device: str
    chunks: list[Chunk]


Wanted = dict[str, tuple[Saved, Box]]
"""Name -> (tensor, the box of it that this rank needs)."""


class Catalog:
    """What a checkpoint holds for one rank.

    Attributes:
        step: Its step.
        world: The number of ranks that wrote it.
        entries: For each key of the state its kind and typed JSON: this rank's own where as many ranks wrote
            the checkpoint as read it, else rank 0's.
        rng: The generators' states of the rank with this number; None where there was no such rank.
        tensors: By name. Tensors that every rank has of its own are those of the same rank as `entries`.
        whole: All parts were read: what is not here is not in the checkpoint.

    Args:
        manifest: The checkpoint's.
        rank: Of the reader.
        world: How many readers there are.
        writers: Read only these ranks' parts, where that may do: where as many ranks read as wrote.

    Raises:
        DamagedCheckpoint: A part differs from what was written, or makes no sense.
    """

    def __init__(
        self, manifest: Manifest, rank: int, world: int, writers: Collection[int] | None = None
    ) -> None:
        self.step = manifest.step
        self.world = manifest.world
        self.tensors: dict[str, Saved] = {}
        self.rng: dict[str, Any] | None = None
        mine = rank if world == manifest.world else 0
        aliases: dict[str, str] = {}
        numbers: Collection[int] = range(manifest.world)
        if writers is not None and world == manifest.world:
            numbers = sorted({mine, *writers})
        self.whole = len(numbers) == manifest.world
        for number in numbers:
            part = manifest.part(number)
            path = manifest.inside / f"rank-{number:05d}.json"
            with making_sense_of(path, "a part"):
                for saved, own in saved_tensors(part, manifest, path):
                    if number == mine or not own:
                        self._merge(saved, path)
                aliases |= {name: str(e["alias"]) for name, e in part["tensors"].items() if "alias" in e}
                if number == mine:
                    self.entries: dict[str, dict[str, Any]] = part["state"]
                    for key, entry in self.entries.items():
                        with making_sense_of(path, f"an entry of {key!r}"):
                            _check_entry(entry)
                if number == rank and part["rng"] is not None:
                    self.rng = dict(part["rng"])
                    decode(self.rng, _checked_name)
        tiled: set[tuple[Any, ...]] = set()  # thousands of tensors are cut in few ways
        for saved in self.tensors.values():
            boxes = [chunk.box for chunk in saved.chunks]
            alone = len(boxes) == 1 and boxes[0].shape == saved.shape  # mostly: nothing need be put together
            if alone or (cut := (saved.shape, *boxes)) in tiled:
                continue
            if self.whole and tiles(boxes, Box.whole(saved.shape)):
                tiled.add(cut)
                continue
            saved.chunks = _once(saved.chunks)
            boxes = [chunk.box for chunk in saved.chunks]
            if self.whole and not tiles(boxes, Box.whole(saved.shape)):
                found, whole = sum(box.numel for box in boxes), math.prod(saved.shape)
                raise DamagedCheckpoint(
                    f"{manifest.folder}: holds {found} of {whole} elements of {saved.name!r}, or some twice"
                )
        for name, first in aliases.items():
            if first not in self.tensors:
                if not self.whole:
                    continue
                raise DamagedCheckpoint(
                    f"{manifest.folder}: {name!r} shares the data of {first!r}, which is missing"
                )
            self.tensors[name] = self.tensors[first]

    def covers(self, wanted: Wanted) -> bool:
        """Whether all that is wanted is in the parts that were read."""
        for saved, box in wanted.values():
            boxes = (chunk.box if chunk.box == box else box.meet(chunk.box) for chunk in saved.chunks)
            found = [both for both in boxes if both is not None]
            if found != [box] and not tiles(found, box):
                return False
        return True

    def _merge(self, saved: Saved, path: Path) -> None:
        known = self.tensors.setdefault(saved.name, saved)
        if known is saved:
            return
        if (known.dtype, known.shape) != (saved.dtype, saved.shape):
            raise DamagedCheckpoint(
                f"{path}: {saved.name!r} is {saved.dtype} {saved.shape}, in other parts {known}"
            )
        known.chunks += saved.chunks


@dataclass(frozen=True, slots=True)
class DataFile:
    """A rank's file of tensors, as its part describes it.

    Attributes:
        path: Beside the part.
        nbytes: Its length.
        header: Where its tensors' data begins.
        block: Bytes under one checksum.
        hash: The algorithm of the checksums.
        header_sum: That of the header.
        sums: Those of all blocks in a row; version 1 has them in each tensor's entry.
    """

    path: Path
    nbytes: int
    header: int
    block: int
    hash: str
    header_sum: Any
    sums: str


def _once(chunks: list[Chunk]) -> list[Chunk]:
    """Of equal boxes the first: tensor-parallel ranks write each what is split over the others only."""
    return list({chunk.box: chunk for chunk in reversed(chunks)}.values())[::-1]


def data_file(part: dict[str, Any], manifest: Manifest, path: Path) -> DataFile | None:
    """The file of tensors that belongs to a part; None where it needs none.

    Raises:
        DamagedCheckpoint: The part contradicts itself, or the manifest.
        Exception: It is no part.
    """
    file, block, beside = part["file"], part["block"], path.with_suffix(".safetensors")
    if file is None:
        return None
    nbytes, header, sums = manifest.files[beside.name]["bytes"], file["header"], file.get("sums", "")
    sound = (
        file["name"] == beside.name
        and type(header) is type(block) is int
        and 0 < header <= nbytes
        and block > 0
        and block % 8 == 0  # what begins with a block is aligned, whatever its dtype
        and type(sums) is str
    )
    if not sound:
        raise DamagedCheckpoint(f"{path}: what it says of its file of tensors contradicts itself")
    return DataFile(beside, nbytes, header, block, manifest.hash, file[manifest.hash], sums)


def saved_tensors(part: dict[str, Any], manifest: Manifest, path: Path) -> Iterator[tuple[Saved, bool]]:
    """The tensors that one part lists, and whether each is the rank's own.

    A part's word alone opens and allocates nothing: places and shapes are checked here.

    Raises:
        DamagedCheckpoint: The part contradicts itself, or the manifest.
        Exception: It is no part.
    """
    file = data_file(part, manifest, path)
    spans = []
    for name, entry in part["tensors"].items():
        if "alias" not in entry:
            dtype, shape = _DTYPE_OF[entry["dtype"]], tuple(entry["shape"])
            saved = Saved(name, dtype, shape, entry["sharded"], entry["device"], [])
            chunk = None if file is None else _chunk(entry, saved, file)
            if chunk is None:
                raise DamagedCheckpoint(f"{path}: the entry of {name!r} contradicts itself")
            saved.chunks.append(chunk)
            if chunk.nbytes:
                spans.append((chunk.start, chunk.start + chunk.nbytes))
            yield saved, entry["own"]
    spans.sort()
    if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
        raise DamagedCheckpoint(f"{path}: two of its tensors share bytes of their file")


def _chunk(entry: dict[str, Any], saved: Saved, file: DataFile) -> Chunk | None:
    """Where a tensor's data is; None where that makes no sense."""
    box, at, shape = Box(tuple(entry["offset"]), tuple(entry["local"])), entry["at"], saved.shape
    if set(map(type, (at, *shape, *box.offset, *box.shape))) != {int} or not (
        _lies_in(box, shape)
        and type(entry["own"]) is type(saved.sharded) is bool
        and type(saved.device) is str
    ):
        return None
    nbytes, start = box.numel * saved.dtype.itemsize, file.header + at
    if at < 0 or start + nbytes > file.nbytes:
        return None
    blocks = -(-nbytes // file.block)
    sums = _sums(entry, file, blocks)
    if len(sums) != blocks:
        return None
    return Chunk(file.path, box, start, nbytes, file.block, file.hash, sums)


@functools.lru_cache(4096)  # thousands of tensors have few shapes
def _lies_in(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box, and the tensor of this shape that it is said to be a part of, make sense."""
    return (
        len(box.offset) == len(box.shape) == len(shape)
        and min((*box.offset, *box.shape), default=0) >= 0
        and all(map(operator.le, map(operator.add, box.offset, box.shape), shape))
        and math.prod(filter(None, shape)) < _ADDRESSABLE  # of an empty tensor, too
    )


def _sums(entry: dict[str, Any], file: DataFile, blocks: int) -> list[Any]:
    """The checksums of an entry: those of version 1 stand in it, others in a row for the whole file."""
    if "crc32" in entry:
        return list(entry["crc32"])
    first, row = entry["sum"], file.sums
    if first < 0 or (first + blocks) * WIDTH > len(row):
        return []
    return [row[place * WIDTH : (place + 1) * WIDTH] for place in range(first, first + blocks)]


def _check_entry(entry: dict[str, Any]) -> None:
    """Raise where an entry of a state is none: a restore that had begun would fail half-way."""
    if entry["kind"] not in _KINDS:
        raise ValueError(f"{entry['kind']!r} is no kind of entry")
    value = decode(entry["value"], _checked_name)
    if entry["kind"] == "module":
        dict.items(value)
    if entry["kind"] == "optimizer":
        names = {name for group in value["rest"]["param_groups"] for name in group["params"]}
        if not all(type(name) is str for name in names):
            raise TypeError("the name of a parameter is no text")
        of_parameters = [moments for name, moments in value["state"].items() if name in names]
        if not all(isinstance(moments, dict) for moments in of_parameters):
            raise TypeError("the state of a parameter is no dict")


def _checked_name(name: str) -> None:
    if type(name) is not str:
        raise TypeError(f"{name!r} is no name of a tensor")
