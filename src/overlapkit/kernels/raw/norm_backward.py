# mypy: allow-untyped-defs, allow-incomplete-defs
"""The backward kernels of RMSNorm and LayerNorm, which took the mean off (CENTRED).

All sums are fp32, those over rows in a fixed order: each program keeps its share, and torch adds them up.
Rows wider than 8,192 would spill registers in one pass. Theirs reads x and dy twice: 5/3 of the floor.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from overlapkit.kernels.autotune import tuned
from overlapkit.launch import Tile, as_rows, kernel, processors, tile

WIDEST_ONE_PASS = 8192


@kernel
def _backward(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    dy_stride,
    dsum_stride,
    x_stride,
    dx_stride,
    n_rows,
    n_cols,
    n_programs,
    offset,
    CENTRED: tl.constexpr,
    HAS_DSUM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEED_DWEIGHT: tl.constexpr,
    NEED_DBIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Whole rows, every n_programs-th tile; each program keeps its share of the parameters' gradients."""
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_COLS)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0)
    dweight = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, tl.float32)
    dbias = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, tl.float32)
    n_blocks = tl.cdiv(n_rows, BLOCK_ROWS)
    for block in tl.range(program, n_blocks, n_programs, disable_licm=True):  # as in forward
        rows = tl.cast(block, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)
        if CENTRED:
            x -= tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        xhat = x * rstd[:, None]
        if NEED_DWEIGHT:
            dweight += dy * xhat
        if NEED_DBIAS:
            dbias += dy
        if HAS_WEIGHT:
            dy = dy * (weight.to(tl.float32) + offset)[None, :]
        if CENTRED:  # after the other sum Triton 3.6 would spill in fp32
            level = tl.sum(dy, axis=1) / n_cols
        slope = tl.sum(dy * xhat, axis=1) / n_cols
        dx = dy - xhat * slope[:, None]
        if CENTRED:
            dx -= level[:, None]
        dx = dx * rstd[:, None]
        if HAS_DSUM:  # the residual's gradient goes past the norm
            dx += tl.load(dsum_ptr + rows[:, None] * dsum_stride + cols[None, :], mask=mask, other=0.0).to(
                tl.float32
            )
        tl.store(
            dx_ptr + rows[:, None] * dx_stride + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask
        )
    share = program.to(tl.int64) * n_cols + cols
    if NEED_DWEIGHT:
        tl.store(dweight_ptr + share, tl.sum(dweight, axis=0), mask=cols < n_cols)
    if NEED_DBIAS:
        tl.store(dbias_ptr + share, tl.sum(dbias, axis=0), mask=cols < n_cols)


@kernel
def _row_means(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    slope_ptr,
    level_ptr,
    dy_stride,
    x_stride,
    n_rows,
    n_cols,
    offset,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """First pass over wide rows: the means of dy * weight * xhat and dy * weight.

    All rows of a program share the weight that it reads.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = rows < n_rows
    slope = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, tl.float32)
    level = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, tl.float32)
    if CENTRED:
        mean = tl.load(mean_ptr + rows, mask=live, other=0.0)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        mask = live[:, None] & (cols < n_cols)[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32) + offset
            dy = dy * weight[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if CENTRED:
            x -= mean[:, None]
            level += dy
        slope += dy * x
    rstd = tl.load(rstd_ptr + rows, mask=live, other=0.0)
    tl.store(slope_ptr + rows, tl.sum(slope, axis=1) * rstd / n_cols, mask=live)
    if CENTRED:
        tl.store(level_ptr + rows, tl.sum(level, axis=1) / n_cols, mask=live)


@kernel
def _backward_columns(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    slope_ptr,
    level_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    dy_stride,
    dsum_stride,
    x_stride,
    dx_stride,
    n_rows,
    n_cols,
    n_groups,
    offset,
    CENTRED: tl.constexpr,
    HAS_DSUM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEED_DWEIGHT: tl.constexpr,
    NEED_DBIAS: tl.constexpr,
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
    dbias = tl.full((BLOCK_COLS,), 0.0, tl.float32)
    for index in range(group, n_rows, n_groups):
        row = tl.cast(index, tl.int64)
        rstd = tl.load(rstd_ptr + row)
        x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
        if CENTRED:
            x -= tl.load(mean_ptr + row)
        xhat = x * rstd
        if NEED_DWEIGHT:
            dweight += dy * xhat
        if NEED_DBIAS:
            dbias += dy
        if HAS_WEIGHT:
            dy = dy * weight
        dx = dy - xhat * tl.load(slope_ptr + row)
        if CENTRED:
            dx -= tl.load(level_ptr + row)
        dx *= rstd
        if HAS_DSUM:
            dx += tl.load(dsum_ptr + row * dsum_stride + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * dx_stride + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    share = group.to(tl.int64) * n_cols + cols
    if NEED_DWEIGHT:
        tl.store(dweight_ptr + share, dweight, mask=mask)
    if NEED_DBIAS:
        tl.store(dbias_ptr + share, dbias, mask=mask)


@tuned()
def backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    offset: float,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx (as x, which is the sum where there was a residual), dweight and dbias (fp32, or empty).

    Forward took `mean` off; None for RMSNorm.
    """
    rows, dy_rows = as_rows(x), as_rows(dy)
    dsum_rows = dy_rows if dsum is None else as_rows(dsum)
    n_rows, n_cols = rows.shape
    wide = n_cols > WIDEST_ONE_PASS
    # One program a processor waits for each of its tiles, so these are as large as registers allow.
    elements = 16_384 // x.element_size()
    block = Tile(1, 1024, 4) if wide else tile(n_rows, n_cols, elements=elements, whole_rows=True)
    n_shares = _shares(n_rows, n_cols, block, processors(x.device))
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dweight = x.new_empty((n_shares, n_cols if need_dweight else 0), dtype=torch.float32)
    dbias = x.new_empty((n_shares, n_cols if need_dbias else 0), dtype=torch.float32)
    w = rows if weight is None else weight.contiguous()
    inputs = (dy_rows, dsum_rows, rows, w, rstd if mean is None else mean, rstd)
    outputs = (dx, dweight, dbias)
    # dx has a stride of its own, as forward's y.
    strides = (dy_rows.stride(0), dsum_rows.stride(0), rows.stride(0), n_cols)
    numbers = (*strides, n_rows, n_cols, n_shares, offset)
    given: dict[str, Any] = {"CENTRED": mean is not None, "HAS_WEIGHT": weight is not None}
    flags: dict[str, Any] = given | {
        "HAS_DSUM": dsum is not None,
        "NEED_DWEIGHT": need_dweight,
        "NEED_DBIAS": need_dbias,
    }
    if wide:
        means = _means(dy_rows, rows, inputs[3:], offset, given)
        grid = n_shares * -(-n_cols // block.cols)
        _backward_columns.launch(
            grid,
            *inputs,
            *means,
            *outputs,
            *numbers,
            warps=block.warps,
            resident=1,
            **flags,
            BLOCK_COLS=block.cols,
        )
    else:
        flags |= {"BLOCK_ROWS": block.rows, "BLOCK_COLS": block.cols}
        _backward.launch(n_shares, *inputs, *outputs, *numbers, warps=block.warps, resident=1, **flags)
    return dx, dweight.sum(0), dbias.sum(0)


def _means(
    dy: Tensor, x: Tensor, others: tuple[Tensor, ...], offset: float, given: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The first pass over wide rows (N, D): twice fp32 (N,), the second unset where nothing was centred."""
    slope, level = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    numbers = (dy.stride(0), x.stride(0), *x.shape, offset)
    # Of these a processor has room for three. Left to itself ptxas may spill, to make room for a fourth.
    three = x.element_size() == 4 and given["HAS_WEIGHT"] and not given["CENTRED"]
    _row_means.launch(
        -(-x.shape[0] // 16),
        dy,
        x,
        *others,
        slope,
        level,
        *numbers,
        warps=8,
        resident=3 if three else 0,
        **given,
        BLOCK_ROWS=16,
        BLOCK_COLS=256,
    )
    return slope, level


def _shares(n_rows: int, n_cols: int, block: Tile, n_processors: int) -> int:
    """Into how many shares the rows are dealt: enough to fill the device, no more partial sums than that.

    One processor in sixteen is left to the collectives beside backward: a program that had to wait for
    its processor would double the time. All shares have as many rows, but for the last of them.
    """
    if n_cols > WIDEST_ONE_PASS:
        return min(n_rows, -(-3 * n_processors // -(-n_cols // block.cols)))
    n_blocks = -(-n_rows // block.rows)
    each = -(-n_blocks // (n_processors - n_processors // 16))
    return -(-n_blocks // max(each, 1))
