"""DTensors of heads: q and k sharded over batch, tokens or heads, and what belongs to their tokens."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from overlapkit.kernels.sharded import Function, taking_dtensors
from overlapkit.kernels.shards import check_rows, from_local, part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def by_tokens(fn: Function) -> Function:
    """Decorate a function of q and k (..., T, heads, D), cos, sin and positions, so that it takes DTensors.

    q and k lie alike, in whole heads. Positions and angles of tokens may be plain tensors, the same on all
    ranks, or lie anyhow; a table of angles is whole. Without positions, a token's is its place in all of q.
    """

    def on_shards(named: dict[str, Any]) -> Any:
        heads: list[Any] = [named.get("q"), named.get("k")]
        if not all(isinstance(x, Tensor) and x.dim() == heads[0].dim() in (3, 4) for x in heads):
            return None
        if not _given(named):
            return None
        out = fn(**named | _local(named))
        return tuple(
            from_local(part, heads[0].device_mesh, heads[0].placements, whole.shape)
            for part, whole in zip(out, heads, strict=True)
        )

    return taking_dtensors(fn, on_shards)


def _given(named: dict[str, Any]) -> bool:
    """Whether there are DTensors among the arguments.

    Raises:
        TypeError: q or k is none beside them.
        ValueError: A head of q or k is not whole, or the two lie on different meshes.
    """
    from torch.distributed.tensor import DTensor

    if not any(isinstance(value, DTensor) for value in named.values()):
        return False
    for name in ("q", "k"):
        check_rows(name, named[name], named[name].dim() - 1)
    if named["q"].device_mesh != named["k"].device_mesh:
        raise ValueError(
            f"k lies on {named['k'].device_mesh}, q on {named['q'].device_mesh}: use one mesh for both"
        )
    return True


def _local(named: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of each tensor."""
    q, k = named["q"], named["k"]
    if tuple(k.placements) != tuple(q.placements):
        k = k.redistribute(q.device_mesh, q.placements)
    local = {"q": q.to_local(), "k": k.to_local()}
    token = q.dim() - 3
    batch = 0 if token else None
    where = (q.device_mesh, q.placements, q.shape)
    positions = named.get("positions")
    if positions is None and any(getattr(p, "dim", None) == token for p in q.placements):
        positions = _places(named["cos"], q, token)
    if isinstance(positions, Tensor):
        local["positions"] = part(positions, [token] if positions.dim() == 1 else [batch, token], *where)
    for name in ("cos", "sin"):
        if isinstance(named[name], Tensor):
            local[name] = part(named[name], [batch, token] if named[name].dim() == 3 else [], *where)
    return local


def _places(cos: Any, q: "DTensor", token: int) -> Tensor | None:
    """The tokens' places in all of q, where cos is a table by place."""
    if not isinstance(cos, Tensor) or cos.dim() != 2:
        return None
    if cos.shape[0] < q.shape[token]:
        raise ValueError(
            f"cos has shape {tuple(cos.shape)}: q of shape {tuple(q.shape)} needs {q.shape[token]} rows"
        )
    return torch.arange(q.shape[token], device=q.device)
