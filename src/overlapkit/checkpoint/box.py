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
        start, shape = [], []
        for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            first = max(a, b)
            start.append(first)
            shape.append(min(a + n, b + m) - first)
            if shape[-1] <= 0:
                return None
        return Box(tuple(start), tuple(shape))

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


def local_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this rank holds of a tensor."""
    return (tensor._local_tensor if is_dtensor(tensor) else tensor).detach()


def local_part(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, Box]:
    """The memory that this rank holds of a tensor, and its box in the global tensor.

    Raises:
        TypeError: Its placements do not say which part this rank holds (a pending reduction).
    """
    local = local_memory(tensor)
    if not is_dtensor(tensor):
        return local, Box.whole(tuple(tensor.shape))
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    box = _box(tensor.shape, mesh, placements, None if coordinate is None else tuple(coordinate))
    if box is None:
        raise TypeError(
            f"state {name!r} has placements {placements}: a sum that is still pending cannot be kept; "
            "redistribute() it first"
        )
    if not local.numel():  # an uneven shard's empty rest, or a rank outside of the mesh
        return local, Box(
            (0,) * tensor.ndim, tuple(local.shape) if local.ndim == tensor.ndim else (0,) * tensor.ndim
        )
    if box.shape != local.shape:
        raise TypeError(
            f"state {name!r} has placements {placements} and a local shape {tuple(local.shape)}, "
            f"where {box.shape} was expected: this sharding cannot be kept"
        )
    return local, box


@functools.lru_cache(4096)  # thousands of tensors have few shapes
def _box(shape: torch.Size, mesh: Any, placements: Any, coordinate: tuple[int, ...] | None) -> Box | None:
    """A local part's, or None where it is no part but a summand.

    The coordinate is the mesh's own, and is what tells two ranks' meshes apart.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in placements):
        return None
    local, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(offset), tuple(local))


def is_first_replica(tensor: torch.Tensor, rank: int) -> bool:
    """Whether this rank writes its part: of equal parts, the one at coordinate 0 is written.

    Plain tensors are the same on every rank, and rank 0 writes them.
    """
    if not is_dtensor(tensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and _first(tensor.placements, tuple(coordinate)) == tuple(coordinate)


def first_replica(tensor: "DTensor") -> int | None:
    """The rank that writes what this one holds of a tensor; None on a rank outside of its mesh."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    return int(tensor.device_mesh.mesh[_first(tensor.placements, tuple(coordinate))])


@functools.lru_cache
def _first(placements: Any, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    pairs = zip(coordinate, placements, strict=True)
    return tuple(0 if placement.is_replicate() else at for at, placement in pairs)
