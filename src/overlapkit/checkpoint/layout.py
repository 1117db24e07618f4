"""What a state consists of: named tensors, each with the box that this rank holds, and typed JSON.

Taken inside `save()`: whatever may change later is copied or encoded here, except for the tensors
themselves.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from overlapkit.checkpoint.box import is_dtensor, is_first_replica, local_memory, local_part
from overlapkit.checkpoint.codec import Constant, encode, join, root
from overlapkit.checkpoint.pieces import DTYPES, Inventory, Piece, Slot
from overlapkit.optimizer_step import with_hooks

_WRAPPED = re.compile(r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module)\.")


def kind_of(value: object) -> str:
    """How a top-level value of a state is treated."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return "object"
    return "value"


def check_state(state: object) -> None:
    """Raise TypeError or ValueError unless it is a dict with string keys and something in it."""
    if not isinstance(state, dict):
        raise TypeError(
            f"state is a {type(state).__name__}: give a dict such as dict(model=model, optimizer=opt)"
        )
    if not state:
        raise ValueError("state is an empty dict: give what is to be kept, such as dict(model=model)")
    for key in state:
        if not isinstance(key, str):
            raise TypeError(f"state has the key {key!r}: keys must be strings")


def unwrap(module: nn.Module) -> nn.Module:
    """A module without DistributedDataParallel and torch.compile around it."""
    while True:
        parallel = isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
        inner = module.module if parallel else getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def without_wrappers(state: dict[str, Any]) -> dict[str, Any]:
    """The state with optimizers themselves in place of wrappers without hooks; the same dict without any."""
    inner = {
        key: with_hooks(value, f"state[{key!r}]")
        for key, value in state.items()
        if isinstance(value, Optimizer)
    }
    return state if all(state[key] is value for key, value in inner.items()) else {**state, **inner}


def plain_name(name: str) -> str:
    """A parameter's name as it is without torch.compile and activation checkpointing around submodules."""
    return _WRAPPED.sub("", name)


def parameter_names(state: Mapping[str, Any]) -> dict[int, str]:
    """id(parameter) -> its name, for all parameters of the modules in a state.

    FSDP2 shows the parameters that the optimizer has after `state_dict()` only: call that first.
    """
    names: dict[int, str] = {}
    for key, module in state.items():
        if isinstance(module, nn.Module):
            for name, parameter in unwrap(module).named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), join(root(key), plain_name(name)))
    return names


def optimizer_parameters(optimizer: Optimizer, names: Mapping[int, str]) -> list[tuple[str, torch.Tensor]]:
    """(name, parameter) in the order of `optimizer.state_dict()`'s indices; "#i" where no module has it."""
    unique = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    return [(names.get(key, f"#{i}"), parameter) for i, (key, parameter) in enumerate(unique.items())]


def named_optimizer_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """`optimizer.state_dict()` with parameter names in place of its indices; other keys of its state stay."""
    name_of = [name for name, _ in optimizer_parameters(optimizer, names)]
    found = dict(optimizer.state_dict())
    found["state"] = {
        name_of[index] if type(index) is int else index: value for index, value in found["state"].items()
    }
    found["param_groups"] = [
        {**group, "params": [name_of[index] for index in group["params"]]} for group in found["param_groups"]
    ]
    return found


def take_fixed(state: Mapping[str, Any], rank: int, *, late: bool) -> Inventory:
    """The half of a state that is the same tensors from save to save: modules, and optimizers' states.

    Args:
        state: A checked state.
        rank: This process's rank.
        late: Mark what changes in `optimizer.step()` only.

    Raises:
        TypeError: Something in it cannot be kept; the message names its path.
    """
    walk = _Walk(rank, Inventory())
    found = walk.inventory
    modules = {
        key: {plain_name(name): item for name, item in unwrap(value).state_dict(keep_vars=True).items()}
        for key, value in state.items()
        if isinstance(value, nn.Module)
    }
    names = parameter_names(state)
    optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
    found.optimizers = [value for value in optimizers.values() if late and steps_through_hooks(value)]
    walk.stepped = {_address(p) for p in _parameters(found.optimizers)}
    walk.stepped -= {_address(p) for p in _changed_by_forward(state)}
    hooked = {id(value) for value in found.optimizers}
    for key in state:
        if key in modules:
            found.entries[key] = Constant(encode(modules[key], root(key), walk.keep_module))
        elif key in optimizers:
            keep = walk.keep_late if id(optimizers[key]) in hooked else walk.keep_shared
            named = named_optimizer_state(optimizers[key], names)
            found.entries[key] = Constant(encode(named["state"], f"{root(key)}/state", keep))
            found.groups[key] = [Constant(group["params"]) for group in named["param_groups"]]
    return found


def take_loose(state: Mapping[str, Any], rank: int, fixed: Inventory) -> Inventory:
    """The other half, which is taken anew at every save; its entries are those of the whole state.

    Raises:
        TypeError: Something in it cannot be kept; the message names its path.
    """
    walk = _Walk(rank, fixed)
    for key, value in state.items():
        kind, path = kind_of(value), root(key)
        entry: Any = fixed.entries.get(key)
        if kind == "optimizer":
            rest = _all_but_state(value, fixed.groups[key])
            entry = {"state": entry, "rest": encode(rest, path, walk.keep_shared)}
        elif kind == "object":
            entry = encode(value.state_dict(), path, walk.keep_own)
        elif kind != "module":
            entry = encode(value, path, walk.keep_own)
        walk.inventory.entries[key] = {"kind": kind, "value": entry}
    return walk.inventory


def _all_but_state(optimizer: Optimizer, names: list[Constant]) -> dict[str, Any]:
    """What else there is in an optimizer's state_dict, with the parameters' names in place of its indices."""
    found = {"param_groups": optimizer.param_groups} if is_plain(optimizer) else dict(optimizer.state_dict())
    groups = zip(found["param_groups"], names, strict=True)
    found["param_groups"] = [{**group, "params": named} for group, named in groups]
    found.pop("state", None)
    return found


def is_plain(optimizer: Optimizer) -> bool:
    """Whether its state_dict is made of its `state` and `param_groups` as torch makes it."""
    hooks = optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks
    return type(optimizer).state_dict is Optimizer.state_dict and not hooks


class _Walk:
    """One walk over a state. What memory has a name after `fixed` was taken is found there, or here."""

    def __init__(self, rank: int, fixed: Inventory) -> None:
        self.inventory = Inventory()
        self.rank = rank
        self.stepped: set[int] = set()
        self._fixed = fixed
        self._names: set[str] = set()

    def keep_module(self, path: str, tensor: torch.Tensor) -> str:
        return self.keep(
            path, tensor, own=False, late=bool(self.stepped) and _address(tensor) in self.stepped
        )

    def keep_late(self, path: str, tensor: torch.Tensor) -> str:
        return self.keep(path, tensor, own=False, late=True, moment=True)

    def keep_shared(self, path: str, tensor: torch.Tensor) -> str:
        return self.keep(path, tensor, own=False, late=False)

    def keep_own(self, path: str, tensor: torch.Tensor) -> str:
        return self.keep(path, tensor, own=not is_dtensor(tensor), late=False)

    def keep(self, path: str, tensor: torch.Tensor, *, own: bool, late: bool, moment: bool = False) -> str:
        check_tensor(path, tensor)
        if path in self._names:
            raise ValueError(f"state has {path!r} twice: two keys, such as 1 and '1', read the same as text")
        self._names.add(path)
        shape = tuple(tensor.shape)
        if not own and not is_first_replica(tensor, self.rank):
            if not is_dtensor(tensor):
                self.inventory.left_out.append((path, DTYPES[tensor.dtype], shape))
            return path
        data, box = local_part(tensor, path)
        if data.numel() == 0 and tensor.numel() > 0:
            return path  # an uneven shard leaves this rank nothing
        late = late and not (data.is_inference() or tensor.is_inference())  # those have no version counter
        alias = None
        if data.numel() and not own:
            same = (data.data_ptr(), data.dtype, data.shape, data.stride(), box)
            first = self._fixed.seen.get(same) or self.inventory.seen.setdefault(same, path)
            alias = first if first != path else None
        sharded, device = is_dtensor(tensor), data.device.type
        slot = Slot(path, data.dtype, shape, box, own, late, sharded, device, alias)
        self.inventory.pieces.append(Piece(slot, data, tensor, moment))
        return path


def steps_through_hooks(optimizer: Optimizer) -> bool:
    """Whether every change it makes to a parameter passes its step pre-hook.

    Not so for steps replayed from a CUDA graph (capturable) and those run inside backward.
    """
    if any(group.get("capturable") for group in optimizer.param_groups):
        return False
    return not any(hasattr(parameter, "_in_backward_optimizers") for parameter in _parameters([optimizer]))


def _changed_by_forward(state: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The parameters that forward changes: embeddings that are scaled down to `max_norm`."""
    for item in state.values():
        for module in item.modules() if isinstance(item, nn.Module) else ():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
                yield module.weight


def _parameters(optimizers: list[Optimizer]) -> Iterator[torch.Tensor]:
    groups = itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
    return itertools.chain.from_iterable(group["params"] for group in groups)


def _address(tensor: torch.Tensor) -> int:
    return local_memory(tensor).untyped_storage().data_ptr()


def check_tensor(path: str, tensor: torch.Tensor) -> None:
    """Raise TypeError or ValueError where a tensor cannot be kept; the message names it."""
    if nn.parameter.is_lazy(tensor):
        raise ValueError(f"state {path!r} has no shape yet: run a batch through its lazy module first")
    if tensor.device.type == "meta":
        raise ValueError(
            f"state {path!r} is on the meta device and holds no data: call to_empty() and initialise it"
        )
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        raise TypeError(
            f"state {path!r} is a tensor of dtype {tensor.dtype} and layout {tensor.layout}: kept are "
            f"strided ones of {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
        )
    plain = type(tensor) is torch.Tensor or is_dtensor(tensor) or isinstance(tensor, nn.Parameter | nn.Buffer)
    if not plain:
        raise TypeError(
            f"state {path!r} is a {type(tensor).__qualname__}, a tensor subclass: what can be kept is "
            "torch.Tensor, nn.Parameter and DTensor"
        )
