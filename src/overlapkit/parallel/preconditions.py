"""The order of things is checked before anything is changed: a model half wrapped is of no use to anyone."""

import sys
from typing import Any

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel


def check_model(model: Any, function: str) -> None:
    """Refuse what cannot be sharded or replicated.

    Raises:
        TypeError: `model` is no nn.Module.
        ValueError: It has no parameters, or is sharded, replicated or compiled already.
        NotImplementedError: Its parameters are on the meta device or tensor-parallel.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: {function} takes a torch.nn.Module")
    if type(model).__name__ == "OptimizedModule":
        raise ValueError(f"model is the result of torch.compile: call {function} first, then compile")
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not loaded: nothing can be sharded yet
    for name, module in model.named_modules():
        where = f"model.{name}" if name else "model"
        if isinstance(module, DistributedDataParallel):
            raise ValueError(f"{where} is wrapped in DistributedDataParallel already: pass the plain model")
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            raise ValueError(f"{where} is sharded already: call {function} once, on the plain model")
    if next(model.parameters(), None) is None:
        raise ValueError("model has no parameters: there is nothing to communicate; leave this call out")
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter)


def check_unbuilt(**options: Any) -> None:
    """Refuse options of the final signature that do nothing yet.

    Raises:
        NotImplementedError: One is set.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}={value!r} is not there yet in this version; leave it out")


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if torch.nn.parameter.is_lazy(parameter):
        raise ValueError(f"parameter {name} has no shape yet: run the lazy modules once before this call")
    if parameter.is_meta:
        raise NotImplementedError(
            f"parameter {name} is on the meta device: initialising there is not there yet in this version; "
            "build the model on a real device"
        )
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is not None and isinstance(parameter, tensor.DTensor):
        raise NotImplementedError(
            f"parameter {name} is a DTensor: tensor-parallel models are not there yet in this version"
        )
