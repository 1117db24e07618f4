"""Where a step's phases turn: public hooks on the root module, on its outputs, on the optimizer."""

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import Node

_WATCHED_OUTPUTS = 4  # a model may return hundreds of tensors; its loss and logits come first


class Hook:
    """Calls a bound method for as long as its owner lives and is wanted.

    A copy or a pickle of the hooked module (an EMA copy, torch.save(model)) gets a hook that does
    nothing, and a module compiled in place is traced without it.
    """

    def __init__(self, method: Any | None) -> None:
        self._owner = None if method is None else weakref.ref(method.__self__)
        self._function: Any = None if method is None else method.__func__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pass on what torch passes, and what the method returns."""
        if self._owner is None or torch.compiler.is_compiling():
            return None
        owner = self._owner()  # a WeakMethod would cost as much as all else here
        return None if owner is None else self._function(owner, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)


def differentiable(output: object) -> list[Tensor]:
    """The first few tensors in a module's output that gradients can reach."""
    found: list[Tensor] = []
    for tensor in _tensors(output, depth=3):
        if tensor.grad_fn is not None:
            found.append(tensor)
            if len(found) == _WATCHED_OUTPUTS:
                break
    return found


def nodes(tensors: list[Tensor]) -> list[Node]:
    """Where backward enters the graph that made these tensors."""
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]


def _tensors(output: object, depth: int) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif depth:
        if isinstance(output, Mapping):
            output = list(output.values())
        elif dataclasses.is_dataclass(output):
            output = list(vars(output).values())
        if isinstance(output, (list, tuple)):
            for part in output:
                yield from _tensors(part, depth - 1)
