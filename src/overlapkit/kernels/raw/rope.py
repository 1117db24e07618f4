# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Rotary embedding's kernel: a program takes all heads of some tokens, and reads their angles once.

The gradient is the same rotation backwards, so forward and backward are one kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlapkit.kernels.autotune import tuned
from overlapkit.launch import kernel, next_power_of_2, tile


@triton.jit
def _turn(
    x_ptr,
    y_ptr,
    x_tokens,
    y_tokens,
    live,
    cos,
    sin,
    head_stride,
    n_heads,
    n_cols,
    half,
    INTERLEAVED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rotate the heads of the tokens at x_tokens (offsets) into the contiguous y, and copy the rest."""
    pairs = tl.arange(0, BLOCK_HALF)
    for start in range(0, n_heads, BLOCK_HEADS):
        heads = start + tl.arange(0, BLOCK_HEADS).to(tl.int64)
        inside = (live[:, None] & (heads < n_heads)[None, :])[:, :, None]
        x_rows = x_ptr + (x_tokens[:, None] + heads[None, :] * head_stride)[:, :, None]
        y_rows = y_ptr + ((y_tokens[:, None] * n_heads + heads[None, :]) * n_cols)[:, :, None]
        if INTERLEAVED:
            cols = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
            mask = inside & (cols < 2 * half)
            x = tl.load(x_rows + cols, mask=mask, other=0.0).to(tl.float32)
            first, second = tl.split(tl.reshape(x, (BLOCK_TOKENS, BLOCK_HEADS, BLOCK_HALF, 2)))
            y = tl.join(first * cos - second * sin, second * cos + first * sin)
            y = tl.reshape(y, (BLOCK_TOKENS, BLOCK_HEADS, 2 * BLOCK_HALF))
            tl.store(y_rows + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
        else:
            cols = pairs[None, None, :]
            mask = inside & (cols < half)
            first = tl.load(x_rows + cols, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(x_rows + half + cols, mask=mask, other=0.0).to(tl.float32)
            y = first * cos - second * sin
            tl.store(y_rows + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
            y = second * cos + first * sin
            tl.store(y_rows + half + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
        if BLOCK_REST > 0:
            cols = 2 * half + tl.arange(0, BLOCK_REST)[None, None, :]
            mask = inside & (cols < n_cols)
            tl.store(y_rows + cols, tl.load(x_rows + cols, mask=mask), mask=mask)


@kernel
def _rotate(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    q_out_ptr,
    k_out_ptr,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    cos_batch_stride,
    cos_row_stride,
    cos_pair_stride,
    positions_batch_stride,
    positions_token_stride,
    n_tokens,
    length,
    n_positions,
    q_heads,
    k_heads,
    n_cols,
    half,
    HAS_POSITIONS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_K_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    live = tokens < n_tokens
    batch, time = tokens // length, tokens % length
    row = time
    if HAS_POSITIONS:
        place = positions_ptr + batch * positions_batch_stride + time * positions_token_stride
        row = tl.load(place, mask=live, other=0).to(tl.int64)
    # A position outside of the table reads NaN, so that the result says so: raising would take a host sync.
    known = live & (row >= 0) & (row < n_positions)
    pairs = tl.arange(0, BLOCK_HALF).to(tl.int64)
    angle = (batch * cos_batch_stride + row * cos_row_stride)[:, None] + (pairs * cos_pair_stride)[None, :]
    mask = known[:, None] & (pairs < half)[None, :]
    cos = tl.load(cos_ptr + angle, mask=mask, other=float("nan")).to(tl.float32)[:, None, :]
    sin = tl.load(sin_ptr + angle, mask=mask, other=float("nan")).to(tl.float32)[:, None, :]
    if INVERSE:
        sin = -sin
    _turn(
        q_ptr,
        q_out_ptr,
        batch * q_batch_stride + time * q_token_stride,
        tokens,
        live,
        cos,
        sin,
        q_head_stride,
        q_heads,
        n_cols,
        half,
        INTERLEAVED,
        BLOCK_TOKENS,
        BLOCK_Q_HEADS,
        BLOCK_HALF,
        BLOCK_REST,
    )
    _turn(
        k_ptr,
        k_out_ptr,
        batch * k_batch_stride + time * k_token_stride,
        tokens,
        live,
        cos,
        sin,
        k_head_stride,
        k_heads,
        n_cols,
        half,
        INTERLEAVED,
        BLOCK_TOKENS,
        BLOCK_K_HEADS,
        BLOCK_HALF,
        BLOCK_REST,
    )


@tuned()
def rotate(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    """Return q (B, T, H, D) and k (B, T, K, D) rotated, contiguous.

    cos and sin are (B or 1, P, R/2), positions (B, T); without them token t has the angles of row t.
    """
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    batch, length, q_heads, n_cols = q.shape
    n_positions, half = cos.shape[-2:]
    most, rest = max(q_heads, k.shape[2]), n_cols - 2 * half
    block = tile(batch * length * most, n_cols, elements=2048, whole_rows=True)  # a row is a token's head
    tokens = max(1, block.rows // next_power_of_2(most))
    _rotate.launch(
        -(-batch * length // tokens),
        q,
        k,
        cos,
        sin,
        cos if positions is None else positions,
        q_out,
        k_out,
        *q.stride()[:3],
        *k.stride()[:3],
        0 if cos.shape[0] == 1 else cos.stride(0),
        *cos.stride()[1:],
        *((0, 0) if positions is None else positions.stride()),
        batch * length,
        length,
        n_positions,
        q_heads,
        k.shape[2],
        n_cols,
        half,
        warps=block.warps,
        HAS_POSITIONS=positions is not None,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        BLOCK_TOKENS=tokens,
        BLOCK_Q_HEADS=min(next_power_of_2(q_heads), block.rows // tokens),
        BLOCK_K_HEADS=min(next_power_of_2(k.shape[2]), block.rows // tokens),
        BLOCK_HALF=next_power_of_2(half),
        BLOCK_REST=next_power_of_2(rest) if rest else 0,
    )
    return q_out, k_out
