"""Boxes: which part of a global tensor a rank holds, and which rank writes it.

Both follow from the mesh coordinates of a DTensor alone. There are no collectives here.
"""

import functools
import itertools
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Box(NamedTuple):
    """A rectangular part of a tensor: where it starts and how long it is, in elements of each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        """The box of an entire tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Elements inside; 1 for a scalar."""
        return math.prod(self.shape)

    def meet(self, other: "Box") -> "Box | None":
        """What both boxes cover, or None where that is nothing."""
        start = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        mine = (a + n for a, n in zip(self.offset, self.shape, strict=True))
        theirs = (b + n for b, n in zip(other.offset, other.shape, strict=True))
        shape = tuple(min(a, b) - s for a, b, s in zip(mine, theirs, start, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def inside(self, outer: "Box") -> tuple[slice, ...]:
        """The slices that cut this box out of a tensor that holds `outer`."""
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(a, a + n) for a, n in zip(starts, self.shape, strict=True))


def tiles(boxes: Sequence[Box], whole: Box) -> bool:
    """Whether boxes make up a whole: each element of it is in one of them, and in no other."""
    filled = [box for box in boxes if box.numel]
    if len(filled) < 2 or not whole.numel:
        return filled == ([whole] if whole.numel else [])
    if sum(box.numel for box in filled) != whole.numel or any(box.meet(whole) != box for box in filled):
        return False
    spans = [sorted(set(zip(*sides, strict=True))) for sides in _sides(filled)]
    if all(map(_in_a_row, spans)) and len(set(filled)) == len(filled) == math.prod(map(len, spans)):
        return True  # a grid, as sharding makes it: no two need be compared
    most = max(range(len(spans)), key=lambda dimension: len(spans[dimension]))
    filled.sort(key=lambda box: box.offset[most])
    for place, box in enumerate(filled):
        end = box.offset[most] + box.shape[most]
        for other in itertools.islice(filled, place + 1, None):
            if other.offset[most] >= end:
                break
            if box.meet(other) is not None:
                return False
    return True


def _sides(boxes: Sequence[Box]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """For each dimension, all boxes' offsets and all their lengths."""
    offsets, shapes = zip(*boxes, strict=True)
    return list(zip(zip(*offsets, strict=True), zip(*shapes, strict=True), strict=True))


def _in_a_row(spans: list[tuple[int, int]]) -> bool:
    return all(a + n == b for (a, n), (b, _) in itertools.pairwise(spans))


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor. Does not import torch.distributed.tensor: without it there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, Box]:
    """The memory that this rank holds of a tensor, and its box in the global tensor.

    Raises:
        TypeError: Its placements do not say which part this rank holds (a pending reduction).
    """
    if not is_dtensor(tensor):
        return tensor.detach(), Box.whole(tuple(tensor.shape))
    with torch.no_grad():
        local = tensor.to_local().detach()
    if any(placement.is_partial() for placement in tensor.placements):
        raise TypeError(
            f"state {name!r} has placements {tensor.placements}: a sum that is still pending cannot be kept; "
            "redistribute() it first"
        )
    coordinate = tensor.device_mesh.get_coordinate()
    here = None if coordinate is None else tuple(coordinate)
    shape, offset = _shape_and_offset(tensor.shape, tensor.device_mesh, tensor.placements, here)
    if shape != tuple(local.shape) and local.numel():
        raise TypeError(
            f"state {name!r} has placements {tensor.placements} and a local shape {tuple(local.shape)}, "
            f"where {shape} was expected: this sharding cannot be kept"
        )
    if not local.numel():  # an uneven shard's empty rest, or a rank outside of the mesh
        return local, Box(
            (0,) * tensor.ndim, tuple(local.shape) if local.ndim == tensor.ndim else (0,) * tensor.ndim
        )
    return local, Box(offset, shape)


@functools.lru_cache(4096)  # thousands of tensors have few shapes
def _shape_and_offset(
    shape: torch.Size, mesh: Any, placements: Any, coordinate: tuple[int, ...] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A local part's; the coordinate is the mesh's own, and is what tells two ranks' meshes apart."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(local), tuple(offset)


def is_first_replica(tensor: torch.Tensor, rank: int) -> bool:
    """Whether this rank writes its part: of equal parts, the one at coordinate 0 is written.

    Plain tensors are the same on every rank, and rank 0 writes them.
    """
    if not is_dtensor(tensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and _first(tensor, coordinate) == tuple(coordinate)


def first_replica(tensor: "DTensor") -> int | None:
    """The rank that writes what this one holds of a tensor; None on a rank outside of its mesh."""
    coordinate = tensor.device_mesh.get_coordinate()
    return None if coordinate is None else int(tensor.device_mesh.mesh[_first(tensor, coordinate)])


def _first(tensor: "DTensor", coordinate: Sequence[int]) -> tuple[int, ...]:
    pairs = zip(coordinate, tensor.placements, strict=True)
    return tuple(0 if placement.is_replicate() else at for at, placement in pairs)
