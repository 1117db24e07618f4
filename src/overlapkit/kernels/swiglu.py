"""SwiGLU: the gated activation of Llama-like feed-forward layers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlapkit.kernels.arguments import check_floating, check_like, no_double_backward
from overlapkit.kernels.sharded import by_rows
from overlapkit.launch import through_triton


@by_rows("gate", "up")
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (Shazeer, 2020).

    Two halves of one projection are read where they lie: `swiglu(*h.chunk(2, -1))` copies nothing.

    Args:
        gate: (..., D), floating point, any strides.
        up: Shape, dtype and device of gate.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: Shapes, devices or dtypes do not fit.
        RuntimeError: A second derivative was asked for, on a GPU.
    """
    check_floating("gate", gate)
    check_like("up", up, gate.shape, "gate", gate)
    if up.dtype != gate.dtype:
        raise ValueError(f"up has dtype {up.dtype}, gate {gate.dtype}: convert one of them with .to(...)")
    if through_triton(gate):
        result: Tensor = _swiglu(gate, up)
        return result
    return F.silu(gate) * up


class SwiGLU(nn.Module):
    """`swiglu` as a module without parameters, as nn.SiLU is one of silu."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up, for tensors (..., D)."""
        return swiglu(gate, up)


@torch.library.custom_op("overlapkit::swiglu", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    from overlapkit.kernels.raw.swiglu import forward

    return forward(gate, up)


@_swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@torch.library.custom_op("overlapkit::swiglu_backward", mutates_args=())
def _swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    from overlapkit.kernels.raw.swiglu import backward

    return backward(dy, gate, up)


@_swiglu_backward.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    return dgate, torch.empty_like(up, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = _swiglu_backward(dy, *ctx.saved_tensors)
    return dgate, dup


_swiglu.register_autograd(_differentiate, setup_context=_save)
_swiglu_backward.register_autograd(no_double_backward("swiglu"))
