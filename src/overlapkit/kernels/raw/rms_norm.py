# mypy: allow-untyped-defs, allow-incomplete-defs
"""RMSNorm's kernels. Statistics and sums are fp32; the weight's gradient is summed in a fixed order.

Bytes: forward, and backward up to 8,192 columns, read each row once. Wider rows would spill registers
in one pass, so their backward reads x and dy twice: 5/3 of the floor.
"""

import torch
import triton.language as tl
from torch import Tensor

from overlapkit.kernels.autotune import tuned
from overlapkit.launch import Tile, as_rows, kernel, processors, tile

WIDEST_ONE_PASS = 8192


@kernel
def _forward(
    x_ptr,
    residual_ptr,
    weight_ptr,
    sum_ptr,
    y_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    n_rows,
    n_cols,
    n_tiles,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program takes `n_tiles` tiles of whole rows, so that the weight is read once for all of them."""
    cols = tl.arange(0, BLOCK_COLS)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32) + offset
    first = tl.program_id(0).to(tl.int64) * n_tiles * BLOCK_ROWS
    for step in range(n_tiles):
        rows = first + step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(
                residual_ptr + rows[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0
            ).to(tl.float32)
            total = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + rows[:, None] * n_cols + cols[None, :], total, mask=mask)
            x = total.to(tl.float32)  # normalise what backward will read
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + eps)
        y = x * rstd[:, None]
        if HAS_WEIGHT:
            y = y * weight[None, :]
        tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)


@tuned()
def forward(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (as x), the sum (as x, promoted; empty without a residual) and 1/rms (N rows, fp32)."""
    rows = as_rows(x)
    n_rows, n_cols = rows.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = x.new_empty(n_rows, dtype=torch.float32)
    if residual is None:
        other, total = rows, x.new_empty(0)
    else:
        other = as_rows(residual)
        total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    block = tile(n_rows, n_cols, elements=4096, whole_rows=True)
    n_blocks = -(-n_rows // block.rows)
    # Two programs a processor keep it busy; more would only read the weight more often.
    n_tiles = max(1, min(16, n_blocks // (2 * processors(x.device))))
    _forward.launch(
        -(-n_blocks // n_tiles),
        rows,
        other,
        rows if weight is None else weight.contiguous(),
        total,
        y,
        rstd,
        rows.stride(0),
        other.stride(0),
        n_rows,
        n_cols,
        n_tiles,
        eps,
        offset,
        warps=block.warps,
        resident=True,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        BLOCK_ROWS=block.rows,
        BLOCK_COLS=block.cols,
    )
    return y, total, rstd


@kernel
def _backward(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    dy_stride,
    dsum_stride,
    x_stride,
    n_rows,
    n_cols,
    n_programs,
    offset,
    HAS_DSUM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEED_DW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Whole rows, every n_programs-th tile; each program keeps its share of the weight's gradient."""
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_COLS)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32) + offset
    dweight = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, tl.float32)
    for block in range(program, tl.cdiv(n_rows, BLOCK_ROWS), n_programs):
        rows = tl.cast(block, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)
        xhat = x * rstd[:, None]
        if NEED_DW:
            dweight += dy * xhat
        if HAS_WEIGHT:
            dy = dy * weight[None, :]
        mean = tl.sum(dy * xhat, axis=1) / n_cols
        dx = (dy - xhat * mean[:, None]) * rstd[:, None]
        if HAS_DSUM:  # the residual's gradient goes past the norm
            dx += tl.load(dsum_ptr + rows[:, None] * dsum_stride + cols[None, :], mask=mask, other=0.0).to(
                tl.float32
            )
        tl.store(dx_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        share = partial_ptr + program.to(tl.int64) * n_cols + cols
        tl.store(share, tl.sum(dweight, axis=0), mask=cols < n_cols)


@kernel
def _row_means(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    mean_ptr,
    dy_stride,
    x_stride,
    n_rows,
    n_cols,
    offset,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """First pass over wide rows: mean(dy * weight * xhat). Sixteen rows a program share the weight."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = rows < n_rows
    total = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        mask = live[:, None] & (cols < n_cols)[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32) + offset
            dy = dy * weight[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
        total += dy * x.to(tl.float32)
    rstd = tl.load(rstd_ptr + rows, mask=live, other=0.0)
    tl.store(mean_ptr + rows, tl.sum(total, axis=1) * rstd / n_cols, mask=live)


@kernel
def _backward_columns(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    mean_ptr,
    dx_ptr,
    partial_ptr,
    dy_stride,
    dsum_stride,
    x_stride,
    n_rows,
    n_cols,
    n_groups,
    offset,
    HAS_DSUM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEED_DW: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Second pass: a program takes a tile of columns and every n_groups-th row of it."""
    column_tiles = tl.cdiv(n_cols, BLOCK_COLS)
    group = tl.program_id(0) // column_tiles
    cols = (tl.program_id(0) % column_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = cols < n_cols
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32) + offset
    dweight = tl.full((BLOCK_COLS,), 0.0, tl.float32)
    for index in range(group, n_rows, n_groups):
        row = tl.cast(index, tl.int64)
        rstd = tl.load(rstd_ptr + row)
        xhat = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32) * rstd
        dy = tl.load(dy_ptr + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
        if NEED_DW:
            dweight += dy * xhat
        if HAS_WEIGHT:
            dy = dy * weight
        dx = (dy - xhat * tl.load(mean_ptr + row)) * rstd
        if HAS_DSUM:
            dx += tl.load(dsum_ptr + row * dsum_stride + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * n_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        tl.store(partial_ptr + group.to(tl.int64) * n_cols + cols, dweight, mask=mask)


@tuned()
def backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    need_dw: bool,
) -> tuple[Tensor, Tensor]:
    """Return dx (as x, which is the sum where there was a residual) and dw (as weight, or empty)."""
    rows, dy_rows = as_rows(x), as_rows(dy)
    dsum_rows = dy_rows if dsum is None else as_rows(dsum)
    w = rows if weight is None else weight.contiguous()
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    n_rows, n_cols = rows.shape
    wide = n_cols > WIDEST_ONE_PASS
    block = Tile(1, 1024, 4) if wide else tile(n_rows, n_cols, elements=2048, whole_rows=True)
    n_shares = _shares(n_rows, n_cols, block, processors(x.device))
    partial = x.new_empty((n_shares if need_dw else 0, n_cols), dtype=torch.float32)
    inputs = (dy_rows, dsum_rows, rows, w, rstd)
    strides = (dy_rows.stride(0), dsum_rows.stride(0), rows.stride(0))
    flags = {"HAS_DSUM": dsum is not None, "HAS_WEIGHT": weight is not None, "NEED_DW": need_dw}
    numbers = (*strides, n_rows, n_cols, n_shares, offset)
    if wide:
        mean = _means(dy_rows, rows, weight, rstd, offset)
        grid = n_shares * -(-n_cols // block.cols)
        _backward_columns.launch(
            grid, *inputs, mean, dx, partial, *numbers, warps=block.warps, **flags, BLOCK_COLS=block.cols
        )
    else:
        blocks = {"BLOCK_ROWS": block.rows, "BLOCK_COLS": block.cols}
        _backward.launch(
            n_shares, *inputs, dx, partial, *numbers, warps=block.warps, resident=True, **flags, **blocks
        )
    if weight is None or not need_dw:
        return dx, x.new_empty(0)
    return dx, partial.sum(0).to(weight.dtype)


def _means(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float) -> Tensor:
    """The first pass over wide rows (N, D): fp32 (N,)."""
    mean = torch.empty_like(rstd)
    _row_means.launch(
        -(-x.shape[0] // 16),
        dy,
        x,
        x if weight is None else weight.contiguous(),
        rstd,
        mean,
        dy.stride(0),
        x.stride(0),
        x.shape[0],
        x.shape[1],
        offset,
        warps=8,
        HAS_WEIGHT=weight is not None,
        BLOCK_ROWS=16,
        BLOCK_COLS=256,
    )
    return mean


def _shares(n_rows: int, n_cols: int, block: Tile, n_processors: int) -> int:
    """Into how many shares the rows are dealt: enough to fill the device, no more partial sums than that."""
    if n_cols > WIDEST_ONE_PASS:
        return min(n_rows, -(-4 * n_processors // -(-n_cols // block.cols)))
    return min(-(-n_rows // block.rows), n_processors)
