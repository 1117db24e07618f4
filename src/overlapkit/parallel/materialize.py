"""`materialize`: memory and values for a model that was built on the meta device, sharded by now or not."""

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from overlapkit.meta_device import materialise, on_meta
from overlapkit.parallel.meshes import from_all, must_agree
from overlapkit.parallel.offload import offloaded
from overlapkit.parallel.preconditions import check_holders
from overlapkit.parallel.tensor_parallel import is_split, local_part

M = TypeVar("M", bound=nn.Module)

_UNSET = frozenset({torch.empty, torch.empty_strided, torch.rand, torch.randn})
_POISONED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def materialize(
    model: M,
    init: Callable[[M], object] | None = None,
    *,
    loads: bool = False,
    device: torch.device | str | int | None = None,
) -> M:
    """Give what is on the meta device memory and values, in place; on each rank only its own shards.

    Values are those that one process would get on the same kind of device from the same seed: `init` works
    on whole tensors, one or two at a time, of which each rank keeps its part. So all ranks must be seeded
    alike, which is checked. Nothing is left without a value: memory is filled with NaN first, and what `init`
    has not written is an error. What is not on the meta device keeps its value; without a mesh it is moved to
    the same device.

    Args:
        model: A module, before or after `shard`, whole or in part on the meta device.
        init: Called with the model when it has memory, without gradients; as in
            `lambda model: model.init_weights()`. None: the `reset_parameters()` (or `_reset_parameters()`)
            of each module that had something on the meta device, children first, as constructors do it. A
            tied parameter gets its value from the first module that has it.
        loads: A checkpoint will fill what the model's state_dict has. Only what is not in it, non-persistent
            buffers, must get a value here, and without `init` only modules that have such are reset. The rest
            stays NaN until then, and integers at their lowest.
        device: Where to; None is the device of the mesh, without one the current accelerator, else the CPU.
            Shards that `shard(offload=)` keeps in host memory go there.

    Returns:
        The model.

    Raises:
        TypeError: `model` is no module, or `init` cannot be called.
        ValueError: Nothing is on the meta device; an optimizer has the parameters already; the ranks' random
            generators differ; `init` left something without a value; there is no such device.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: materialize takes a torch.nn.Module")
    if init is not None and not callable(init):
        raise TypeError(f"init={init!r}: give a function of the model, or None for reset_parameters()")
    names = set(on_meta(model))
    if not names:
        raise ValueError("nothing of the model is on the meta device: it has values already; leave this out")
    check_holders(model, "materialize")
    meshes = _meshes(model)
    _check_generators(meshes)
    owners = _owners(model)
    materialise(model, device, shards_on_host=model in offloaded)
    unset = [_Unset.of(name, tensor) for name, tensor in _tensors(model).items() if name in names]
    fresh = [each.tensor for each in unset]
    if not any(map(is_split, fresh)):
        model.to(fresh[0].device)
    if loads:
        saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
        unset = [each for each in unset if id(each.tensor) not in saved]
        needed = {each.name.rpartition(".")[0] for each in unset}
        owners = {module for name, module in model.named_modules(remove_duplicate=False) if name in needed}
    from overlapkit.parallel.whole_values import WholeValues

    with torch.no_grad(), WholeValues(fresh), _classes_at_home(model):
        if init is not None:
            init(model)
        else:
            _reset(model, owners)
    _refuse_unset(model, unset, meshes)
    return model


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Build a model with parameters on the meta device and buffers, with their values, on a real one.

    For models whose buffers no method sets again. Tensors that are made without values of their own, as
    torch's modules make parameters (`torch.empty`, `rand`, `randn`), go to the meta device; what is computed
    (`arange`, `zeros`, `tensor` ...) stays. So does a parameter made from that, which keeps its value.
    """
    with _MetaParameters():
        yield


class _MetaParameters(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _UNSET and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _Unset:
    """A tensor that has memory and no value yet."""

    name: str
    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "_Unset":
        """Fill it with what no initialisation leaves there."""
        local = local_part(tensor)
        with torch.no_grad():
            if local.dtype in _POISONED:
                local.fill_(float("nan"))
            elif not (local.is_floating_point() or local.is_complex() or local.dtype == torch.bool):
                local.fill_(torch.iinfo(local.dtype).min)
        return cls(name, tensor, tensor._version)

    def problem(self, now: torch.Tensor) -> str:
        """What is wrong with the tensor that bears its name now; empty where it has a value."""
        if is_split(self.tensor) and not is_split(now):
            return "was replaced by a whole tensor; init must write into it"
        if now.is_meta:
            return "is on the meta device again"
        local = local_part(now)
        if local.dtype in _POISONED:
            return "was not written, or not all of it (it has NaN)" if bool(local.isnan().any()) else ""
        return "was not written" if now is self.tensor and now._version == self.version else ""


@contextmanager
def _classes_at_home(model: nn.Module) -> Iterator[None]:
    """FSDP2's subclasses say that they are torch's: transformers skips parts of what it takes for foreign."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = {type(module) for module in model.modules() if fsdp and isinstance(module, fsdp.FSDPModule)}
    theirs = {kind: kind.__module__ for kind in kinds}
    try:
        for kind in kinds:
            kind.__module__ = kind.__mro__[2].__module__  # after itself and FSDPModule
        yield
    finally:
        for kind, name in theirs.items():
            kind.__module__ = name


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _meshes(model: nn.Module) -> list[Any]:
    """The meshes that it is sharded over, in the order of its parameters."""
    splits: list[Any] = [parameter for parameter in model.parameters() if is_split(parameter)]
    return list(dict.fromkeys(split.device_mesh for split in splits))


def _check_generators(meshes: list[Any]) -> None:
    for mesh in meshes:
        states = [torch.get_rng_state()]
        if mesh.device_type == "cuda":
            states.append(torch.cuda.get_rng_state())
        digest = hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()
        must_agree(
            mesh, digest, "the state of random generators", "call torch.manual_seed(one for all) first"
        )


def _owners(model: nn.Module) -> set[nn.Module]:
    """The modules to reset: with something of their own on the meta device, or only such modules in them."""
    owners = set()
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        tensors = own or [*module.parameters(), *module.buffers()]
        if (any if own else all)(tensor.is_meta for tensor in tensors) and tensors:
            owners.add(module)
    return owners


def _reset(model: nn.Module, owners: set[nn.Module]) -> None:
    done: set[int] = set()

    def reset(module: nn.Module) -> None:
        method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if module not in owners or method is None:
            return
        own = list(module.parameters(recurse=False))
        tied = [(parameter, parameter.clone()) for parameter in own if id(parameter) in done]
        method()
        for parameter, value in tied:
            parameter.copy_(value)
        done.update(map(id, own))

    model.apply(reset)


def _refuse_unset(model: nn.Module, unset: list[_Unset], meshes: list[Any]) -> None:
    """On all ranks alike: one may hold just the part that was written."""
    now, modules = _tensors(model), dict(model.named_modules())
    problems: dict[str, None] = {}
    for each in unset:
        if each.name in now and (problem := each.problem(now[each.name])):
            owner = type(modules[each.name.rpartition(".")[0]]).__name__
            problems[f"\n    {each.name} ({owner}): {problem}"] = None
    for mesh in meshes:
        problems = dict.fromkeys(problem for part in from_all(mesh, list(problems)) for problem in part)
    if problems:
        raise ValueError(
            "materialize: these have no value after init; give their module a reset_parameters() that sets "
            "them, set them in init=, or build the model within parallel.meta_parameters(), which keeps the "
            "values of buffers:" + "".join(problems)
        )
