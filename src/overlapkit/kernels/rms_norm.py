"""RMSNorm, with the residual addition before it folded in on request."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlapkit.kernels.arguments import (
    check_floating,
    check_like,
    check_not_negative,
    check_number,
    no_double_backward,
)
from overlapkit.kernels.sharded import by_rows
from overlapkit.launch import through_triton

_WIDEST = 16_384  # a forward program holds its whole row in registers; a wider one spills


@by_rows("x", "residual", whole=("weight",))
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    offset: float = 0.0,
) -> Any:
    """Divide each row by its root mean square: y = x / sqrt(mean(x^2) + eps) * (weight + offset).

    As torch.nn.functional.rms_norm over the last dimension (Zhang and Sennrich, 2019). Rows wider than
    16,384 and dtypes other than float32, bfloat16 and float16 are left to torch.

    Args:
        x: (..., D), floating point, any strides.
        weight: (D,), or None for 1. It may have another dtype than x.
        eps: Added to the mean square. None is torch's default: the machine epsilon of the dtype that
            the statistics are computed in (float32's; float64's for float64).
        residual: Shape of x, or None. It is added before the norm, and the sum is returned too, in the
            promoted dtype of both.
        offset: Added to the weight; Gemma stores weight - 1, hence 1.0 there.

    Returns:
        y with the shape and dtype of x; with a residual the pair (y, x + residual).

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: Shapes, devices or dtypes do not fit.
        RuntimeError: A second derivative was asked for, on a GPU.
    """
    _check(x, weight, eps, residual, offset)
    if not through_triton(x) or x.shape[-1] > _WIDEST:
        return _plain(x, weight, eps, residual, offset)
    if eps is None:
        eps = torch.finfo(torch.float32).eps
    y, total, _ = _rms_norm(x, weight, residual, eps, offset)
    return y if residual is None else (y, total)


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm over one dimension, through `rms_norm`.

    Args:
        normalized_shape: D, or a sequence that holds only D.
        eps: As in `rms_norm`.
        elementwise_affine: Whether there is a weight (ones at first; zeros with offset=1).
        offset: As in `rms_norm`.
        device: Where the weight is made.
        dtype: The weight's dtype.
    """

    offset: float = 0.0

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
    ) -> None:
        if not isinstance(normalized_shape, int) and len(normalized_shape) != 1:
            raise NotImplementedError(
                f"normalized_shape={tuple(normalized_shape)}: only the last dimension can be normalised yet"
            )
        self.offset = offset
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        """Set the weight so that weight + offset is one."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return what `rms_norm` returns, for x (..., D)."""
        return rms_norm(x, self.weight, self.eps, residual=residual, offset=self.offset)

    def extra_repr(self) -> str:
        """torch's, and the offset where there is one."""
        return super().extra_repr() + (f", offset={self.offset}" if self.offset else "")


def _check(
    x: Tensor, weight: Tensor | None, eps: float | None, residual: Tensor | None, offset: float
) -> None:
    check_floating("x", x)
    if eps is not None:
        check_not_negative("eps", eps)
    check_number("offset", offset)
    if weight is not None:
        check_like("weight", weight, x.shape[-1:], "x", x)
    elif offset:
        raise ValueError(f"offset={offset} is added to the weight, and weight is None: pass a weight")
    if residual is not None:
        check_like("residual", residual, x.shape, "x", x)


def _plain(
    x: Tensor, weight: Tensor | None, eps: float | None, residual: Tensor | None, offset: float
) -> Any:
    """The same in torch's own operations."""
    total = x if residual is None else x + residual
    if weight is not None and offset:
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset
    if total.dtype == x.dtype and (weight is None or weight.dtype == x.dtype):
        y = F.rms_norm(total, total.shape[-1:], weight, eps)
    else:  # torch has no fused form for two dtypes, and warns
        wide = torch.promote_types(total.dtype, torch.float32)
        weight = None if weight is None else weight.to(wide)
        y = F.rms_norm(total.to(wide), total.shape[-1:], weight, eps).to(x.dtype)
    return y if residual is None else (y, total)


@torch.library.custom_op("overlapkit::rms_norm", mutates_args=())
def _rms_norm(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    from overlapkit.kernels.raw.rms_norm import forward

    return forward(x, weight, residual, eps, offset)


@_rms_norm.register_fake
def _(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    n_rows = 1
    for size in x.shape[:-1]:
        n_rows = n_rows * size
    rstd = x.new_empty(n_rows, dtype=torch.float32)
    if residual is None:
        return y, x.new_empty(0), rstd
    return y, x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype)), rstd


@torch.library.custom_op("overlapkit::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    need_dw: bool,
) -> tuple[Tensor, Tensor]:
    from overlapkit.kernels.raw.rms_norm import backward

    return backward(dy, dsum, x, weight, rstd, offset, need_dw)


@_rms_norm_backward.register_fake
def _(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    need_dw: bool,
) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    has_dw = weight is not None and need_dw
    return dx, x.new_empty(
        weight.shape, dtype=weight.dtype
    ) if has_dw and weight is not None else x.new_empty(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, residual, _, ctx.offset = inputs
    _, total, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
    ctx.save_for_backward(x if residual is None else total, weight, rstd)


def _differentiate(ctx: Any, dy: Tensor | None, dsum: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    x, weight, rstd = ctx.saved_tensors
    x_dtype, residual_dtype = ctx.dtypes
    dx, dw = dsum if residual_dtype is not None else None, None
    if dy is not None:
        need_dw = weight is not None and ctx.needs_input_grad[1]
        dx, dw = _rms_norm_backward(dy, dx, x, weight, rstd, ctx.offset, need_dw)
        dw = dw if need_dw else None
    if dx is None:
        return None, None, None, None, None
    dresidual = None if residual_dtype is None else dx.to(residual_dtype)
    return dx.to(x_dtype), dw, dresidual, None, None


_rms_norm.register_autograd(_differentiate, setup_context=_save)
_rms_norm_backward.register_autograd(no_double_backward("rms_norm"))
