"""The classes that swapped modules of other libraries get: their own class with another forward.

Such a class is made for each class it is derived from, as FSDP2 makes one, and holds no more than the forward
and how the module's attributes are called. So isinstance, parameters, hooks and a name like FusedLlamaRMSNorm
say what a module is, and nothing on the instance has to be undone.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from overlapkit.kernels.gated import geglu, geglu_packed, swiglu, swiglu_packed
from overlapkit.kernels.layer_norm import layer_norm
from overlapkit.kernels.rms_norm import rms_norm


class Norm(NamedTuple):
    """An RMSNorm or a LayerNorm over the last dimension, whose weight, if any, is `weight`.

    Attributes:
        eps: Name of the attribute that holds eps.
        offset: Added to the weight.
        centred: It is a LayerNorm.
        bias: It has a bias, called `bias`.
        promotes: The result has the wider dtype of x and weight (as Llama's), else that of x (as Gemma's).
    """

    eps: str
    offset: float = 0.0
    centred: bool = False
    bias: bool = False
    promotes: bool = False

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """What the module's forward is then."""
        weight: Any = getattr(module, "weight", None)
        eps = getattr(module, self.eps)
        if self.centred:
            y = layer_norm(x, weight, module.bias if self.bias else None, eps)  # type: ignore[arg-type]
        else:
            y = rms_norm(x, weight, eps, offset=self.offset)
        wide = self.promotes and weight is not None
        out: Tensor = y.to(torch.promote_types(x.dtype, weight.dtype) if wide else x.dtype)
        return out


class Gated(NamedTuple):
    """A gated feed-forward layer, down(activation(gate(x)) * up(x)).

    Attributes:
        gate: Name of the child that makes the gate, or both in one tensor.
        up: Name of the child that makes the other factor; None where it is in the same tensor.
        down: Name of the child that takes the product.
        activation: "silu", "gelu" or "gelu_tanh".
        order: Of a packed tensor, as in `swiglu_packed`.
    """

    gate: str
    up: str | None
    down: str
    activation: str
    order: str = "gate_up"

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """What the module's forward is then."""
        gate = getattr(module, self.gate)(x)
        approximate = "tanh" if self.activation == "gelu_tanh" else "none"
        if self.up is not None:
            up = getattr(module, self.up)(x)
            y = swiglu(gate, up) if self.activation == "silu" else geglu(gate, up, approximate)
        elif self.activation == "silu":
            y = swiglu_packed(gate, self.order)
        else:
            y = geglu_packed(gate, self.order, approximate)
        out: Tensor = getattr(module, self.down)(y)
        return out


class Fused(nn.Module):
    """The first base of every class made here."""

    _former: type[nn.Module]
    _fused: Norm | Gated

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Take the one argument that the former forward takes, by whatever name."""
        given = (*args, *kwargs.values())
        if len(given) != 1:
            raise TypeError(f"{type(self).__name__} got {len(given)} arguments: pass one tensor (..., D)")
        return self._fused(self, given[0])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the former class would, with a constructor that finds this class again."""
        _, _, *state = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        return (_blank, (self._former, self._fused), *state)


_made: dict[tuple[type[nn.Module], Norm | Gated], type[Fused]] = {}


def fused(former: type[nn.Module], how: Norm | Gated) -> type[Fused]:
    """The subclass of `former` that runs `how`; always the same one."""
    if (former, how) not in _made:
        names = {"_former": former, "_fused": how, "__doc__": former.__doc__}
        _made[former, how] = type(f"Fused{former.__name__}", (Fused, former), names)
    return _made[former, how]


def _blank(former: type[nn.Module], how: Norm | Gated) -> nn.Module:
    kind = fused(former, how)
    return kind.__new__(kind)
