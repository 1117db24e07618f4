"""Catalog: what a checkpoint holds for one rank, and where, as its parts say; all of that is checked."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.codec import decode
from overlapkit.checkpoint.errors import DamagedCheckpoint
from overlapkit.checkpoint.hashing import WIDTH
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
        self.rng: Any = None
        mine = rank if world == manifest.world else 0
        aliases: dict[str, str] = {}
        numbers: Collection[int] = range(manifest.world)
        if writers is not None and world == manifest.world:
            numbers = sorted({mine, *writers})
        self.whole = len(numbers) == manifest.world
        for number in numbers:
            part = manifest.part(number)
            path = manifest.inside / f"rank-{number:05d}.json"
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
        for saved in self.tensors.values() if self.whole else ():
            found, whole = sum(chunk.box.numel for chunk in saved.chunks), math.prod(saved.shape)
            if found != whole:
                raise DamagedCheckpoint(
                    f"{manifest.folder}: holds {found} of {whole} elements of {saved.name!r}"
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
            if box.numel and sum(both.numel for both in boxes if both is not None) != box.numel:
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


def saved_tensors(part: dict[str, Any], manifest: Manifest, path: Path) -> Iterator[tuple[Saved, bool]]:
    """The tensors that one part lists, and whether each is the rank's own."""
    data = path.with_suffix(".safetensors")
    for name, entry in part["tensors"].items():
        if "alias" not in entry:
            dtype, shape = _DTYPE_OF[entry["dtype"]], tuple(entry["shape"])
            saved = Saved(name, dtype, shape, entry["sharded"], entry["device"], [])
            saved.chunks.append(_chunk(entry, saved, part, manifest, data))
            yield saved, entry["own"]


def _chunk(
    entry: dict[str, Any], saved: Saved, part: dict[str, Any], manifest: Manifest, data: Path
) -> Chunk:
    """A chunk whose place and shape have been checked: a part's word alone opens and allocates nothing."""
    file, block, hash = part["file"], part["block"], manifest.hash
    box = Box(tuple(entry["offset"]), tuple(entry["local"]))
    nbytes = box.numel * saved.dtype.itemsize
    start = file["header"] + entry["at"]
    sums = _sums(entry, file, -(-nbytes // block)) if block > 0 <= nbytes else []
    sound = (
        file["name"] == data.name
        and len(box.offset) == len(box.shape) == len(saved.shape)
        and all(
            min(a, n) >= 0 and a + n <= whole
            for a, n, whole in zip(box.offset, box.shape, saved.shape, strict=True)
        )
        and file["header"] <= start
        and start + nbytes <= manifest.files[data.name]["bytes"]
        and block > 0
        and block % 8 == 0  # what begins with a block is aligned, whatever its dtype
        and len(sums) == -(-nbytes // block)
    )
    if not sound:
        part_path = data.with_suffix(".json")
        raise DamagedCheckpoint(f"{part_path}: the entry of {saved.name!r} contradicts itself")
    return Chunk(data, box, start, nbytes, block, hash, sums)


def _sums(entry: dict[str, Any], file: dict[str, Any], blocks: int) -> list[Any]:
    """The checksums of an entry: those of version 1 stand in it, others in a row for the whole file."""
    if "crc32" in entry:
        return list(entry["crc32"])
    first, row = entry["sum"], file["sums"]
    if first < 0 or (first + blocks) * WIDTH > len(row):
        return []
    return [row[place * WIDTH : (place + 1) * WIDTH] for place in range(first, first + blocks)]
