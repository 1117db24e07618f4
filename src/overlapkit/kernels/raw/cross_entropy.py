# mypy: allow-untyped-defs, allow-incomplete-defs
"""Cross entropy's kernels: an online softmax forward, and a backward that needs only the saved lse.

Bytes: forward reads the logits once, backward reads them again and writes their gradient. That is 1.5
of the floor (one read, one write), which only a gradient written in place could reach.
"""

import torch
import triton.language as tl
from torch import Tensor

from overlapkit.kernels.autotune import tuned
from overlapkit.kernels.cross_entropy_options import Options
from overlapkit.kernels.raw.cross_entropy_math import (
    at_target,
    class_weights,
    coefficients,
    constants,
    gradient,
    log_sum,
    row_loss,
    row_sums,
)
from overlapkit.launch import as_rows, kernel, tile


@kernel
def _forward(
    logits_ptr,
    target_ptr,
    weight_ptr,
    weight_sum_ptr,
    loss_ptr,
    lse_ptr,
    low_ptr,
    dot_ptr,
    logits_stride,
    target_stride,
    n_rows,
    n_cols,
    n_classes,
    first,
    ignore_index,
    smoothing,
    z_loss,
    softcap,
    SHARDED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Loss, lse and low; of a shard lse, low, and in loss's place the target's logit, and the dot."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = rows < n_rows
    target = tl.load(target_ptr + rows * target_stride, mask=live, other=0)
    ignored = target == ignore_index
    known = live & (target >= 0) & (target < n_classes) & (target != ignore_index)
    top, total, dot = row_sums(
        logits_ptr,
        weight_ptr,
        rows,
        live,
        logits_stride,
        first,
        n_cols,
        softcap,
        HAS_WEIGHT,
        HAS_SMOOTHING,
        HAS_SOFTCAP,
        BLOCK_ROWS,
        BLOCK_COLS,
    )
    lse, low = log_sum(top, total)
    hit = at_target(logits_ptr, rows, logits_stride, target, known, first, n_cols, softcap, HAS_SOFTCAP)
    if SHARDED:
        tl.store(loss_ptr + rows, hit, mask=live)
        tl.store(dot_ptr + rows, dot, mask=live)
    else:
        loss = row_loss(
            lse,
            low,
            hit,
            dot,
            target,
            known,
            weight_ptr,
            weight_sum_ptr,
            n_classes,
            smoothing,
            z_loss,
            HAS_WEIGHT,
            HAS_SMOOTHING,
        )
        tl.store(loss_ptr + rows, tl.where(ignored, 0.0, loss), mask=live)
    tl.store(lse_ptr + rows, lse, mask=live)
    tl.store(low_ptr + rows, low, mask=live)


@kernel
def _backward(
    dloss_ptr,
    dlse_ptr,
    logits_ptr,
    target_ptr,
    weight_ptr,
    weight_sum_ptr,
    lse_ptr,
    low_ptr,
    dlogits_ptr,
    dloss_stride,
    dlse_stride,
    logits_stride,
    dlogits_stride,
    target_stride,
    n_rows,
    n_cols,
    n_classes,
    first,
    ignore_index,
    smoothing,
    z_loss,
    softcap,
    HAS_DLSE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One tile of the gradient. It may be written over the logits: each is read by who writes it."""
    column_tiles = tl.cdiv(n_cols, BLOCK_COLS)
    rows = (tl.program_id(0) // column_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = (tl.program_id(0) % column_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    live = rows < n_rows
    target = tl.load(target_ptr + rows * target_stride, mask=live, other=0)
    kept = live & (target != ignore_index)
    known = kept & (target >= 0) & (target < n_classes)
    lse = tl.load(lse_ptr + rows, mask=live, other=0.0)
    low = tl.load(low_ptr + rows, mask=live, other=0.0)
    dloss = tl.load(dloss_ptr + rows * dloss_stride, mask=kept, other=0.0).to(tl.float32)
    on_softmax, on_target, on_weight = coefficients(
        dloss,
        lse,
        target,
        kept,
        known,
        weight_ptr,
        weight_sum_ptr,
        n_classes,
        smoothing,
        z_loss,
        HAS_WEIGHT,
        HAS_SMOOTHING,
    )
    read = kept
    if HAS_DLSE:
        on_softmax += tl.load(dlse_ptr + rows * dlse_stride, mask=live, other=0.0).to(tl.float32)
        read = live
    inside = live[:, None] & (cols < n_cols)[None, :]
    mask = inside & read[:, None]
    x = tl.load(logits_ptr + rows[:, None] * logits_stride + cols[None, :], mask=mask, other=float("-inf"))
    dx = gradient(
        x.to(tl.float32),
        cols,
        target,
        lse,
        low,
        on_softmax,
        on_target,
        on_weight,
        weight_ptr,
        first,
        n_cols,
        softcap,
        HAS_WEIGHT,
        HAS_SMOOTHING,
        HAS_SOFTCAP,
    )
    out = dlogits_ptr + rows[:, None] * dlogits_stride + cols[None, :]
    tl.store(out, tl.where(mask, dx, 0.0).to(dlogits_ptr.dtype.element_ty), mask=inside)


def forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, lse and what lse lost to rounding, each (N,) fp32."""
    loss, lse, low = (logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(3))
    _launch_forward(logits, target, weight, options, None, loss, lse, low, loss)
    return loss, lse, low


def statistics(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: Options, shard: tuple[int, int]
) -> Tensor:
    """Return what the rows of a shard (its first class, number of all classes) contribute: (4, N) fp32.

    That is their lse and what it lost to rounding; the target's logit, 0 where another shard has it; and
    with label smoothing the dot with the weights.
    """
    found = logits.new_zeros((4, logits.shape[0]), dtype=torch.float32)
    lse, low, hit, dot = found
    _launch_forward(logits, target, weight, options, shard, hit, lse, low, dot)
    return found


@tuned()
def _launch_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: Options,
    shard: tuple[int, int] | None,
    *outputs: Tensor,
) -> None:
    x = as_rows(logits)
    n_rows, n_cols = x.shape
    first, n_classes = shard or (0, n_cols)
    w, weight_sum = class_weights(x, weight, options.label_smoothing, n_classes)
    block = tile(n_rows, n_cols, elements=4096)
    _forward.launch(
        -(-n_rows // block.rows),
        x,
        target,
        w,
        weight_sum,
        *outputs,
        x.stride(0),
        target.stride(0),
        n_rows,
        n_cols,
        n_classes,
        first,
        *options.numbers,
        warps=block.warps,
        SHARDED=shard is not None,
        **constants(weight, options, block),
    )


@tuned(restores=("out",))
def backward(
    dloss: Tensor,
    dlse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    low: Tensor,
    options: Options,
    shard: tuple[int, int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the gradient of logits (N, V): contiguous, or in `out` with dense rows, which may be logits."""
    x = as_rows(logits)
    n_rows, n_cols = x.shape
    first, n_classes = shard or (0, n_cols)
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format) if out is None else out
    w, weight_sum = class_weights(x, weight, options.label_smoothing, n_classes)
    block = tile(n_rows, n_cols, elements=2048)
    _backward.launch(
        -(-n_rows // block.rows) * -(-n_cols // block.cols),
        dloss,
        dloss if dlse is None else dlse,
        x,
        target,
        w,
        weight_sum,
        lse,
        low,
        dlogits,
        dloss.stride(0),
        0 if dlse is None else dlse.stride(0),
        x.stride(0),
        dlogits.stride(0),
        target.stride(0),
        n_rows,
        n_cols,
        n_classes,
        first,
        *options.numbers,
        warps=block.warps,
        HAS_DLSE=dlse is not None,
        **constants(weight, options, block),
    )
    return dlogits
