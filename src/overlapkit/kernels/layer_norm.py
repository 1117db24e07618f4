"""LayerNorm, with the residual addition before it folded in on request."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlapkit.kernels.arguments import check_not_negative, no_double_backward
from overlapkit.kernels.autocast import result_dtype
from overlapkit.kernels.norm import (
    check_tensors,
    fake_gradients,
    fake_results,
    fake_statistic,
    in_dtypes,
    in_one_dtype,
    over_dimensions,
    through_kernel,
)
from overlapkit.kernels.sharded import by_rows


@by_rows("x", "residual", whole=("weight", "bias"))
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
) -> Any:
    """Standardise each row: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.

    As torch.nn.functional.layer_norm over the last dimension (Ba, Kiros and Hinton, 2016), which is why
    there is no normalized_shape; `LayerNorm` takes several. Rows wider than 16,384 and dtypes other than
    float32, bfloat16 and float16 are left to torch.

    Args:
        x: (..., D), floating point, any strides.
        weight: (D,), or None for 1. It may have another dtype than x.
        bias: (D,), or None for 0. It may have another dtype than x.
        eps: Added to the variance.
        residual: Shape of x, or None. It is added before the norm, and the sum is returned too, in the
            promoted dtype of both.

    Returns:
        y with the shape and dtype of x (float32 inside torch.autocast on CUDA, as torch's own); with a
        residual the pair (y, x + residual).

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: Shapes, devices or dtypes do not fit.
        RuntimeError: A second derivative was asked for, on a GPU.
    """
    check_tensors(x, weight, bias, residual)
    check_not_negative("eps", eps)
    dtype = result_dtype(x)
    if through_kernel(x, residual):
        y, total, *_ = _layer_norm(x, weight, bias, residual, eps, dtype)
    else:
        total = x if residual is None else x + residual
        z, (w, b) = in_one_dtype(total, weight, bias, result=dtype)
        y = F.layer_norm(z, x.shape[-1:], w, b, eps).to(dtype)
    return y if residual is None else (y, total)


class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm through `layer_norm`, with the same arguments."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        """Return what `layer_norm` returns, for input (..., *normalized_shape)."""
        given = (self.weight, self.bias, self.eps)
        return over_dimensions(layer_norm, self.normalized_shape, input, *given, residual=residual)


@torch.library.custom_op("overlapkit::layer_norm", mutates_args=())
def _layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from overlapkit.kernels.raw.norm_forward import forward

    return forward(x, weight, bias, residual, eps, 0.0, dtype, centred=True)


@_layer_norm.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *fake_results(x, residual, dtype), fake_statistic(x), fake_statistic(x)


@torch.library.custom_op("overlapkit::layer_norm_backward", mutates_args=())
def _layer_norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dweight and dbias; the latter in float32, and empty where they are not needed."""
    from overlapkit.kernels.raw.norm_backward import backward

    return backward(dy, dsum, x, weight, mean, rstd, 0.0, need_dweight, need_dbias)


@_layer_norm_backward.register_fake
def _(dy: Tensor, dsum: Tensor | None, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = fake_gradients(x, *rest[-2:])
    return dx, dweight, dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, *_ = inputs
    _, total, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias, residual)]
    ctx.save_for_backward(x if residual is None else total, weight, mean, rstd)


def _differentiate(ctx: Any, dy: Tensor | None, dsum: Tensor | None, *_: None) -> tuple[Any, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    dx = dsum if ctx.dtypes[3] is not None else None
    dweight, dbias = None, None
    if dy is not None:
        need = [bool(ctx.needs_input_grad[i]) for i in (1, 2)]
        dx, *found = _layer_norm_backward(dy, dx, x, weight, mean, rstd, *need)
        dweight, dbias = (g if needed else None for g, needed in zip(found, need, strict=True))
    return *in_dtypes((dx, dweight, dbias, dx), ctx.dtypes), None, None


_layer_norm.register_autograd(_differentiate, setup_context=_save)
_layer_norm_backward.register_autograd(no_double_backward("layer_norm"))
