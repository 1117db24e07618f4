"""What a state consists of: named tensors, each with the box that this rank holds, and typed JSON.

Taken inside `save()`: whatever may change later is copied or encoded here, except for the tensors
themselves.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from overlapkit.checkpoint.box import Box, is_dtensor, is_first_replica, local_part
from overlapkit.checkpoint.codec import encode, join, root

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The dtypes that safetensors names, the widest first: in this order every tensor starts aligned."""


@dataclass(slots=True, eq=False)
class Piece:
    """The part of one tensor that this rank writes.

    Attributes:
        name: Path in the state, unique.
        data: The live memory, of shape `box.shape`.
        source: The tensor that it was taken from; a DTensor's own version counter is not its local part's.
        shape: Of the global tensor.
        box: Where `data` lies in it.
        own: True where every rank has a tensor of its own of this name (a loader's state, a loose tensor);
            False where all ranks' pieces make up one tensor.
        late: It changes in `optimizer.step()` only.
        sharded: It is a DTensor.
        alias: The name under which the same memory is written already, or None.
    """

    name: str
    data: torch.Tensor
    source: torch.Tensor
    shape: tuple[int, ...]
    box: Box
    own: bool
    late: bool
    sharded: bool
    alias: str | None = None

    @property
    def version(self) -> tuple[int, int]:
        """Moves when the tensor or, as far as that shows, a DTensor's local part is changed in place."""
        return self.source._version, self.data._version

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return self.data.numel() * self.data.element_size()


@dataclass
class Inventory:
    """A state, taken apart.

    Attributes:
        entries: For each key of the state its kind and its typed JSON, which refers to tensors by name.
        pieces: What this rank writes.
        left_out: (name, dtype, shape) of the replicated tensors that rank 0 writes for this one.
        optimizers: Those whose parameters and state may be copied late.
    """

    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    left_out: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)


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


def plain_name(name: str) -> str:
    """A parameter's name as it is without torch.compile and activation checkpointing around submodules."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


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
    """`optimizer.state_dict()` with parameter names in place of its indices."""
    name_of = [name for name, _ in optimizer_parameters(optimizer, names)]
    found = dict(optimizer.state_dict())
    found["state"] = {name_of[index]: value for index, value in found["state"].items()}
    found["param_groups"] = [
        {**group, "params": [name_of[index] for index in group["params"]]} for group in found["param_groups"]
    ]
    return found


def take_inventory(state: Mapping[str, Any], rank: int, *, stage: str) -> Inventory:
    """Take a state apart.

    Args:
        state: A checked state.
        rank: This process's rank.
        stage: "late" marks what changes in `optimizer.step()` only; "now" marks nothing.

    Raises:
        TypeError: Something in it cannot be kept; the message names its path.
    """
    return _Taking(state, rank, stage == "late").inventory


class _Taking:
    """One walk over a state."""

    def __init__(self, state: Mapping[str, Any], rank: int, late: bool) -> None:
        self.inventory = Inventory()
        self.rank = rank
        self.seen: dict[tuple[Any, ...], str] = {}
        self.modules = {
            key: {plain_name(name): item for name, item in unwrap(value).state_dict().items()}
            for key, value in state.items()
            if isinstance(value, nn.Module)
        }
        names = parameter_names(state)
        optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
        self.hooked = {id(value) for value in optimizers if late and steps_through_hooks(value)}
        self.inventory.optimizers = [value for value in optimizers if id(value) in self.hooked]
        self.stepped = {_address(p) for p in _parameters(self.inventory.optimizers)}
        for key, value in state.items():
            kind = kind_of(value)
            self.inventory.entries[key] = {"kind": kind, "value": self.entry(key, kind, value, names)}

    def entry(self, key: str, kind: str, value: Any, names: Mapping[int, str]) -> Any:
        path = root(key)
        if kind == "module":
            return encode(self.modules[key], path, self.keep_module)
        if kind == "optimizer":
            found = named_optimizer_state(value, names)
            late = id(value) in self.hooked
            moments = encode(
                found.pop("state"), f"{path}/state", self.keep_late if late else self.keep_shared
            )
            return {"state": moments, "rest": encode(found, path, self.keep_shared)}
        if kind == "object":
            return encode(value.state_dict(), path, self.keep_own)
        return encode(value, path, self.keep_own)

    def keep_module(self, path: str, tensor: torch.Tensor) -> str:
        return self.keep(
            path, tensor, own=False, late=bool(self.stepped) and _address(tensor) in self.stepped
        )

    def keep_late(self, path: str, tensor: torch.Tensor) -> str:
        return self.keep(path, tensor, own=False, late=True)

    def keep_shared(self, path: str, tensor: torch.Tensor) -> str:
        return self.keep(path, tensor, own=False, late=False)

    def keep_own(self, path: str, tensor: torch.Tensor) -> str:
        return self.keep(path, tensor, own=not is_dtensor(tensor), late=False)

    def keep(self, path: str, tensor: torch.Tensor, *, own: bool, late: bool) -> str:
        check_tensor(path, tensor)
        shape = tuple(tensor.shape)
        if not own and not is_first_replica(tensor, self.rank):
            if not is_dtensor(tensor):
                self.inventory.left_out.append((path, DTYPES[tensor.dtype], shape))
            return path
        data, box = local_part(tensor, path)
        if data.numel() == 0 and tensor.numel() > 0:
            return path  # an uneven shard leaves this rank nothing
        late = late and not (data.is_inference() or tensor.is_inference())  # those have no version counter
        piece = Piece(path, data, tensor, shape, box, own, late, is_dtensor(tensor))
        if data.numel() and not own:
            same = (data.data_ptr(), data.dtype, data.shape, data.stride(), box)
            first = self.seen.setdefault(same, path)
            piece.alias = first if first != path else None
        self.inventory.pieces.append(piece)
        return path


def steps_through_hooks(optimizer: Optimizer) -> bool:
    """Whether every change it makes to a parameter passes its step pre-hook.

    Not so for steps replayed from a CUDA graph (capturable) and those run inside backward.
    """
    if any(group.get("capturable") for group in optimizer.param_groups):
        return False
    return not any(hasattr(parameter, "_in_backward_optimizers") for parameter in _parameters([optimizer]))


def _parameters(optimizers: list[Optimizer]) -> Iterator[torch.Tensor]:
    groups = itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
    return itertools.chain.from_iterable(group["params"] for group in groups)


def _address(tensor: torch.Tensor) -> int:
    if is_dtensor(tensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    return tensor.untyped_storage().data_ptr()


def check_tensor(path: str, tensor: torch.Tensor) -> None:
    """Raise TypeError or ValueError where a tensor cannot be kept; the message names it."""
    if tensor.device.type == "meta":
        raise ValueError(
            f"state {path!r} is on the meta device and holds no data: call to_empty() and initialise it"
        )
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        raise TypeError(
            f"state {path!r} is a tensor of dtype {tensor.dtype} and layout {tensor.layout}: kept are "
            f"strided ones of {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
        )
    plain = type(tensor) is torch.Tensor or isinstance(tensor, nn.Parameter | nn.Buffer) or is_dtensor(tensor)
    if not plain:
        raise TypeError(
            f"state {path!r} is a {type(tensor).__qualname__}, a tensor subclass: what can be kept is "
            "torch.Tensor, nn.Parameter and DTensor"
        )
