"""Linear cross entropy as operators that autograd, torch.compile and the flop counter know.

Two forms: a sum, whose gradients are made in the forward pass and scaled in the backward pass, and rows,
whose gradients wait for those of the losses and compute the logits once more.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from overlapkit.kernels import linear_cross_entropy_chunks as chunks
from overlapkit.kernels.arguments import no_double_backward
from overlapkit.kernels.cross_entropy_options import Options
from overlapkit.kernels.cross_entropy_plain import wide
from overlapkit.kernels.linear_cross_entropy_chunks import Head

INSTEAD = "F.cross_entropy(F.linear(input, linear_weight, linear_bias), target)"
refuse_double_backward = no_double_backward("linear_cross_entropy", INSTEAD)


@torch.library.custom_op("overlapkit::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    group: str,
    chunk_bytes: int,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the summed loss and its gradients of input (N, D), linear_weight (V, D) and linear_bias (V,)."""
    head = Head(input, linear_weight, target, linear_bias, weight)
    options = Options(ignore_index, label_smoothing, z_loss, softcap, group)
    return chunks.total(head, options, chunk_bytes, (need_input, need_weight, need_bias))


def _fake_gradients(
    input: Tensor, linear_weight: Tensor, needs: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    d = wide(linear_weight.dtype)
    need_input, need_weight, need_bias = needs
    return (
        input.new_empty(input.shape if need_input else (0,)),
        linear_weight.new_empty(linear_weight.shape if need_weight else (0,), dtype=d),
        linear_weight.new_empty(linear_weight.shape[:1] if need_bias else (0,), dtype=d),
    )


@linear_cross_entropy.register_fake
def _(input: Tensor, linear_weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradients = _fake_gradients(input, linear_weight, rest[-3:])
    return input.new_empty((), dtype=wide(input.dtype)), *gradients


@torch.library.custom_op("overlapkit::scaled", mutates_args=())
def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """X * scale, rounded once. A scale of no dimensions would be rounded to x's dtype before."""
    out = torch.empty_like(x, dtype=dtype)
    return torch.mul(x, scale.reshape([1] * x.dim()), out=out)


@_scaled.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, linear_weight, _, linear_bias, *_ = inputs
    ctx.dtypes = (input.dtype, linear_weight.dtype, None if linear_bias is None else linear_bias.dtype)
    ctx.needs = inputs[-3:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _differentiate(ctx: Any, dtotal: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    found: list[Tensor | None] = [None, None, None]
    if torch.is_grad_enabled():  # create_graph=True; what was made in forward depends on nothing any more
        refuse_double_backward()
    if dtotal is not None:
        for i, (gradient, dtype) in enumerate(zip(ctx.saved_tensors, ctx.dtypes, strict=True)):
            if ctx.needs[i]:
                found[i] = _scaled(gradient, dtotal, dtype)
    dinput, dweight, dbias = found
    return dinput, dweight, None, dbias, *[None] * 10


linear_cross_entropy.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("overlapkit::linear_cross_entropy_rows", mutates_args=())
def linear_cross_entropy_rows(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    group: str,
    chunk_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, lse and what lse lost to rounding, each (N,)."""
    head = Head(input, linear_weight, target, linear_bias, weight)
    options = Options(ignore_index, label_smoothing, z_loss, softcap, group)
    return chunks.rowwise(head, options, chunk_bytes)


@linear_cross_entropy_rows.register_fake
def _(input: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    loss = input.new_empty(input.shape[0], dtype=wide(input.dtype))
    return loss, torch.empty_like(loss), torch.empty_like(loss)


@torch.library.custom_op("overlapkit::linear_cross_entropy_backward", mutates_args=())
def _backward(
    dloss: Tensor,
    dlse: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    lse: Tensor,
    low: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    group: str,
    chunk_bytes: int,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    head = Head(input, linear_weight, target, linear_bias, weight)
    options = Options(ignore_index, label_smoothing, z_loss, softcap, group)
    needs = (need_input, need_weight, need_bias)
    return chunks.rowwise_gradients(dloss, dlse, head, lse, low, options, chunk_bytes, needs)


@_backward.register_fake
def _(
    dloss: Tensor, dlse: Tensor | None, input: Tensor, linear_weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_gradients(input, linear_weight, rest[-3:])


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    input, linear_weight, target, linear_bias, weight, *ctx.options = inputs
    _, lse, low = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(low)
    ctx.save_for_backward(input, linear_weight, target, linear_bias, weight, lse, low)


def _differentiate_rows(
    ctx: Any, dloss: Tensor | None, dlse: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    nothing: list[Tensor | None] = [None] * 11
    if dloss is None and dlse is None:
        return tuple(nothing)
    input, linear_weight, target, linear_bias, weight, lse, low = ctx.saved_tensors
    dloss = torch.zeros_like(lse) if dloss is None else dloss
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    tensors = (input, linear_weight, target, linear_bias, weight, lse, low)
    found = _backward(dloss, dlse, *tensors, *ctx.options, *needs)
    for place, like, gradient, need in zip(
        (0, 1, 3), (input, linear_weight, linear_bias), found, needs, strict=True
    ):
        if need:
            nothing[place] = gradient.to(like.dtype)
    return tuple(nothing)


linear_cross_entropy_rows.register_autograd(_differentiate_rows, setup_context=_save_rows)
_backward.register_autograd(refuse_double_backward)


def _product(input: tuple[int, ...], linear_weight: tuple[int, ...], factor: int = 1) -> int:
    return factor * 2 * input[0] * input[1] * linear_weight[0]


@register_flop_formula(torch.ops.overlapkit.linear_cross_entropy)
def _(input: Any, linear_weight: Any, *rest: Any, **kwargs: Any) -> int:
    need_input, need_weight, _ = rest[-3:]
    return _product(input, linear_weight, 1 + need_input + need_weight)


@register_flop_formula(torch.ops.overlapkit.linear_cross_entropy_rows)
def _(input: Any, linear_weight: Any, *rest: Any, **kwargs: Any) -> int:
    return _product(input, linear_weight)


@register_flop_formula(torch.ops.overlapkit.linear_cross_entropy_backward)
def _(dloss: Any, dlse: Any, input: Any, linear_weight: Any, *rest: Any, **kwargs: Any) -> int:
    need_input, need_weight, _ = rest[-3:]
    return _product(input, linear_weight, 1 + need_input + need_weight)
