"""How two checkpoints differ, tensor by tensor, in memory that does not grow with them."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overlapkit.checkpoint.catalog import Catalog, Saved
from overlapkit.checkpoint.codec import decode, root
from overlapkit.checkpoint.contents import entry_leaves, leaves, own_share, tensors_in_order
from overlapkit.checkpoint.finding import Step, Where, find_checkpoint
from overlapkit.checkpoint.manifest import Manifest, read_manifest
from overlapkit.checkpoint.progress import Count, Progress
from overlapkit.checkpoint.reader import Reader
from overlapkit.checkpoint.slices import SliceReader

_AT_ONCE = 1 << 20  # elements compared at once: what differs is taken out in float64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is in both checkpoints and not the same.

    Attributes:
        name: Its path in the state.
        dtypes: In the first and the second checkpoint.
        shapes: Likewise.
        differing: How many elements are not the same, bit for bit; None where dtypes or shapes differ.
        max_abs: The largest absolute difference of two elements: NaN where a NaN became a number or another
            NaN, 0 where only the sign of a zero changed. None where dtypes or shapes differ.
    """

    name: str
    dtypes: tuple[torch.dtype, torch.dtype]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    differing: int | None
    max_abs: float | None


@dataclass(frozen=True)
class Difference:
    """How the second of two checkpoints differs from the first.

    Attributes:
        folders: Both checkpoints.
        ranks: How many ranks' own values were compared: all, where as many ranks wrote both checkpoints,
            else only rank 0's.
        missing: Paths of tensors and values that only the first has.
        added: Paths of those that only the second has.
        tensors: The tensors that differ.
        values: By path, the plain values that differ, in the first and the second.
        same_tensors: How many tensors are the same.
    """

    folders: tuple[Path, Path]
    ranks: int
    missing: tuple[str, ...]
    added: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    values: dict[str, tuple[Any, Any]]
    same_tensors: int

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.missing or self.added or self.tensors or self.values)


def diff(
    first: Where,
    second: Where,
    *,
    steps: tuple[Step, Step] = ("latest", "latest"),
    progress: Progress | None = None,
) -> Difference:
    """Compare two checkpoints, of any world sizes, by the tensors that all ranks together hold.

    Besides the two lists of names, memory holds a slice of 64 MiB (or one row, where that is longer) of each.

    Args:
        first: A directory of checkpoints, or the folder of one.
        second: Likewise.
        steps: Which ones, where directories are given.
        progress: Told how many of the first one's bytes are compared.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        DamagedCheckpoint: One of them is damaged.
    """
    manifests = tuple(
        read_manifest(find_checkpoint(where, step))
        for where, step in zip((first, second), steps, strict=True)
    )
    one, other = (_Side(manifest, manifests[0].world == manifests[1].world) for manifest in manifests)
    names = [name for name in one.tensors if name in other.tensors]
    paths = [path for path in one.values if path in other.values]
    tensors = list(_compare_all([(name, one.tensors[name], other.tensors[name]) for name in names], progress))
    values = {
        path: (decode(one.values[path], str), decode(other.values[path], str))
        for path in paths
        if _text(one.values[path]) != _text(other.values[path])
    }
    for key in one.kinds.keys() & other.kinds.keys():
        if one.kinds[key] != other.kinds[key]:
            values[f"{root(key)} (kind)"] = (one.kinds[key], other.kinds[key])
    return Difference(
        folders=(one.folder, other.folder),
        ranks=one.ranks,
        missing=tuple(one.names_beyond(other)),
        added=tuple(other.names_beyond(one)),
        tensors=tuple(tensors),
        values=values,
        same_tensors=len(names) - len(tensors),
    )


def _text(value: Any) -> str:
    """Typed JSON as text, in which True, 1 and 1.0 differ."""
    return json.dumps(value, sort_keys=True)


class _Side:
    """One of the checkpoints: tensors and values by path; those of ranks above 0 begin with "rank N: "."""

    def __init__(self, manifest: Manifest, all_ranks: bool) -> None:
        catalog = Catalog(manifest, 0, manifest.world)
        self.folder = manifest.folder
        self.ranks = manifest.world if all_ranks else 1
        self.kinds = {key: entry["kind"] for key, entry in catalog.entries.items()}
        self.tensors = tensors_in_order(catalog)
        self.values = dict(leaves(catalog.rng, "rng"))
        for key, entry in catalog.entries.items():
            self.values |= entry_leaves(key, entry)
        for rank in range(1, self.ranks):
            own = own_share(manifest, rank)
            self.tensors |= {f"rank {rank}: {name}": saved for name, saved in own.tensors.items()}
            self.values |= {f"rank {rank}: {path}": value for path, value in own.values.items()}

    def names_beyond(self, other: "_Side") -> Iterator[str]:
        """The paths that only this side has."""
        yield from (name for name in self.tensors if name not in other.tensors)
        yield from (path for path in self.values if path not in other.values)


def _compare_all(
    pairs: list[tuple[str, Saved, Saved]], progress: Progress | None
) -> Iterator[TensorDifference]:
    count = Count(sum(math.prod(a.shape) * a.dtype.itemsize for _, a, _ in pairs), progress)
    with Reader() as reader:
        sides = SliceReader(reader), SliceReader(reader)
        for name, a, b in pairs:
            differing: int | None = None
            max_abs: float | None = None
            if (a.dtype, a.shape) == (b.dtype, b.shape):
                differing, max_abs = _compare(sides[0].read(a), sides[1].read(b), count)
            if differing != 0:
                yield TensorDifference(name, (a.dtype, b.dtype), (a.shape, b.shape), differing, max_abs)


def _compare(a: Iterator[torch.Tensor], b: Iterator[torch.Tensor], count: Count) -> tuple[int, float]:
    differing, max_abs = 0, 0.0
    for one, other in zip(a, b, strict=True):
        for x, y in zip(one.view(-1).split(_AT_ONCE), other.view(-1).split(_AT_ONCE), strict=True):
            bits = _BITS[x.element_size()]
            unequal = x.view(bits) != y.view(bits)
            if found := int(unequal.sum()):
                differing += found
                x, y = x.view(bits)[unequal].view(x.dtype), y.view(bits)[unequal].view(y.dtype)
                max_abs = float(np.maximum(max_abs, distance(x, y)))  # a NaN stays
        count.add(one.numel() * one.element_size())
    return differing, max_abs


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest absolute difference of two vectors of one dtype, exact up to its rounding to a float."""
    if x.is_complex():
        return float((x.to(torch.complex128) - y.to(torch.complex128)).abs().max())
    if x.is_floating_point():
        return float((x.to(torch.float64) - y.to(torch.float64)).abs().max())
    if x.dtype == torch.bool:
        return 1.0
    a, b = x.numpy(), y.numpy()
    unsigned = f"u{a.dtype.itemsize}"  # a signed difference could overflow
    down, up = a.view(unsigned) - b.view(unsigned), b.view(unsigned) - a.view(unsigned)
    return float(np.where(a > b, down, up).max())
