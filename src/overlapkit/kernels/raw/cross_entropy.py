# mypy: allow-untyped-defs, allow-incomplete-defs
"""Cross entropy's kernels: an online softmax forward, and a backward that needs only the saved lse.

Bytes: forward reads the logits once, backward reads them again and writes their gradient. That is 1.5
of the floor (one read, one write), which only a gradient written in place could reach.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlapkit.kernels.autotune import tuned
from overlapkit.launch import as_rows, kernel, tile


@triton.jit
def _tanh(u):
    """From exp, which loses the digits of small arguments; for those the polynomial of Cephes' tanhf."""
    u2 = u * u
    tail = 2.06390887954e-2 - 5.70498872745e-3 * u2
    tail = -3.33332819422e-1 + u2 * (1.33314422036e-1 + u2 * (-5.37397155531e-2 + u2 * tail))
    large = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * tl.abs(u)))
    return tl.where(tl.abs(u) < 0.625, u + u * u2 * tail, tl.where(u < 0.0, -large, large))


@kernel
def _forward(
    logits_ptr,
    target_ptr,
    weight_ptr,
    weight_sum_ptr,
    loss_ptr,
    lse_ptr,
    low_ptr,
    logits_stride,
    target_stride,
    n_rows,
    n_cols,
    ignore_index,
    smoothing,
    z_loss,
    softcap,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = rows < n_rows
    target = tl.load(target_ptr + rows * target_stride, mask=live, other=0)
    ignored = target == ignore_index
    known = live & (target >= 0) & (target < n_cols) & (target != ignore_index)
    top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.full((BLOCK_ROWS,), 0.0, tl.float32)
    dot = tl.full((BLOCK_ROWS,), 0.0, tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        mask = live[:, None] & (cols < n_cols)[None, :]
        x = tl.load(
            logits_ptr + rows[:, None] * logits_stride + cols[None, :], mask=mask, other=float("-inf")
        )
        x = x.to(tl.float32)
        if HAS_SOFTCAP:
            x = tl.where(mask, softcap * _tanh(x / softcap), float("-inf"))
        new_top = tl.maximum(top, tl.max(x, axis=1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a masked-out stretch: -inf - -inf is NaN
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift[:, None]), axis=1)
        top = new_top
        if HAS_SMOOTHING:
            if HAS_WEIGHT:
                weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
                dot += tl.sum(tl.where(mask, x * weight[None, :], 0.0), axis=1)
            else:
                dot += tl.sum(tl.where(mask, x, 0.0), axis=1)
    # The lse of large logits is rounded more coarsely than a probability may be: keep what it lost, too.
    log_total = tl.log(total)
    lse = top + log_total
    low = (top - (lse - (lse - top))) + (log_total - (lse - top))
    # A target out of range reads NaN, so that its loss says so: raising here would take a host sync.
    at_target = tl.load(logits_ptr + rows * logits_stride + target, mask=known, other=float("nan"))
    at_target = at_target.to(tl.float32)
    if HAS_SOFTCAP:
        at_target = softcap * _tanh(at_target / softcap)
    loss = (lse - at_target) + low
    if HAS_WEIGHT:
        loss *= tl.load(weight_ptr + target, mask=known, other=0.0).to(tl.float32)
    if HAS_SMOOTHING:
        weight_sum = tl.load(weight_sum_ptr)
        loss = (1.0 - smoothing) * loss + smoothing / n_cols * (weight_sum * lse - dot)
    loss += z_loss * lse * lse
    tl.store(loss_ptr + rows, tl.where(ignored, 0.0, loss), mask=live)
    tl.store(lse_ptr + rows, lse, mask=live)
    tl.store(low_ptr + rows, low, mask=live)


@kernel
def _backward(
    dloss_ptr,
    dlse_ptr,
    logits_ptr,
    target_ptr,
    weight_ptr,
    weight_sum_ptr,
    lse_ptr,
    low_ptr,
    dlogits_ptr,
    dloss_stride,
    dlse_stride,
    logits_stride,
    target_stride,
    n_rows,
    n_cols,
    ignore_index,
    smoothing,
    z_loss,
    softcap,
    HAS_DLSE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One tile of on_softmax * softmax - on_target * onehot - on_weight * weight."""
    column_tiles = tl.cdiv(n_cols, BLOCK_COLS)
    rows = (tl.program_id(0) // column_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = (tl.program_id(0) % column_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    live = rows < n_rows
    target = tl.load(target_ptr + rows * target_stride, mask=live, other=0)
    kept = live & (target != ignore_index)
    known = kept & (target >= 0) & (target < n_cols)
    lse = tl.load(lse_ptr + rows, mask=live, other=0.0)
    low = tl.load(low_ptr + rows, mask=live, other=0.0)
    dloss = tl.load(dloss_ptr + rows * dloss_stride, mask=kept, other=0.0).to(tl.float32)
    on_target = tl.where(kept & (known == 0), float("nan"), dloss * (1.0 - smoothing))
    if HAS_WEIGHT:
        on_target *= tl.load(weight_ptr + target, mask=known, other=0.0).to(tl.float32)
    on_softmax = on_target + tl.where(kept, 2.0 * z_loss * dloss * lse, 0.0)
    on_weight = dloss * smoothing / n_cols
    if HAS_SMOOTHING:
        on_softmax += on_weight * tl.load(weight_sum_ptr)
    read = kept
    if HAS_DLSE:
        on_softmax += tl.load(dlse_ptr + rows * dlse_stride, mask=live, other=0.0).to(tl.float32)
        read = live
    inside = live[:, None] & (cols < n_cols)[None, :]
    mask = inside & read[:, None]
    x = tl.load(logits_ptr + rows[:, None] * logits_stride + cols[None, :], mask=mask, other=float("-inf"))
    x = x.to(tl.float32)
    if HAS_SOFTCAP:
        tanh = _tanh(x / softcap)
        x = softcap * tanh
    dlogits = on_softmax[:, None] * tl.exp((x - lse[:, None]) - low[:, None])
    dlogits -= tl.where(cols[None, :] == target[:, None], on_target[:, None], 0.0)
    if HAS_SMOOTHING:
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            dlogits -= on_weight[:, None] * weight[None, :]
        else:
            dlogits -= on_weight[:, None]
    if HAS_SOFTCAP:
        dlogits *= 1.0 - tanh * tanh
    dlogits = tl.where(mask, dlogits, 0.0)
    out = dlogits_ptr + rows[:, None] * n_cols + cols[None, :]
    tl.store(out, dlogits.to(dlogits_ptr.dtype.element_ty), mask=inside)


@tuned()
def forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, lse and what lse lost to rounding, each (N,) fp32. A softcap of 0 means none."""
    x = as_rows(logits)
    n_rows, n_cols = x.shape
    loss, lse, low = (x.new_empty(n_rows, dtype=torch.float32) for _ in range(3))
    w, weight_sum = _class_weights(x, weight, label_smoothing)
    block = tile(n_rows, n_cols, elements=4096)
    _forward.launch(
        -(-n_rows // block.rows),
        x,
        target,
        w,
        weight_sum,
        loss,
        lse,
        low,
        x.stride(0),
        target.stride(0),
        n_rows,
        n_cols,
        ignore_index,
        label_smoothing,
        z_loss,
        softcap,
        warps=block.warps,
        HAS_WEIGHT=weight is not None,
        HAS_SMOOTHING=label_smoothing > 0.0,
        HAS_SOFTCAP=softcap > 0.0,
        BLOCK_ROWS=block.rows,
        BLOCK_COLS=block.cols,
    )
    return loss, lse, low


@tuned()
def backward(
    dloss: Tensor,
    dlse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    low: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> Tensor:
    """Return the gradient of logits (N, V), contiguous."""
    x = as_rows(logits)
    n_rows, n_cols = x.shape
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    w, weight_sum = _class_weights(x, weight, label_smoothing)
    block = tile(n_rows, n_cols, elements=2048)
    _backward.launch(
        -(-n_rows // block.rows) * -(-n_cols // block.cols),
        dloss,
        dloss if dlse is None else dlse,
        x,
        target,
        w,
        weight_sum,
        lse,
        low,
        dlogits,
        dloss.stride(0),
        0 if dlse is None else dlse.stride(0),
        x.stride(0),
        target.stride(0),
        n_rows,
        n_cols,
        ignore_index,
        label_smoothing,
        z_loss,
        softcap,
        warps=block.warps,
        HAS_DLSE=dlse is not None,
        HAS_WEIGHT=weight is not None,
        HAS_SMOOTHING=label_smoothing > 0.0,
        HAS_SOFTCAP=softcap > 0.0,
        BLOCK_ROWS=block.rows,
        BLOCK_COLS=block.cols,
    )
    return dlogits


def _class_weights(x: Tensor, weight: Tensor | None, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """The weights and their sum (one fp32 on the device, so that nobody waits for it)."""
    if label_smoothing == 0.0:
        return x if weight is None else weight.contiguous(), x
    if weight is None:
        return x, x.new_full((), float(x.shape[1]), dtype=torch.float32)
    return weight.contiguous(), weight.sum(dtype=torch.float32)
