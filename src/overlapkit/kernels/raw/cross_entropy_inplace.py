# mypy: allow-untyped-defs, allow-incomplete-defs
"""Cross entropy with its gradient written over the logits in one launch, and the gradient's later scaling.

Bytes: rows of up to 32,768 classes stay in registers (8,192 with softcap or label smoothing): one read, one
write. Wider ones are read twice, by one program a processor, so that the second read can hit the L2 cache.
"""

import torch
import triton.language as tl
from torch import Tensor

from overlapkit.kernels.autotune import tuned
from overlapkit.kernels.cross_entropy_options import Options
from overlapkit.kernels.raw.cross_entropy_math import (
    add_tile,
    at_target,
    class_weights,
    coefficients,
    constants,
    gradient,
    log_sum,
    row_loss,
    row_sums,
)
from overlapkit.launch import Tile, kernel, tile


@kernel
def _in_place(
    logits_ptr,
    target_ptr,
    weight_ptr,
    weight_sum_ptr,
    scale_ptr,
    loss_ptr,
    lse_ptr,
    logits_stride,
    target_stride,
    n_rows,
    n_cols,
    ignore_index,
    smoothing,
    z_loss,
    softcap,
    HAS_SCALE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ONE_PASS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Loss and lse of whole rows; then `scale` times the loss's gradient in the logits' place."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = rows < n_rows
    target = tl.load(target_ptr + rows * target_stride, mask=live, other=0)
    kept = live & (target != ignore_index)
    known = kept & (target >= 0) & (target < n_cols)
    hit = at_target(logits_ptr, rows, logits_stride, target, known, 0, n_cols, softcap, HAS_SOFTCAP)
    if ONE_PASS:
        cols = tl.arange(0, BLOCK_COLS)
        mask = live[:, None] & (cols < n_cols)[None, :]
        tile_ptr = logits_ptr + rows[:, None] * logits_stride + cols[None, :]
        x = tl.load(tile_ptr, mask=mask, other=float("-inf"))
        top, total, dot = add_tile(
            tl.full((BLOCK_ROWS,), float("-inf"), tl.float32),
            tl.full((BLOCK_ROWS,), 0.0, tl.float32),
            tl.full((BLOCK_ROWS,), 0.0, tl.float32),
            x.to(tl.float32),
            cols,
            mask,
            weight_ptr,
            0,
            n_cols,
            softcap,
            HAS_WEIGHT,
            HAS_SMOOTHING,
            HAS_SOFTCAP,
        )
    else:
        top, total, dot = row_sums(
            logits_ptr,
            weight_ptr,
            rows,
            live,
            logits_stride,
            0,
            n_cols,
            softcap,
            HAS_WEIGHT,
            HAS_SMOOTHING,
            HAS_SOFTCAP,
            BLOCK_ROWS,
            BLOCK_COLS,
        )
    lse, low = log_sum(top, total)
    loss = row_loss(
        lse,
        low,
        hit,
        dot,
        target,
        known,
        weight_ptr,
        weight_sum_ptr,
        n_cols,
        smoothing,
        z_loss,
        HAS_WEIGHT,
        HAS_SMOOTHING,
    )
    tl.store(loss_ptr + rows, tl.where(kept, loss, 0.0), mask=live)
    tl.store(lse_ptr + rows, lse, mask=live)
    dloss = tl.where(kept, 1.0, 0.0)
    if HAS_SCALE:
        dloss *= tl.load(scale_ptr)
    on_softmax, on_target, on_weight = coefficients(
        dloss,
        lse,
        target,
        kept,
        known,
        weight_ptr,
        weight_sum_ptr,
        n_cols,
        smoothing,
        z_loss,
        HAS_WEIGHT,
        HAS_SMOOTHING,
    )
    tl.debug_barrier()  # every thread has read the target's logit before any thread overwrites it
    if ONE_PASS:
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
            0,
            n_cols,
            softcap,
            HAS_WEIGHT,
            HAS_SMOOTHING,
            HAS_SOFTCAP,
        )
        tl.store(tile_ptr, tl.where(kept[:, None], dx, 0.0).to(logits_ptr.dtype.element_ty), mask=mask)
    else:
        for start in range(0, n_cols, BLOCK_COLS):
            cols = start + tl.arange(0, BLOCK_COLS)
            mask = live[:, None] & (cols < n_cols)[None, :]
            tile_ptr = logits_ptr + rows[:, None] * logits_stride + cols[None, :]
            dx = gradient(
                tl.load(tile_ptr, mask=mask, other=float("-inf")).to(tl.float32),
                cols,
                target,
                lse,
                low,
                on_softmax,
                on_target,
                on_weight,
                weight_ptr,
                0,
                n_cols,
                softcap,
                HAS_WEIGHT,
                HAS_SMOOTHING,
                HAS_SOFTCAP,
            )
            tl.store(tile_ptr, tl.where(kept[:, None], dx, 0.0).to(logits_ptr.dtype.element_ty), mask=mask)


@tuned(restores=("logits",))
def forward_and_gradient_(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Return loss and lse, each (N,) fp32; logits (N, V), of dense rows, become the gradient x scale."""
    n_rows, n_cols = logits.shape
    loss, lse = (logits.new_empty(n_rows, dtype=torch.float32) for _ in range(2))
    w, weight_sum = class_weights(logits, weight, options.label_smoothing, n_cols)
    needy = bool(options.softcap or options.label_smoothing)  # those need registers, too
    widest = 8192 if needy else 32_768
    if n_cols > widest:
        block = Tile(1, min(widest, 16_384), 32)
    else:
        block = tile(n_rows, n_cols, elements=4096, whole_rows=True)
        block = block._replace(warps=max(block.warps, block.cols // 1024))
    one_pass = block.cols >= n_cols
    _in_place.launch(
        -(-n_rows // block.rows),
        logits,
        target,
        w,
        weight_sum,
        logits if scale is None else scale,
        loss,
        lse,
        logits.stride(0),
        target.stride(0),
        n_rows,
        n_cols,
        *options.numbers,
        warps=block.warps,
        resident=int(needy and (block.rows > 1 or not one_pass)),
        HAS_SCALE=scale is not None,
        ONE_PASS=one_pass,
        **constants(weight, options, block),
    )
    return loss, lse


@kernel
def _scale(
    x_ptr,
    scale_ptr,
    x_stride,
    scale_stride,
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Rows whose factor is 1 are neither read nor written: 1 is usual, and nobody waits to see."""
    column_tiles = tl.cdiv(n_cols, BLOCK_COLS)
    rows = (tl.program_id(0) // column_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = (tl.program_id(0) % column_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    scale = tl.load(scale_ptr + rows * scale_stride, mask=rows < n_rows, other=1.0).to(tl.float32)
    mask = ((rows < n_rows) & (scale != 1.0))[:, None] & (cols < n_cols)[None, :]
    ptr = x_ptr + rows[:, None] * x_stride + cols[None, :]
    x = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(ptr, (x * scale[:, None]).to(x_ptr.dtype.element_ty), mask=mask)


@tuned(restores=("x",))
def scale_(x: Tensor, scale: Tensor) -> None:
    """Multiply each row of x (N, V), of dense rows, by its scale (N,), where that is not 1."""
    n_rows, n_cols = x.shape
    block = tile(n_rows, n_cols, elements=4096)
    _scale.launch(
        -(-n_rows // block.rows) * -(-n_cols // block.cols),
        x,
        scale,
        x.stride(0),
        scale.stride(0),
        n_rows,
        n_cols,
        warps=block.warps,
        BLOCK_ROWS=block.rows,
        BLOCK_COLS=block.cols,
    )
