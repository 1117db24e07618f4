"""Outline: whether a state still holds the very tensors that it was taken apart into, asked at every save.

What is compared is identity, by dict and list comparisons that run in C and stop at the same object:
some 30 ns a tensor, where taking the state apart costs 20 us.
"""

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from overlapkit.checkpoint.layout import is_plain, steps_through_hooks, unwrap
from overlapkit.checkpoint.pieces import Piece

_FSDP2 = "torch.distributed.fsdp._fully_shard"
_RENAMES = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_LEAVES = (torch.Tensor, int, float, str, type(None))

_data_ptr, _stride, _size = torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.size
_local = operator.attrgetter("_local_tensor")


class Outline:
    """What of a state's modules and optimizers must stay the same for its pieces to be used again.

    It sees parameters, buffers, submodules and optimizer states that came, went or were replaced, and other
    parameter groups; and of what is not copied late, or is tied, memory that was replaced (`buffer.data =
    other`). It looks for new state_dict hooks on whole modules only. It holds tensors, and modules and
    optimizers weakly.

    Args:
        state: A state.
        pieces: What was taken from its modules and optimizers' states.
        gone: Called when one of the modules and optimizers is no more.
    """

    def __init__(self, state: Mapping[str, Any], pieces: Sequence[Piece], gone: Callable[[], None]) -> None:
        held = _held(state)
        self._held = [(key, weakref.ref(item, lambda _: gone())) for key, item in held]
        modules = [module for _, item in held if isinstance(item, nn.Module) for module in item.modules()]
        self._optimizers = [_OptimizerOutline(item) for _, item in held if isinstance(item, Optimizer)]
        self.reusable = all(map(_is_plain_module, modules)) and all(o.reusable for o in self._optimizers)
        self._dicts = [found for module in modules for found in _contents(module)]
        for _, item in held:  # of a whole module, or of an FSDP2 one
            if isinstance(item, nn.Module):
                self._dicts += [item._state_dict_hooks, item._state_dict_pre_hooks]
        self._copies = [found.copy() for found in self._dicts]
        self._reshard = [
            (hook, weakref.ref(module))
            for module in modules
            for hook in module._state_dict_pre_hooks.values()
        ]
        tied = {piece.slot.alias for piece in pieces} - {None}  # late or not: they must stay so
        looked_at = [p for p in pieces if not p.slot.late or p.slot.alias is not None or p.slot.name in tied]
        self._plain = [piece.source for piece in looked_at if not piece.slot.sharded]
        self._places = _places(self._plain)
        self._sharded = [piece.source for piece in looked_at if piece.slot.sharded]
        self._locals = list(map(_local, self._sharded))

    @property
    def optimizer_states(self) -> list[int]:
        """How many parameters had a state, for each optimizer."""
        return [len(outline.copies) for outline in self._optimizers]

    def same(self, state: Mapping[str, Any]) -> bool:
        """Whether the pieces are still the state's. Reshards what FSDP2 gathered, as `state_dict` does."""
        held = _held(state)
        if not self.reusable or len(held) != len(self._held):
            return False
        if any(key != k or item is not ref() for (key, item), (k, ref) in zip(held, self._held, strict=True)):
            return False
        for hook, module in self._reshard:
            hook(module(), "", False)
        optimizers = [item for _, item in held if isinstance(item, Optimizer)]
        return (
            _identical(self._dicts, self._copies)
            and all(map(_OptimizerOutline.same, self._optimizers, optimizers))
            and _places(self._plain) == self._places
            and _identical(list(map(_local, self._sharded)), self._locals)
        )


class _OptimizerOutline:
    """The same for one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._parameters = list(optimizer.state)
        self.copies = [dict(values) if type(values) is dict else None for values in optimizer.state.values()]
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._hooked = steps_through_hooks(optimizer)
        self.reusable = is_plain(optimizer) and all(
            values is not None and all(isinstance(value, _LEAVES) for value in values.values())
            for values in self.copies
        )

    def same(self, optimizer: Optimizer) -> bool:
        groups = optimizer.param_groups
        return (
            len(optimizer.state) == len(self.copies)
            and is_plain(optimizer)
            and not (self._hooked and any(map(_passes_no_hook, groups)))
            and _identical([group["params"] for group in groups], self._groups)
            and _identical(list(optimizer.state), self._parameters)
            and _identical(list(optimizer.state.values()), self.copies)
        )


def _places(tensors: list[torch.Tensor]) -> list[Any]:
    """Where tensors' memory is, and how they lie in it."""
    return [*map(_data_ptr, tensors), *map(_stride, tensors), *map(_size, tensors)]


def _passes_no_hook(group: dict[str, Any]) -> bool:
    """`steps_through_hooks`, of a group's first parameter only: torch puts whole groups into backward."""
    return group.get("capturable") or any(hasattr(p, "_in_backward_optimizers") for p in group["params"][:1])


class _Compared(TorchFunctionMode):
    """Comparing containers looks into two tensors only where they are not the same object."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _NotTheSame


class _NotTheSame(Exception):
    pass


def _identical(found: list[Any], known: list[Any]) -> bool:
    """Whether two lists, or lists of containers, hold the same tensors."""
    with _Compared():
        try:
            return found == known
        except Exception:  # of a comparison that was never meant to be made: something was replaced
            return False


def _held(state: Mapping[str, Any]) -> list[tuple[str, nn.Module | Optimizer]]:
    return [
        (key, unwrap(item) if isinstance(item, nn.Module) else item)
        for key, item in state.items()
        if isinstance(item, nn.Module | Optimizer)
    ]


def _contents(module: nn.Module) -> tuple[Any, ...]:
    """What `module.state_dict()` looks at."""
    return (
        module._parameters,
        module._buffers,
        module._modules,
    )


def _is_plain_module(module: nn.Module) -> bool:
    """Whether its share of a state_dict is its parameters and buffers, under names that stay."""
    kind = type(module)
    written_anew = ("state_dict", "_save_to_state_dict", "get_extra_state")
    return (
        all(getattr(kind, name) is getattr(nn.Module, name) for name in written_anew)
        and "state_dict" not in module.__dict__
        and all(map(reshards, module._state_dict_pre_hooks.values()))
        and all(getattr(hook, "__module__", "") == _RENAMES for hook in module._state_dict_hooks.values())
    )


def reshards(hook: Any) -> bool:
    """Whether a state_dict hook is FSDP2's, which makes a module show its sharded parameters."""
    return str(getattr(hook, "__module__", "")).startswith(_FSDP2)
