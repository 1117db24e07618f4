# mypy: allow-untyped-defs, allow-incomplete-defs
"""SwiGLU's kernels: elementwise in fp32, each tensor read or written once, rows of any stride."""

import torch
import triton.language as tl
from torch import Tensor

from overlapkit.kernels.autotune import tuned
from overlapkit.launch import as_rows, kernel, tile


@kernel
def _forward(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_stride,
    up_stride,
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    column_tiles = tl.cdiv(n_cols, BLOCK_COLS)
    rows = (tl.program_id(0) // column_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = (tl.program_id(0) % column_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    gate = tl.load(gate_ptr + rows[:, None] * gate_stride + cols[None, :], mask=mask, other=0.0)
    up = tl.load(up_ptr + rows[:, None] * up_stride + cols[None, :], mask=mask, other=0.0)
    gate = gate.to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    dy_stride,
    gate_stride,
    up_stride,
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    column_tiles = tl.cdiv(n_cols, BLOCK_COLS)
    rows = (tl.program_id(0) // column_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = (tl.program_id(0) % column_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + rows[:, None] * gate_stride + cols[None, :], mask=mask, other=0.0)
    up = tl.load(up_ptr + rows[:, None] * up_stride + cols[None, :], mask=mask, other=0.0)
    gate = gate.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dgate = dy * up.to(tl.float32) * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dup = dy * gate * sigmoid
    out = rows[:, None] * n_cols + cols[None, :]
    tl.store(dgate_ptr + out, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + out, dup.to(dup_ptr.dtype.element_ty), mask=mask)


@tuned()
def forward(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, contiguous."""
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    g, u = as_rows(gate), as_rows(up)
    n_rows, n_cols = g.shape
    block = tile(n_rows, n_cols, elements=2048)
    grid = -(-n_rows // block.rows) * -(-n_cols // block.cols)
    _forward.launch(
        grid,
        g,
        u,
        y,
        g.stride(0),
        u.stride(0),
        n_rows,
        n_cols,
        warps=block.warps,
        BLOCK_ROWS=block.rows,
        BLOCK_COLS=block.cols,
    )
    return y


@tuned()
def backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, contiguous, from the inputs alone: nothing else was saved."""
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    dup = torch.empty_like(up, memory_format=torch.contiguous_format)
    d, g, u = as_rows(dy), as_rows(gate), as_rows(up)
    n_rows, n_cols = g.shape
    block = tile(n_rows, n_cols, elements=2048)
    grid = -(-n_rows // block.rows) * -(-n_cols // block.cols)
    _backward.launch(
        grid,
        d,
        g,
        u,
        dgate,
        dup,
        d.stride(0),
        g.stride(0),
        u.stride(0),
        n_rows,
        n_cols,
        warps=block.warps,
        BLOCK_ROWS=block.rows,
        BLOCK_COLS=block.cols,
    )
    return dgate, dup
