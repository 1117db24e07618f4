# mypy: allow-untyped-defs, allow-incomplete-defs
"""The forward kernel of RMSNorm and LayerNorm, which takes the mean off first (CENTRED).

Statistics are fp32, from a row that stays in registers. Each row is read once.
"""

import torch
import triton.language as tl
from torch import Tensor

from overlapkit.kernels.autotune import tuned
from overlapkit.launch import as_rows, kernel, processors, tile

WIDEST_SUM = 8192
"""Two rows to add and a weight in fp32 take all registers: torch adds up wider ones, at 5/4 of the floor."""


@kernel
def _forward(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    sum_stride,
    y_stride,
    n_rows,
    n_cols,
    n_tiles,
    eps,
    offset,
    CENTRED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program takes `n_tiles` tiles of whole rows, so that the weight is read once for all of them."""
    cols = tl.arange(0, BLOCK_COLS)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0)
    first = tl.program_id(0).to(tl.int64) * n_tiles * BLOCK_ROWS
    for step in tl.range(n_tiles, disable_licm=True):  # the weight stays in its own dtype: half the registers
        rows = first + step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(
                residual_ptr + rows[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0
            ).to(tl.float32)
            total = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + rows[:, None] * sum_stride + cols[None, :], total, mask=mask)
            x = total.to(tl.float32)  # normalise what backward will read
        if CENTRED:
            mean = tl.sum(x, axis=1) / n_cols
            tl.store(mean_ptr + rows, mean, mask=rows < n_rows)
            x = tl.where(mask, x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + eps)
        tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)
        y = x * rstd[:, None]
        if HAS_WEIGHT:
            y = y * (weight.to(tl.float32) + offset)[None, :]
        if HAS_BIAS:
            y = y + bias.to(tl.float32)[None, :]
        tl.store(y_ptr + rows[:, None] * y_stride + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@tuned()
def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    dtype: torch.dtype,
    *,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y (in `dtype`), the sum (as x, promoted; empty without a residual), and two of N fp32 numbers.

    They are the means (empty where nothing is centred) and 1/rms of what is left.
    """
    wide = weight is not None and weight.dtype == torch.float32 and x.shape[-1] > WIDEST_SUM
    if residual is not None and wide:
        total = (x + residual).contiguous()
        y, _, mean, rstd = forward(total, weight, bias, None, eps, offset, dtype, centred=centred)
        return y, total, mean, rstd
    rows = as_rows(x)
    n_rows, n_cols = rows.shape
    y = x.new_empty(x.shape, dtype=dtype)
    mean = x.new_empty(n_rows if centred else 0, dtype=torch.float32)
    rstd = x.new_empty(n_rows, dtype=torch.float32)
    if residual is None:
        other, total = rows, x.new_empty(0)
    else:
        other = as_rows(residual)
        total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    block = tile(n_rows, n_cols, elements=4096, whole_rows=True)
    n_blocks = -(-n_rows // block.rows)
    n_tiles = _tiles(n_blocks, 1 if bias is None else 2, processors(x.device))
    # Both are n_cols. Were they one argument, each thread would keep pointers to its own parts of both rows,
    # and spill; of two, compilers make a pointer to each row, which all threads share.
    sum_stride = y_stride = n_cols
    _forward.launch(
        -(-n_blocks // n_tiles),
        rows,
        other,
        rows if weight is None else weight.contiguous(),
        rows if bias is None else bias.contiguous(),
        total,
        y,
        mean,
        rstd,
        rows.stride(0),
        other.stride(0),
        sum_stride,
        y_stride,
        n_rows,
        n_cols,
        n_tiles,
        eps,
        offset,
        warps=block.warps,
        resident=1,
        CENTRED=centred,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=block.rows,
        BLOCK_COLS=block.cols,
    )
    return y, total, mean, rstd


def _tiles(n_blocks: int, parameters: int, n_processors: int) -> int:
    """Tiles a program: two programs a processor keep it busy, more would only read the weight more often.

    With a bias there is twice as much to read, and one program a processor. A program ends after 16 tiles
    (32), so that the last ones of a long tensor end together.
    """
    wanted = -(-n_blocks * parameters // (2 * n_processors))
    return max(1, min(16 * parameters, wanted))
