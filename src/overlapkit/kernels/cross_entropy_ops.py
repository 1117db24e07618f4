"""Cross entropy of rows as operators that autograd and torch.compile know."""

from typing import Any

import torch
from torch import Tensor

from overlapkit.kernels import cross_entropy_rows as rows
from overlapkit.kernels.arguments import no_double_backward
from overlapkit.kernels.cross_entropy_options import Options
from overlapkit.kernels.cross_entropy_plain import wide
from overlapkit.launch import through_triton


@torch.library.custom_op("overlapkit::cross_entropy", mutates_args=())
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, lse and what lse lost to rounding, each (N,), of logits (N, V)."""
    options = Options(ignore_index, label_smoothing, z_loss, softcap, group)
    return rows.forward(logits, target, weight, options)


@cross_entropy.register_fake
def _(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    loss = logits.new_empty(logits.shape[0], dtype=wide(logits.dtype))
    return loss, torch.empty_like(loss), torch.empty_like(loss)


@torch.library.custom_op("overlapkit::cross_entropy_backward", mutates_args=())
def _backward(
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
    group: str,
) -> Tensor:
    options = Options(ignore_index, label_smoothing, z_loss, softcap, group)
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    rows.gradient(dloss, dlse, logits, target, weight, lse, low, options, dlogits)
    return dlogits


@_backward.register_fake
def _(dloss: Tensor, dlse: Tensor | None, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, weight, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    _, lse, low = output
    ctx.mark_non_differentiable(low)
    ctx.save_for_backward(logits, target, weight, lse, low)


def _differentiate(
    ctx: Any, dloss: Tensor | None, dlse: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    logits, target, weight, lse, low = ctx.saved_tensors
    dlogits = None
    if dloss is not None or dlse is not None:
        dloss = torch.zeros_like(lse) if dloss is None else dloss
        dlogits = _backward(dloss, dlse, logits, target, weight, lse, low, *ctx.options)
    return dlogits, None, None, None, None, None, None, None


cross_entropy.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(no_double_backward("cross_entropy"))


@torch.library.custom_op("overlapkit::cross_entropy_", mutates_args=("logits",))
def cross_entropy_(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Return loss and lse, each (N,); logits (N, V), of dense rows, become the loss's gradient x scale ()."""
    options = Options(ignore_index, label_smoothing, z_loss, softcap, group)
    return rows.forward_and_gradient_(logits, target, weight, scale, options)


@cross_entropy_.register_fake
def _(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    loss = logits.new_empty(logits.shape[0], dtype=wide(logits.dtype))
    return loss, torch.empty_like(loss)


@torch.library.custom_op("overlapkit::scale_rows_", mutates_args=("x",))
def scale_rows_(x: Tensor, scale: Tensor) -> None:
    """Multiply each row of x (N, V), of dense rows, by its scale (N,)."""
    if through_triton(x):
        from overlapkit.kernels.raw.cross_entropy_inplace import scale_

        scale_(x, scale)
    else:
        x.mul_(scale[:, None])
