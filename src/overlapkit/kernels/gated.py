"""SwiGLU and GeGLU: the gated activations of feed-forward layers, of two tensors or of one packed one."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlapkit.kernels.arguments import check_floating, check_like, no_double_backward
from overlapkit.kernels.sharded import by_rows
from overlapkit.launch import through_triton


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (Shazeer, 2020).

    Two halves of one projection are read where they lie: `swiglu(*h.chunk(2, -1))` copies nothing.
    `swiglu_packed` also writes their gradient as one tensor.

    Args:
        gate: (..., D), floating point, any strides.
        up: Shape, dtype and device of gate.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: Shapes, devices or dtypes do not fit.
        RuntimeError: A second derivative was asked for, on a GPU.
    """
    return _of_two(gate, up, "silu")


def swiglu_packed(x: Tensor, order: str) -> Tensor:
    """Return silu(gate) * up of one projection that holds both, (..., D).

    Args:
        x: (..., 2D), floating point, any strides. Its gradient is one tensor, written in one go.
        order: Which half is which: "gate_up" where the gate comes first (Phi-3, GLM-4, vLLM's merged
            projections), "up_gate" where it comes last (as in torch's F.glu). Interleaved columns are
            two strided halves: `swiglu(x[..., ::2], x[..., 1::2])`, which copies them.

    Raises:
        TypeError: x is no tensor.
        ValueError: The last dimension is odd, x is not floating point, or order is another word.
        RuntimeError: A second derivative was asked for, on a GPU.
    """
    return _of_one(x, order, "silu")


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """Return gelu(gate) * up (Shazeer, 2020).

    Args:
        gate: (..., D), floating point, any strides.
        up: Shape, dtype and device of gate.
        approximate: As in torch.nn.functional.gelu: "none", or "tanh" (Gemma's).

    Raises:
        TypeError: An argument is no tensor.
        ValueError: Shapes, devices or dtypes do not fit, or approximate is another word.
        RuntimeError: A second derivative was asked for, on a GPU.
    """
    return _of_two(gate, up, _gelu(approximate))


def geglu_packed(x: Tensor, order: str, approximate: str = "none") -> Tensor:
    """Return gelu(gate) * up of one projection (..., 2D) that holds both; see `swiglu_packed` and `geglu`."""
    return _of_one(x, order, _gelu(approximate))


class _Gated(nn.Module):
    """What both modules share: they have no parameters, and take two tensors or a packed one."""

    activation = "silu"

    def __init__(self, order: str | None = None) -> None:
        super().__init__()
        if order is not None:
            _check_order(order)
        self.order = order

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """Return (..., D): of gate and up (..., D), or with an order of one tensor (..., 2D)."""
        if (self.order is None) != (up is not None):
            raise TypeError(
                f"{type(self).__name__}(order={self.order!r}) takes "
                + ("gate and up: pass both, or make it with an order" if up is None else "one packed tensor")
            )
        if up is not None:
            return _of_two(gate, up, self.activation)
        return _of_one(gate, str(self.order), self.activation)

    def extra_repr(self) -> str:
        """The order, where there is one."""
        return f"order={self.order!r}" if self.order else ""


class SwiGLU(_Gated):
    """`swiglu` as a module without parameters, as nn.SiLU is one of silu.

    Args:
        order: None: forward takes gate and up. "gate_up" or "up_gate": it takes one tensor, as
            `swiglu_packed` does.
    """


class GeGLU(_Gated):
    """`geglu` as a module without parameters, as nn.GELU is one of gelu.

    Args:
        approximate: As in `geglu`.
        order: As in `SwiGLU`.
    """

    def __init__(self, approximate: str = "none", order: str | None = None) -> None:
        super().__init__(order)
        self.approximate = approximate
        self.activation = _gelu(approximate)

    def extra_repr(self) -> str:
        """As nn.GELU's, and the order."""
        return ", ".join(filter(None, [f"approximate={self.approximate!r}", super().extra_repr()]))


_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}


def _gelu(approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate={approximate!r}: allowed are 'none' and 'tanh'")
    return "gelu" if approximate == "none" else "gelu_tanh"


def _check_order(order: str) -> None:
    if order not in ("gate_up", "up_gate"):
        raise ValueError(
            f"order={order!r}: allowed are 'gate_up' (the gate is the first half) and 'up_gate' (the second)"
        )


@by_rows("gate", "up")
def _of_two(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    check_floating("gate", gate)
    check_like("up", up, gate.shape, "gate", gate)
    if up.dtype != gate.dtype:
        raise ValueError(f"up has dtype {up.dtype}, gate {gate.dtype}: convert one of them with .to(...)")
    if through_triton(gate):
        result: Tensor = _gated(gate, up, activation)
        return result
    return _PLAIN[activation](gate) * up


@by_rows("x")
def _of_one(x: Tensor, order: str, activation: str) -> Tensor:
    check_floating("x", x)
    _check_order(order)
    if x.shape[-1] % 2:
        raise ValueError(f"x has {x.shape[-1]} columns: an even number is needed, half of them the gate's")
    if through_triton(x):
        result: Tensor = _gated_packed(x, activation, order == "gate_up")
        return result
    gate, up = x.chunk(2, dim=-1) if order == "gate_up" else reversed(x.chunk(2, dim=-1))
    return _PLAIN[activation](gate) * up


@torch.library.custom_op("overlapkit::gated", mutates_args=())
def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    from overlapkit.kernels.raw.gated import forward

    return forward(gate, up, activation)


@_gated.register_fake
def _(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@torch.library.custom_op("overlapkit::gated_backward", mutates_args=())
def _gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, need_dgate: bool, need_dup: bool
) -> tuple[Tensor, Tensor]:
    from overlapkit.kernels.raw.gated import backward

    return backward(dy, gate, up, activation, need_dgate, need_dup)


@_gated_backward.register_fake
def _(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, need_dgate: bool, need_dup: bool
) -> tuple[Tensor, Tensor]:
    wanted = ((gate, need_dgate), (up, need_dup))
    dgate, dup = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else x.new_empty(0)
        for x, need in wanted
    )
    return dgate, dup


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    need_dgate, need_dup = ctx.needs_input_grad[:2]
    dgate, dup = _gated_backward(dy, *ctx.saved_tensors, ctx.activation, need_dgate, need_dup)
    return dgate if need_dgate else None, dup if need_dup else None, None


_gated.register_autograd(_differentiate, setup_context=_save)
_gated_backward.register_autograd(no_double_backward("swiglu or geglu"))


@torch.library.custom_op("overlapkit::gated_packed", mutates_args=())
def _gated_packed(x: Tensor, activation: str, gate_first: bool) -> Tensor:
    from overlapkit.kernels.raw.gated import forward_packed

    return forward_packed(x, activation, gate_first)


@_gated_packed.register_fake
def _(x: Tensor, activation: str, gate_first: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.custom_op("overlapkit::gated_packed_backward", mutates_args=())
def _gated_packed_backward(dy: Tensor, x: Tensor, activation: str, gate_first: bool) -> Tensor:
    from overlapkit.kernels.raw.gated import backward_packed

    return backward_packed(dy, x, activation, gate_first)


@_gated_packed_backward.register_fake
def _(dy: Tensor, x: Tensor, activation: str, gate_first: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_packed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.activation, ctx.gate_first = inputs
    ctx.save_for_backward(x)


def _differentiate_packed(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    return _gated_packed_backward(dy, *ctx.saved_tensors, ctx.activation, ctx.gate_first), None, None


_gated_packed.register_autograd(_differentiate_packed, setup_context=_save_packed)
_gated_packed_backward.register_autograd(no_double_backward("swiglu or geglu"))
