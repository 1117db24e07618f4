# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What cross entropy's kernels share: device functions of a row, or of a tile of it, all in fp32.

A kernel may hold a shard of the classes only: n_cols of n_classes, beginning with class `first`. `target`
and `weight` are of all classes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlapkit.kernels.cross_entropy_options import Options
from overlapkit.launch import Tile


@triton.jit
def tanh(u):
    """From exp, which loses the digits of small arguments; for those the polynomial of Cephes' tanhf."""
    u2 = u * u
    tail = 2.06390887954e-2 - 5.70498872745e-3 * u2
    tail = -3.33332819422e-1 + u2 * (1.33314422036e-1 + u2 * (-5.37397155531e-2 + u2 * tail))
    large = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * tl.abs(u)))
    return tl.where(tl.abs(u) < 0.625, u + u * u2 * tail, tl.where(u < 0.0, -large, large))


@triton.jit
def at_target(logits_ptr, rows, stride, target, known, first, n_cols, softcap, HAS_SOFTCAP: tl.constexpr):
    """The target's logit, 0 where another shard holds it.

    A target out of range reads NaN, so that its loss says so: raising here would take a host sync.
    """
    here = known & (target >= first) & (target < first + n_cols)
    x = tl.load(logits_ptr + rows * stride + (target - first), mask=here, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        x = softcap * tanh(x / softcap)
    return tl.where(known, x, float("nan"))


@triton.jit
def add_tile(
    top,
    total,
    dot,
    x,
    cols,
    mask,
    weight_ptr,
    first,
    n_cols,
    softcap,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One step of the online softmax: the largest logit, the sum of exp(x - top), the dot with weights.

    x is -inf outside of the mask already.
    """
    if HAS_SOFTCAP:
        x = tl.where(mask, softcap * tanh(x / softcap), float("-inf"))
    new_top = tl.maximum(top, tl.max(x, axis=1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a masked-out stretch: -inf - -inf is NaN
    total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift[:, None]), axis=1)
    if HAS_SMOOTHING:
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + first + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            dot += tl.sum(tl.where(mask, x * weight[None, :], 0.0), axis=1)
        else:
            dot += tl.sum(tl.where(mask, x, 0.0), axis=1)
    return new_top, total, dot


@triton.jit
def row_sums(
    logits_ptr,
    weight_ptr,
    rows,
    live,
    stride,
    first,
    n_cols,
    softcap,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """top, total and dot of whole rows, tile by tile."""
    top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.full((BLOCK_ROWS,), 0.0, tl.float32)
    dot = tl.full((BLOCK_ROWS,), 0.0, tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        mask = live[:, None] & (cols < n_cols)[None, :]
        x = tl.load(logits_ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=float("-inf"))
        top, total, dot = add_tile(
            top,
            total,
            dot,
            x.to(tl.float32),
            cols,
            mask,
            weight_ptr,
            first,
            n_cols,
            softcap,
            HAS_WEIGHT,
            HAS_SMOOTHING,
            HAS_SOFTCAP,
        )
    return top, total, dot


@triton.jit
def log_sum(top, total):
    """The lse, and what it lost: that of large logits is rounded more coarsely than a probability may be."""
    top = tl.where(top == float("-inf"), 0.0, top)
    log_total = tl.log(total)
    lse = top + log_total
    low = tl.where(total == 0.0, 0.0, (top - (lse - (lse - top))) + (log_total - (lse - top)))
    return lse, low


@triton.jit
def row_loss(
    lse,
    low,
    at_target,
    dot,
    target,
    known,
    weight_ptr,
    weight_sum_ptr,
    n_classes,
    smoothing,
    z_loss,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
):
    """The loss of rows that are not ignored."""
    loss = (lse - at_target) + low
    if HAS_WEIGHT:
        loss *= tl.load(weight_ptr + target, mask=known, other=0.0).to(tl.float32)
    if HAS_SMOOTHING:
        weight_sum = tl.load(weight_sum_ptr)
        loss = (1.0 - smoothing) * loss + smoothing / n_classes * (weight_sum * lse - dot)
    return loss + z_loss * lse * lse


@triton.jit
def coefficients(
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
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
):
    """A row's gradient is on_softmax * softmax - on_target * onehot - on_weight * weight."""
    on_target = tl.where(kept & (known == 0), float("nan"), dloss * (1.0 - smoothing))
    if HAS_WEIGHT:
        on_target *= tl.load(weight_ptr + target, mask=known, other=0.0).to(tl.float32)
    on_softmax = on_target + tl.where(kept, 2.0 * z_loss * dloss * lse, 0.0)
    on_weight = dloss * smoothing / n_classes
    if HAS_SMOOTHING:
        on_softmax += on_weight * tl.load(weight_sum_ptr)
    return on_softmax, on_target, on_weight


@triton.jit
def gradient(
    x,
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
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """The gradient of a tile of logits. The target's entry is one difference in fp32, rounded once."""
    if HAS_SOFTCAP:
        slope = tanh(x / softcap)
        x = softcap * slope
    dx = on_softmax[:, None] * tl.exp((x - lse[:, None]) - low[:, None])
    dx -= tl.where((cols + first)[None, :] == target[:, None], on_target[:, None], 0.0)
    if HAS_SMOOTHING:
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + first + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            dx -= on_weight[:, None] * weight[None, :]
        else:
            dx -= on_weight[:, None]
    if HAS_SOFTCAP:
        dx *= 1.0 - slope * slope
    return dx


def class_weights(
    x: Tensor, weight: Tensor | None, label_smoothing: float, n_classes: int
) -> tuple[Tensor, Tensor]:
    """The weights and their sum (one fp32 on the device, so that nobody waits for it)."""
    if label_smoothing == 0.0:
        return x if weight is None else weight.contiguous(), x
    if weight is None:
        return x, x.new_full((), float(n_classes), dtype=torch.float32)
    return weight.contiguous(), weight.sum(dtype=torch.float32)


def constants(weight: Tensor | None, options: Options, block: Tile) -> dict[str, Any]:
    """What all of these kernels are specialised on."""
    return {
        "HAS_WEIGHT": weight is not None,
        "HAS_SMOOTHING": options.label_smoothing > 0.0,
        "HAS_SOFTCAP": options.softcap > 0.0,
        "BLOCK_ROWS": block.rows,
        "BLOCK_COLS": block.cols,
    }
