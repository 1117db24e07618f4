"""What rms_norm and layer_norm share: checks, dtypes, and norms over several dimensions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from overlapkit.kernels.arguments import check_floating, check_like
from overlapkit.launch import DTYPES, through_triton

WIDEST = 16_384
"""A forward program holds its whole row in registers; a wider one spills, and is left to torch."""


def through_kernel(x: Tensor, residual: Tensor | None) -> bool:
    """Whether there is a kernel for these dtypes and this width."""
    fits = x.shape[-1] <= WIDEST and (residual is None or residual.dtype in DTYPES)
    return fits and through_triton(x)


def check_tensors(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> None:
    """Refuse what does not fit x (..., D)."""
    check_floating("x", x)
    if weight is not None:
        check_like("weight", weight, x.shape[-1:], "x", x)
    if bias is not None:
        check_like("bias", bias, x.shape[-1:], "x", x)
    if residual is not None:
        check_like("residual", residual, x.shape, "x", x)


def in_one_dtype(
    x: Tensor, *parameters: Tensor | None, result: torch.dtype
) -> tuple[Tensor, list[Tensor | None]]:
    """What torch's norms take, which have no form for two dtypes: all in the widest, unless they agree."""
    if x.dtype == result and all(p is None or p.dtype == x.dtype for p in parameters):
        return x, list(parameters)
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide), [None if p is None else p.to(wide) for p in parameters]


def in_dtypes(
    grads: tuple[Tensor | None, ...], dtypes: list[torch.dtype | None]
) -> tuple[Tensor | None, ...]:
    """Gradients in the dtypes of what they are for, which may not be there (None)."""
    pairs = zip(grads, dtypes, strict=True)
    return tuple(None if g is None or dtype is None else g.to(dtype) for g, dtype in pairs)


def over_dimensions(
    norm: Callable[..., Any],
    shape: tuple[int, ...],
    x: Tensor,
    *arguments: Any,
    residual: Tensor | None,
    **options: Any,
) -> Any:
    """Run `norm`, which takes the last dimension, over the last len(shape) dimensions, as nn modules do.

    Raises:
        ValueError: x does not end in `shape`, or the residual differs from x in shape or device.
    """
    check_floating("x", x)
    if x.shape[-len(shape) :] != shape:
        raise ValueError(f"x has shape {tuple(x.shape)}: it has to end in normalized_shape, {shape}")
    if len(shape) == 1:
        return norm(x, *arguments, residual=residual, **options)
    if residual is not None:
        check_like("residual", residual, x.shape, "x", x)
    flat = [t.flatten(-len(shape)) if isinstance(t, Tensor) else t for t in (x, *arguments, residual)]
    result = norm(*flat[:-1], residual=flat[-1], **options)
    return result.view(x.shape) if residual is None else tuple(t.view(x.shape) for t in result)


def fake_results(x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What forward returns first: y, and the sum."""
    total = 0 if residual is None else x.shape
    promoted = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(total, dtype=promoted)


def fake_statistic(x: Tensor) -> Tensor:
    """One fp32 number a row."""
    n_rows = 1
    for size in x.shape[:-1]:
        n_rows = n_rows * size
    return x.new_empty(n_rows, dtype=torch.float32)


def fake_gradients(x: Tensor, *needed: bool) -> tuple[Tensor, ...]:
    """What backward returns: dx, and fp32 gradients of parameters, empty where they are not needed."""
    sizes = [x.shape[-1] if need else 0 for need in needed]
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, *(x.new_empty(size, dtype=torch.float32) for size in sizes)
