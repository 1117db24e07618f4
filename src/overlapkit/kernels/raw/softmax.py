# mypy: allow-untyped-defs, allow-incomplete-defs
"""Softmax's kernels, with the scale before it and a mask that is read where it lies.

Bytes: rows that fit into a program's registers are read once. Wider ones are read twice, since their
maximum and sum come first: forward 3/2 of the floor, backward (from y) 5/3.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlapkit.kernels.autotune import tuned
from overlapkit.launch import as_rows, kernel, tile

WIDEST_FORWARD = 32_768
WIDEST_BACKWARD = 16_384


@triton.jit
def _starts(mask_ptr, rows, n_middle, n_inner, outer_stride, middle_stride, inner_stride):
    """Where the mask of each row begins: leading dimensions of a broadcast mask have strides of their own."""
    outer, middle, inner = rows // n_inner // n_middle, rows // n_inner % n_middle, rows % n_inner
    return mask_ptr + outer * outer_stride + middle * middle_stride + inner * inner_stride


@triton.jit
def _scores(x_row, mask_row, cols, inside, scale, column_stride, HAS_MASK, BOOL):
    """Scale * x with the mask applied, in fp32; -inf outside of the tensor."""
    z = tl.load(x_row[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32) * scale
    if HAS_MASK:
        at = mask_row[:, None] + cols.to(tl.int64)[None, :] * column_stride
        mask = tl.load(at, mask=inside, other=0)
        if BOOL:
            z = tl.where(mask != 0, z, float("-inf"))
        else:
            z += mask.to(tl.float32)
    return tl.where(inside, z, float("-inf"))


@triton.jit
def _finite(top):
    """What to subtract where the maximum may be -inf: -inf - -inf would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _quotients(z, top, total, HAS_MASK):
    if HAS_MASK:  # a row that is masked out whole: 0 / 1
        total = tl.where(top == float("-inf"), 1.0, total)
    return tl.exp(z - _finite(top)[:, None]) / total[:, None]


@kernel
def _forward(
    x_ptr,
    mask_ptr,
    y_ptr,
    n_rows,
    n_cols,
    x_stride,
    n_middle,
    n_inner,
    outer_stride,
    middle_stride,
    inner_stride,
    column_stride,
    scale,
    HAS_MASK: tl.constexpr,
    BOOL: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Whole rows: in one tile, or tile by tile, first for the maximum and the sum (online)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = (rows < n_rows)[:, None]
    x_row = x_ptr + rows * x_stride
    mask_row = _starts(mask_ptr, rows, n_middle, n_inner, outer_stride, middle_stride, inner_stride)
    y_row = y_ptr + rows * n_cols
    cols = tl.arange(0, BLOCK_COLS)
    if ONE_TILE:
        inside = live & (cols < n_cols)[None, :]
        z = _scores(x_row, mask_row, cols, inside, scale, column_stride, HAS_MASK, BOOL)
        top = tl.max(z, axis=1)
        total = tl.sum(tl.exp(z - _finite(top)[:, None]), axis=1)
        y = _quotients(z, top, total, HAS_MASK)
        tl.store(y_row[:, None] + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
        total = tl.full((BLOCK_ROWS,), 0.0, tl.float32)
        for start in range(0, n_cols, BLOCK_COLS):
            inside = live & (start + cols < n_cols)[None, :]
            z = _scores(x_row, mask_row, start + cols, inside, scale, column_stride, HAS_MASK, BOOL)
            former = top
            top = tl.maximum(top, tl.max(z, axis=1))
            total *= tl.exp(former - _finite(top))
            total += tl.sum(tl.exp(z - _finite(top)[:, None]), axis=1)
        for start in range(0, n_cols, BLOCK_COLS):
            inside = live & (start + cols < n_cols)[None, :]
            z = _scores(x_row, mask_row, start + cols, inside, scale, column_stride, HAS_MASK, BOOL)
            y = _quotients(z, top, total, HAS_MASK)
            tl.store(y_row[:, None] + start + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@kernel
def _backward(
    dy_ptr,
    y_ptr,
    dx_ptr,
    n_rows,
    n_cols,
    dy_stride,
    y_stride,
    scale,
    ONE_TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """The gradient scale * y * (dy - sum(dy * y)), in one tile or tile by tile."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = (rows < n_rows)[:, None]
    dy_row, y_row, dx_row = dy_ptr + rows * dy_stride, y_ptr + rows * y_stride, dx_ptr + rows * n_cols
    cols = tl.arange(0, BLOCK_COLS)
    if ONE_TILE:
        inside = live & (cols < n_cols)[None, :]
        dy = tl.load(dy_row[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_row[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        dx = scale * y * (dy - tl.sum(dy * y, axis=1)[:, None])
        tl.store(dx_row[:, None] + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
    else:
        dot = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, tl.float32)
        for start in range(0, n_cols, BLOCK_COLS):
            inside = live & (start + cols < n_cols)[None, :]
            dy = tl.load(dy_row[:, None] + start + cols[None, :], mask=inside, other=0.0).to(tl.float32)
            dot += dy * tl.load(y_row[:, None] + start + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        total = tl.sum(dot, axis=1)
        for start in range(0, n_cols, BLOCK_COLS):
            inside = live & (start + cols < n_cols)[None, :]
            dy = tl.load(dy_row[:, None] + start + cols[None, :], mask=inside, other=0.0).to(tl.float32)
            y = tl.load(y_row[:, None] + start + cols[None, :], mask=inside, other=0.0).to(tl.float32)
            dx = scale * y * (dy - total[:, None])
            tl.store(dx_row[:, None] + start + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)


class _MaskRows(NamedTuple):
    """How to find the row of a broadcast mask for each row of x, as `_starts` does."""

    n_middle: int = 1
    n_inner: int = 1
    outer_stride: int = 0
    middle_stride: int = 0
    inner_stride: int = 0
    column_stride: int = 0


@tuned()
def forward(x: Tensor, mask: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """Return softmax(scale * x + mask) over the last dimension, contiguous, in `dtype`."""
    rows = as_rows(x)
    n_rows, n_cols = rows.shape
    y = x.new_empty(x.shape, dtype=dtype)
    whole = n_cols <= WIDEST_FORWARD
    block = tile(n_rows, n_cols, elements=4096 if whole else 8192, whole_rows=whole)
    found, where = (rows, _MaskRows()) if mask is None else _mask_rows(mask, x.shape)
    _forward.launch(
        -(-n_rows // block.rows),
        rows,
        found,
        y,
        n_rows,
        n_cols,
        rows.stride(0),
        *where,
        scale,
        warps=block.warps,
        resident=1,
        HAS_MASK=mask is not None,
        BOOL=mask is not None and mask.dtype == torch.bool,
        ONE_TILE=n_cols <= block.cols,
        BLOCK_ROWS=block.rows,
        BLOCK_COLS=block.cols,
    )
    return y


@tuned()
def backward(dy: Tensor, y: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return the gradient of x, contiguous, in `dtype`."""
    dy_rows, y_rows = as_rows(dy), as_rows(y)
    n_rows, n_cols = y_rows.shape
    dx = y.new_empty(y.shape, dtype=dtype)
    whole = n_cols <= WIDEST_BACKWARD
    block = tile(n_rows, n_cols, elements=4096 if whole else 8192, whole_rows=whole)
    _backward.launch(
        -(-n_rows // block.rows),
        dy_rows,
        y_rows,
        dx,
        n_rows,
        n_cols,
        dy_rows.stride(0),
        y_rows.stride(0),
        scale,
        warps=block.warps,
        resident=1,
        ONE_TILE=n_cols <= block.cols,
        BLOCK_ROWS=block.rows,
        BLOCK_COLS=block.cols,
    )
    return dx


def _mask_rows(mask: Tensor, shape: torch.Size) -> tuple[Tensor, _MaskRows]:
    """The mask's memory, and where its rows lie in it.

    Leading dimensions that lie one after the other count as one. A mask that has more than three even so
    is copied to the size of x.
    """
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    mask = mask.expand(shape)
    groups: list[tuple[int, int]] = []
    for size, stride in zip(shape[:-1], mask.stride()[:-1], strict=True):
        if groups and groups[-1][1] == stride * size:
            groups[-1] = (groups[-1][0] * size, stride)
        elif size != 1:
            groups.append((size, stride))
    if len(groups) > 3:
        return _mask_rows(mask.contiguous(), shape)
    (_, outer), (n_middle, middle), (n_inner, inner) = [(1, 0)] * (3 - len(groups)) + groups
    return mask, _MaskRows(n_middle, n_inner, outer, middle, inner, mask.stride(-1))
