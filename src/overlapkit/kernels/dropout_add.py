"""residual + dropout(x), whose mask is a function of a seed and is never stored."""

import math
from typing import Any

import torch
from torch import Tensor

from overlapkit.kernels.arguments import check_floating, check_like, check_number, no_double_backward
from overlapkit.kernels.sharded import by_rows
from overlapkit.launch import through_triton


@by_rows("x", "residual", seed="seed")
def dropout_add(
    x: Tensor,
    residual: Tensor,
    p: float = 0.5,
    seed: int | Tensor | None = None,
    *,
    training: bool = True,
) -> Tensor:
    """Return residual + dropout(x), with dropout as torch.nn.functional.dropout has it.

    The mask is a function of the seed and of the element's place, (row, column) with all dimensions but
    the last counted as one: the same on the CPU and on a GPU, at any strides. On a GPU nothing is kept for
    backward but the seed, and backward draws the mask again.

    Args:
        x: (..., D), floating point, any strides.
        residual: Shape and device of x.
        p: The probability of an element to be zeroed, in steps of 2**-31; the rest is divided by 1 - p.
        seed: None draws one from torch's generator of the device, as F.dropout does, so that
            torch.manual_seed, activation recomputation and CUDA graphs have their usual effect. An int64
            is a mask that repeats: take another one for each layer and step, and for each rank. A tensor of
            one int64 on the device of x is the same without a new launch argument: a captured CUDA graph
            reads what it holds at each replay. It must not change between forward and backward. DTensors
            need one, the same on all ranks: each shard makes another mask of it.
        training: False returns residual + x, and needs no seed. So does p=0.

    Returns:
        The shape of x, in the promoted dtype of x and residual.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: p or seed is out of range; shapes, devices or dtypes do not fit.
        RuntimeError: A second derivative was asked for, on a GPU.
    """
    check_floating("x", x)
    check_like("residual", residual, x.shape, "x", x)
    check_number("p", p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p={p}: allowed are probabilities, 0 to 1")
    key = _key(seed, x) if training and p else None
    if key is None:
        return residual + x
    if through_triton(x) and through_triton(residual):
        y: Tensor = _dropout_add(x, residual, key, p)
        return y
    wide = torch.promote_types(torch.promote_types(x.dtype, residual.dtype), torch.float32)
    limit, factor = _limit_and_factor(p)
    dropped = torch.where(_kept(key, x.shape, limit), x.to(wide) * factor, 0.0)
    return (residual.to(wide) + dropped).to(torch.promote_types(x.dtype, residual.dtype))


def _key(seed: int | Tensor | None, x: Tensor) -> Tensor:
    """The seed as one int64 on the device of x, which the host never reads."""
    if seed is None:
        return torch.randint(2**63 - 1, (1,), device=x.device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(
                f"seed has dtype {seed.dtype} and shape {tuple(seed.shape)}: pass one int64 element, e.g. "
                "torch.zeros((), dtype=torch.int64, device=x.device)"
            )
        if seed.device != x.device:
            raise ValueError(
                f"seed is on {seed.device}, but x is on {x.device}: make it there, or pass an int"
            )
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r} is a {type(seed).__name__}: pass an int, an int64 tensor or None")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed={seed}: allowed is what an int64 holds")
    return torch.full((1,), seed, dtype=torch.int64, device=x.device)


def _limit_and_factor(p: float) -> tuple[int, float]:
    """Numbers of 31 bits below the limit stay, multiplied by the factor."""
    return min(round((1.0 - p) * 2**31), 2**31 - 1), 0.0 if p == 1.0 else 1.0 / (1.0 - p)


def _kept(seed: Tensor, shape: torch.Size, limit: int) -> Tensor:
    """The mask as the kernel draws it: Philox 4x32-10, four neighbours in a row to a counter."""
    n_rows, groups = math.prod(shape[:-1]), -(-shape[-1] // 4)
    counters = torch.arange(n_rows * groups, device=seed.device)
    numbers = torch.stack(_philox(counters, seed.reshape(())), -1).view(n_rows, 4 * groups)
    return (numbers[:, : shape[-1]] >> 1 < limit).reshape(shape)


def _philox(counter: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    """Four numbers of 32 bits, held in int64, for each counter (int64) and the key (int64).

    A product of two of them wraps in int64, which leaves both its halves right.
    """
    low = 0xFFFFFFFF
    a, b = counter & low, counter >> 32
    c = d = torch.zeros_like(counter)
    k, m = key & low, key >> 32 & low
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (y >> 32 & low) ^ b ^ k, y & low, (x >> 32 & low) ^ d ^ m, x & low
        k, m = k + 0x9E3779B9 & low, m + 0xBB67AE85 & low
    return a, b, c, d


@torch.library.custom_op("overlapkit::dropout_add", mutates_args=())
def _dropout_add(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    from overlapkit.kernels.raw.dropout_add import dropout

    return dropout(x, residual, seed, *_limit_and_factor(p), torch.promote_types(x.dtype, residual.dtype))


@_dropout_add.register_fake
def _(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))


@torch.library.custom_op("overlapkit::dropout_add_backward", mutates_args=())
def _dropout_add_backward(dy: Tensor, seed: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    from overlapkit.kernels.raw.dropout_add import dropout

    return dropout(dy, None, seed, *_limit_and_factor(p), dtype)


@_dropout_add_backward.register_fake
def _(dy: Tensor, seed: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    return dy.new_empty(dy.shape, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, residual, seed, ctx.p = inputs
    ctx.dtypes = (x.dtype, residual.dtype)
    ctx.save_for_backward(seed)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (seed,) = ctx.saved_tensors
    need_x, need_residual, *_ = ctx.needs_input_grad
    x_dtype, residual_dtype = ctx.dtypes
    dx = _dropout_add_backward(dy, seed, ctx.p, x_dtype) if need_x else None
    return dx, dy.to(residual_dtype) if need_residual else None, None, None


_dropout_add.register_autograd(_differentiate, setup_context=_save)
_dropout_add_backward.register_autograd(no_double_backward("dropout_add"))
