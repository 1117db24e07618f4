"""Softmax with the scale and the mask before it folded in."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from overlapkit.kernels.arguments import check_floating, check_number, no_double_backward
from overlapkit.kernels.autocast import result_dtype
from overlapkit.kernels.sharded import by_rows
from overlapkit.launch import DTYPES, through_triton


@by_rows("x", broadcast=("mask",), dim="dim")
def softmax(
    x: Tensor,
    dim: int = -1,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Softmax of scale * x + mask, computed in fp32 in one kernel.

    As torch.nn.functional.softmax, with attention's scale and mask. (For attention itself take torch's
    scaled_dot_product_attention or FlexAttention, which never hold the scores.) A row of which the mask
    leaves nothing (all are -inf) is zeros with zero gradients, as in scaled_dot_product_attention; without
    a mask such a row is NaN, as in F.softmax. Dimensions other than the last and dtypes other than
    float32, bfloat16 and float16 are left to torch.

    Args:
        x: (..., D), floating point, any strides, D of any size.
        dim: The dimension that sums up to one.
        dtype: Of the result, floating point. None for that of x (float32 inside torch.autocast on CUDA,
            as torch's own).
        scale: Multiplies x.
        mask: Broadcastable to the shape of x, without a copy, or None. Boolean: True takes part. Floating
            point: it is added, and gets a gradient where it asks for one.

    Returns:
        The shape of x, contiguous.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: Shapes, devices or dtypes do not fit, or scale is not finite.
        IndexError: x has no such dimension.
        RuntimeError: A second derivative was asked for, on a GPU.
    """
    check_floating("x", x)
    check_number("scale", scale)
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale={scale}: allowed are finite numbers")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype={dtype!r}: pass a floating-point torch.dtype, or None for that of x")
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"dim={dim}: x has {x.dim()} dimensions, {-x.dim()} to {x.dim() - 1}")
    if mask is not None:
        _check_mask(mask, x)
    result = dtype or result_dtype(x)
    if dim in (-1, x.dim() - 1) and result in DTYPES and through_triton(x):
        y: Tensor = _softmax(x, mask, scale, result)
        return y
    return _plain(x, dim, result, scale, mask)


def _check_mask(mask: Tensor, x: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask is a {type(mask).__name__}: pass a torch.Tensor")
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(
            f"mask has dtype {mask.dtype}: pass bool (True takes part), or floating point to be added"
        )
    pairs = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.dim() > x.dim() or any(m != 1 and m != n for m, n in pairs):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}: it has to be broadcastable to that of x, {tuple(x.shape)}"
        )
    if mask.device != x.device:
        raise ValueError(f"mask is on {mask.device}, but x is on {x.device}: move one of them with .to(...)")


def _plain(x: Tensor, dim: int, dtype: torch.dtype, scale: float, mask: Tensor | None) -> Tensor:
    """The same in torch's own operations."""
    if mask is None and scale == 1.0:
        return F.softmax(x, dim, dtype=dtype)
    z = x.to(torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32)) * scale
    if mask is None:
        return F.softmax(z, dim).to(dtype)
    z = z.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else z + mask.to(z.dtype)
    nothing = (z == -math.inf).all(dim, keepdim=True)
    z = z.masked_fill(nothing, 0.0)  # before softmax, too: a gradient of zero times NaN is NaN
    return F.softmax(z, dim).masked_fill(nothing, 0.0).to(dtype)


@torch.library.custom_op("overlapkit::softmax", mutates_args=())
def _softmax(x: Tensor, mask: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    from overlapkit.kernels.raw.softmax import forward

    return forward(x, mask, scale, dtype)


@_softmax.register_fake
def _(x: Tensor, mask: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("overlapkit::softmax_backward", mutates_args=())
def _softmax_backward(dy: Tensor, y: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    from overlapkit.kernels.raw.softmax import backward

    return backward(dy, y, scale, dtype)


@_softmax_backward.register_fake
def _(dy: Tensor, y: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return y.new_empty(y.shape, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, mask, ctx.scale, _ = inputs
    ctx.dtype = x.dtype
    ctx.mask = None if mask is None else (mask.shape, mask.dtype)
    ctx.save_for_backward(output)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (y,) = ctx.saved_tensors
    if not (ctx.mask and ctx.needs_input_grad[1]):
        return _softmax_backward(dy, y, ctx.scale, ctx.dtype), None, None, None
    shape, dtype = ctx.mask
    dz = _softmax_backward(dy, y, 1.0, torch.promote_types(ctx.dtype, dtype))
    return (dz * ctx.scale).to(ctx.dtype), dz.sum_to_size(shape).to(dtype), None, None


_softmax.register_autograd(_differentiate, setup_context=_save)
_softmax_backward.register_autograd(no_double_backward("softmax"))
