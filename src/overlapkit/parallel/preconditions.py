"""The order of things is checked before anything is changed: a model half wrapped is of no use to anyone."""

import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from overlapkit.parallel.tensor_parallel import is_split


def check_model(model: Any, function: str) -> None:
    """Refuse what cannot be sharded or replicated.

    Raises:
        TypeError: `model` is no nn.Module.
        ValueError: It has no parameters, or is sharded, replicated or compiled already; for `replicate` also
            where parameters are on the meta device or split over ranks.
    """
    check_order(model, function)
    if next(model.parameters(), None) is None:
        raise ValueError("model has no parameters: there is nothing to communicate; leave this call out")
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter, whole=function == "replicate")


def check_order(model: Any, function: str) -> None:
    """Refuse a model to which a later step was applied: recompute -> compile blocks -> shard or replicate.

    Raises:
        TypeError: `model` is no nn.Module.
        ValueError: It is sharded, replicated, or compiled as a whole.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: {function} takes a torch.nn.Module")
    if is_compiled(model):
        raise ValueError(f"model is compiled as a whole already: call {function} first, then compile")
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not loaded: nothing can be sharded yet
    for name, module in model.named_modules():
        where = f"model.{name}" if name else "model"
        if isinstance(module, DistributedDataParallel):
            raise ValueError(f"{where} is wrapped in DistributedDataParallel already: pass the plain model")
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            raise ValueError(f"{where} is sharded already: call {function} once, on the plain model")


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` made it, or `module.compile()` was called."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def check_holders(model: nn.Module, function: str) -> None:
    """Refuse a model whose parameters are in an optimizer or a DDP module: new ones will take their place.

    Looks through what the garbage collector tracks, once: about 0.1 s for half a million objects.

    Raises:
        ValueError: There is one.
    """
    mine = set(map(id, model.parameters()))
    if next(_holders(mine), None) is None:
        return
    gc.collect()  # one that was dropped may be waiting for this
    for holder in _holders(mine):
        raise ValueError(
            f"the model's parameters are in a {type(holder).__name__} already, and {function} replaces them: "
            + (
                f"pass the plain model to {function}, before DistributedDataParallel has it"
                if isinstance(holder, DistributedDataParallel)
                else f"call {function} first, then make the optimizer from model.parameters(). In a notebook "
                "make the model anew, too, where its cell is run again"
            )
        )


def _holders(parameters: set[int]) -> Iterator[Any]:
    """The live optimizers and DDP modules that hold one of these parameters."""
    objects = gc.get_objects()
    wanted = (torch.optim.Optimizer, DistributedDataParallel)
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, wanted)}
    for each in objects:
        if type(each) not in kinds:
            continue
        if isinstance(each, DistributedDataParallel):
            held = each.parameters()
        else:
            groups = vars(each).get("param_groups", ())
            held = (parameter for group in groups for parameter in group["params"])
        if not parameters.isdisjoint(map(id, held)):
            yield each


def _check_parameter(name: str, parameter: nn.Parameter, whole: bool) -> None:
    if torch.nn.parameter.is_lazy(parameter):
        raise ValueError(f"parameter {name} has no shape yet: run the lazy modules once before this call")
    if whole and parameter.is_meta:
        raise ValueError(
            f"parameter {name} is on the meta device: replicate copies whole models; call "
            "parallel.materialize(model) first"
        )
    if whole and is_split(parameter):
        raise ValueError(
            f"parameter {name} is a DTensor: replicate copies whole models, and this one is sharded or "
            "tensor-parallel; use shard(model, mesh['dp'])"
        )
