# mypy: allow-untyped-defs, allow-incomplete-defs
"""The kernel of dropout_add: each tensor read or written once; the mask is drawn again in backward.

Philox 4x32-10 (Salmon et al., 2011) turns a key, the seed, and a counter into four numbers of 32 bits.
Four neighbours in a row share a counter: one each would take longer to draw than to load.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlapkit.kernels.autotune import tuned
from overlapkit.launch import as_rows, kernel, tile


@triton.jit
def _kept(seed, rows, cols_over_4, n_cols, limit):
    """Whether an element stays: whether the upper 31 bits of its number are below `limit`."""
    counters = rows[:, None] * tl.cdiv(n_cols, 4) + cols_over_4[None, :]
    a, b, c, d = tl.randint4x(seed, counters)
    numbers = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return (numbers >> 1).to(tl.int32) < limit


@kernel
def _dropout(
    x_ptr,
    residual_ptr,
    seed_ptr,
    y_ptr,
    x_stride,
    residual_stride,
    n_rows,
    n_cols,
    limit,
    factor,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    column_tiles = tl.cdiv(n_cols, BLOCK_COLS)
    rows = (tl.program_id(0) // column_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column_tile = tl.program_id(0) % column_tiles
    cols = column_tile * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    cols_over_4 = column_tile * (BLOCK_COLS // 4) + tl.arange(0, BLOCK_COLS // 4)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    kept = _kept(tl.load(seed_ptr), rows, cols_over_4, n_cols, limit)
    y = tl.where(kept, x * factor, 0.0)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + rows[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@tuned()
def dropout(
    x: Tensor, residual: Tensor | None, seed: Tensor, limit: int, factor: float, dtype: torch.dtype
) -> Tensor:
    """Return x * factor where the number is below `limit`, else 0, plus the residual; contiguous.

    Without a residual it is the gradient of x, from that of the result.
    """
    rows = as_rows(x)
    n_rows, n_cols = rows.shape
    other = rows if residual is None else as_rows(residual)
    y = x.new_empty(x.shape, dtype=dtype)
    block = tile(n_rows, max(n_cols, 4), elements=2048)
    _dropout.launch(
        -(-n_rows // block.rows) * -(-n_cols // block.cols),
        rows,
        other,
        seed,
        y,
        rows.stride(0),
        other.stride(0),
        n_rows,
        n_cols,
        limit,
        factor,
        warps=block.warps,
        HAS_RESIDUAL=residual is not None,
        BLOCK_ROWS=block.rows,
        BLOCK_COLS=block.cols,
    )
    return y
