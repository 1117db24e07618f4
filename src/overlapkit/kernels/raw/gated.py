# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernels of the gated activations: elementwise in fp32, each tensor read or written once, any row stride.

All are gate * share(gate) * up, where share is a sigmoid or the normal distribution function. A packed
projection is the same two tensors, whose rows lie beside each other: its gradient is written as it lies.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlapkit.kernels.autotune import tuned
from overlapkit.launch import as_rows, kernel, tile


@triton.jit
def _share(gate, ACTIVATION: tl.constexpr):
    """Return what the gate is multiplied by, and gate times the derivative of that."""
    if ACTIVATION == "gelu":
        share = 0.5 + 0.5 * tl.math.erf(gate * 0.7071067811865476)
        return share, gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    # (1 + tanh(u)) / 2 = sigmoid(2u), which keeps the digits that 1 + tanh(u) loses for negative u
    logit, slope = gate, 1.0
    if ACTIVATION == "gelu_tanh":
        logit = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    share = 1.0 / (1.0 + tl.exp(-logit))
    return share, gate * share * (1.0 - share) * slope


@kernel
def _forward(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_stride,
    up_stride,
    n_rows,
    n_cols,
    ACTIVATION: tl.constexpr,
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
    share, _ = _share(gate, ACTIVATION)
    y = gate * share * up.to(tl.float32)
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
    out_stride,
    n_rows,
    n_cols,
    ACTIVATION: tl.constexpr,
    NEED_DGATE: tl.constexpr,
    NEED_DUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    column_tiles = tl.cdiv(n_cols, BLOCK_COLS)
    rows = (tl.program_id(0) // column_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = (tl.program_id(0) % column_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + rows[:, None] * gate_stride + cols[None, :], mask=mask, other=0.0)
    gate = gate.to(tl.float32)
    share, slope = _share(gate, ACTIVATION)
    out = rows[:, None] * out_stride + cols[None, :]
    if NEED_DGATE:
        up = tl.load(up_ptr + rows[:, None] * up_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(dgate_ptr + out, (dy * up * (share + slope)).to(dgate_ptr.dtype.element_ty), mask=mask)
    if NEED_DUP:
        tl.store(dup_ptr + out, (dy * gate * share).to(dup_ptr.dtype.element_ty), mask=mask)


def forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up, contiguous."""
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _launch_forward(as_rows(gate), as_rows(up), y, activation)
    return y


def forward_packed(x: Tensor, activation: str, gate_first: bool) -> Tensor:
    """The same of the halves of x (..., 2D), read where they lie."""
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    _launch_forward(*_halves(as_rows(x), gate_first), y, activation)
    return y


def backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, need_dgate: bool, need_dup: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, contiguous, from the inputs alone: nothing else was saved.

    What is not needed is empty.
    """
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format) if need_dgate else gate.new_empty(0)
    dup = torch.empty_like(up, memory_format=torch.contiguous_format) if need_dup else up.new_empty(0)
    gate, up = as_rows(gate), as_rows(up)
    _launch_backward(dy, gate, up, dgate, dup, gate.shape[1], activation, need_dgate, need_dup)
    return dgate, dup


def backward_packed(dy: Tensor, x: Tensor, activation: str, gate_first: bool) -> Tensor:
    """Return the gradient of x, contiguous."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    halves = _halves(as_rows(x), gate_first)
    _launch_backward(dy, *halves, *_halves(as_rows(dx), gate_first), x.shape[-1], activation, True, True)
    return dx


def _halves(rows: Tensor, gate_first: bool) -> tuple[Tensor, Tensor]:
    """Gate and up of (N, 2D) rows: views."""
    first, second = rows.chunk(2, dim=-1)
    return (first, second) if gate_first else (second, first)


@tuned()
def _launch_forward(gate: Tensor, up: Tensor, y: Tensor, activation: str) -> None:
    n_rows, n_cols = gate.shape
    block = tile(n_rows, n_cols, elements=2048)
    _forward.launch(
        -(-n_rows // block.rows) * -(-n_cols // block.cols),
        gate,
        up,
        y,
        gate.stride(0),
        up.stride(0),
        n_rows,
        n_cols,
        warps=block.warps,
        ACTIVATION=activation,
        BLOCK_ROWS=block.rows,
        BLOCK_COLS=block.cols,
    )


@tuned()
def _launch_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    dgate: Tensor,
    dup: Tensor,
    out_stride: int,
    activation: str,
    need_dgate: bool,
    need_dup: bool,
) -> None:
    dy = as_rows(dy)
    n_rows, n_cols = gate.shape
    block = tile(n_rows, n_cols, elements=2048)
    _backward.launch(
        -(-n_rows // block.rows) * -(-n_cols // block.cols),
        dy,
        gate,
        up,
        dgate,
        dup,
        dy.stride(0),
        gate.stride(0),
        up.stride(0),
        out_stride,
        n_rows,
        n_cols,
        warps=block.warps,
        ACTIVATION=activation,
        NEED_DGATE=need_dgate,
        NEED_DUP=need_dup,
        BLOCK_ROWS=block.rows,
        BLOCK_COLS=block.cols,
    )
