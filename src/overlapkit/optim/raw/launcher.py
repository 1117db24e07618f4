"""Launches: one for the update of everything in a table, one before it for the sum of squares."""

import torch
from torch import Tensor

from overlapkit.optim.raw import adamw, clipping
from overlapkit.optim.table import Table

WARPS = 4


def update(
    table: Table,
    done: Tensor,
    scale: Tensor | None,
    found_inf: Tensor | None,
    sums: Tensor | None,
    norm: Tensor | None,
) -> None:
    """One AdamW step of everything in the table.

    Args:
        table: Refreshed.
        done: int32 (1,), zero between launches: how many programs are done.
        scale: fp32, what gradients are to be divided by, or None.
        found_inf: fp32, not zero where the step is to be skipped, or None.
        sums: fp32, what adds up to the gradients' sum of squares, to clip by; None does not clip.
        norm: fp32, takes the norm where there are sums.
    """
    assert table.live is not None
    adamw.update.launch(
        table.programs,
        table.rows,
        table.live,
        done,
        table.live if scale is None else scale,
        table.live if found_inf is None else found_inf,
        table.live if sums is None else sums,
        table.live if norm is None else norm,
        warps=WARPS,
        resident=1,
        KINDS=table.kinds,
        N_KINDS=len(table.kinds),
        HAS_SCALE=scale is not None,
        HAS_FOUND_INF=found_inf is not None,
        CLIP=sums is not None,
    )


def squares(table: Table, *, largest: bool = False) -> Tensor:
    """What the gradients' norm is made of: fp32 (meshes, programs).

    Args:
        table: Refreshed.
        largest: Largest absolute values in place of sums of squares.
    """
    assert table.live is not None
    sums = torch.empty(len(table.meshes), table.programs, device=table.device)
    kinds = {"KINDS": table.kinds, "N_KINDS": len(table.kinds), "LARGEST": largest}
    n_meshes = len(table.meshes)
    clipping.squares.launch(
        table.programs, table.rows, table.live, sums, warps=WARPS, resident=1, N_MESHES=n_meshes, **kinds
    )
    return sums


def multiply(table: Table, sums: Tensor, *, largest: bool = False) -> Tensor:
    """Clip the gradients in a table in place, by what `squares` gave; returns their norm, fp32 ()."""
    assert table.live is not None
    norm = torch.empty((), device=table.device)
    kinds = {"KINDS": table.kinds, "N_KINDS": len(table.kinds), "LARGEST": largest}
    tables = (table.rows, table.live)
    clipping.multiply.launch(table.programs, *tables, sums, norm, warps=WARPS, resident=1, **kinds)
    return norm
