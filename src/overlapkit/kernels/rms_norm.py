"""RMSNorm, with the residual addition before it folded in on request."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlapkit.kernels.arguments import check_not_negative, check_number, no_double_backward
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

    As torch.nn.functional.rms_norm over the last dimension (Zhang and Sennrich, 2019), which is why there
    is no normalized_shape; `RMSNorm` takes several. Rows wider than 16,384 and dtypes other than float32,
    bfloat16 and float16 are left to torch.

    Args:
        x: (..., D), floating point, any strides.
        weight: (D,), or None for 1. It may have another dtype than x.
        eps: Added to the mean square. None is torch's default: the machine epsilon of the dtype that
            the statistics are computed in (float32's; float64's for float64).
        residual: Shape of x, or None. It is added before the norm, and the sum is returned too, in the
            promoted dtype of both.
        offset: Added to the weight; Gemma stores weight - 1, hence 1.0 there.

    Returns:
        y with the shape and dtype of x (float32 inside torch.autocast on CUDA, as torch's own); with a
        residual the pair (y, x + residual).

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: Shapes, devices or dtypes do not fit.
        RuntimeError: A second derivative was asked for, on a GPU.
    """
    check_tensors(x, weight, None, residual)
    if eps is not None:
        check_not_negative("eps", eps)
    check_number("offset", offset)
    if offset and weight is None:
        raise ValueError(f"offset={offset} is added to the weight, and weight is None: pass a weight")
    dtype = result_dtype(x)
    if through_kernel(x, residual):
        eps = torch.finfo(torch.float32).eps if eps is None else eps
        y, total, _ = _rms_norm(x, weight, residual, eps, offset, dtype)
    else:
        total = x if residual is None else x + residual
        if weight is not None and offset:
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset
        z, (w,) = in_one_dtype(total, weight, result=dtype)
        y = F.rms_norm(z, x.shape[-1:], w, eps).to(dtype)
    return y if residual is None else (y, total)


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm through `rms_norm`.

    Args:
        normalized_shape: D, or the sizes of the last dimensions.
        eps: As in `rms_norm`.
        elementwise_affine: Whether there is a weight (ones at first; zeros with offset=1).
        device: Where the weight is made.
        dtype: The weight's dtype.
        offset: As in `rms_norm`.
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
        self.offset = offset
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        """Set the weight so that weight + offset is one."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return what `rms_norm` returns, for x (..., *normalized_shape)."""
        given = (self.weight, self.eps)
        return over_dimensions(
            rms_norm, self.normalized_shape, x, *given, residual=residual, offset=self.offset
        )

    def extra_repr(self) -> str:
        """torch's, and the offset where there is one."""
        return super().extra_repr() + (f", offset={self.offset}" if self.offset else "")


@torch.library.custom_op("overlapkit::rms_norm", mutates_args=())
def _rms_norm(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    from overlapkit.kernels.raw.norm_forward import forward

    y, total, _, rstd = forward(x, weight, None, residual, eps, offset, dtype, centred=False)
    return y, total, rstd


@_rms_norm.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    return *fake_results(x, residual, dtype), fake_statistic(x)


@torch.library.custom_op("overlapkit::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    """Return dx and dweight; the latter in float32, and empty where it is not needed."""
    from overlapkit.kernels.raw.norm_backward import backward

    dx, dweight, _ = backward(dy, dsum, x, weight, None, rstd, offset, need_dweight, need_dbias=False)
    return dx, dweight


@_rms_norm_backward.register_fake
def _(dy: Tensor, dsum: Tensor | None, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dx, dweight = fake_gradients(x, rest[-1])
    return dx, dweight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, residual, _, ctx.offset, _ = inputs
    _, total, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, residual)]
    ctx.save_for_backward(x if residual is None else total, weight, rstd)


def _differentiate(ctx: Any, dy: Tensor | None, dsum: Tensor | None, _: None) -> tuple[Any, ...]:
    x, weight, rstd = ctx.saved_tensors
    dx = dsum if ctx.dtypes[2] is not None else None
    dweight = None
    if dy is not None:
        need = weight is not None and ctx.needs_input_grad[1]
        dx, found = _rms_norm_backward(dy, dx, x, weight, rstd, ctx.offset, need)
        dweight = found if need else None
    return *in_dtypes((dx, dweight, dx), ctx.dtypes), None, None, None


_rms_norm.register_autograd(_differentiate, setup_context=_save)
_rms_norm_backward.register_autograd(no_double_backward("rms_norm"))
