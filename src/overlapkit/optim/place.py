"""Where a shard's elements lie in the global tensor, and over what their squares must still be added up."""

import math
from typing import Any, NamedTuple

from torch import Tensor

from overlapkit.optim.state import local


class Place(NamedTuple):
    """The global row-major index of a local element: base + i // inner * outer + i % inner."""

    base: int
    inner: int
    outer: int


def place_of(param: Tensor) -> Place:
    """Where this rank's part of a parameter lies.

    Raises:
        NotImplementedError: It is sharded along two dimensions of which neither is the first.
    """
    here = local(param)
    if here is param:
        return Place(0, max(1, here.numel()), max(1, here.numel()))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = param
    shape, offset = compute_local_shape_and_global_offset(
        param.shape, sharded.device_mesh, sharded.placements
    )
    cut = [dim for dim in range(param.dim()) if shape[dim] != param.shape[dim]]
    if len([dim for dim in cut if dim != 0]) > 1:
        raise NotImplementedError(
            f"params has one of shape {tuple(param.shape)} sharded along dimensions {cut}: rounding at "
            "random needs at most one besides the first; use precision='bf16_master' and moments='fp32'"
        )
    dim = max(cut, default=0)
    inner, outer = (math.prod(sizes[dim:]) for sizes in (shape, param.shape))
    base = sum(offset[d] * math.prod(param.shape[d + 1 :]) for d in range(param.dim()))
    return Place(base, max(1, inner), max(1, outer))


def shards_over(grad: Tensor) -> tuple[Any, tuple[int, ...]] | None:
    """The mesh and those of its dimensions over which a gradient is sharded; None where it is whole."""
    if local(grad) is grad:
        return None
    sharded: Any = grad
    dims = tuple(
        i
        for i, placement in enumerate(sharded.placements)
        if not placement.is_replicate() and sharded.device_mesh.size(i) > 1
    )
    return (sharded.device_mesh, dims) if dims else None


def is_cut_within_rows(param: Tensor) -> bool:
    """Whether ranks hold parts of what lies behind one index of the first dimension."""
    found, like = shards_over(param), getattr(param, "placements", ())
    return found is not None and any(getattr(like[i], "dim", 0) != 0 for i in found[1])


def is_partial(tensor: Tensor) -> bool:
    """Whether ranks hold summands of it."""
    return any(placement.is_partial() for placement in getattr(tensor, "placements", ()))
