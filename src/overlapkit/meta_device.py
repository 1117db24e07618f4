"""Memory for a model that was built on the meta device: loading weights needs it, and making them does."""

import sys
from collections.abc import Iterator

import torch
from torch import nn

from overlapkit.device import as_device


def on_meta(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers on the meta device, by every name that they have."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in named if tensor.is_meta}


def materialise(module: nn.Module, device: torch.device | str | int | None) -> None:
    """Give every tensor that is on the meta device memory, with no values in it; leave the others alone.

    As `module.to_empty()`, which takes the others' values away and unties what is tied.

    Args:
        module: A module, sharded by FSDP2 or not.
        device: Where to; None is the device of the mesh that a tensor is sharded over, without one the
            current accelerator, else the CPU.

    Raises:
        ValueError: There is no such device.
    """
    place = as_device(device if device is not None else _mesh_device(module))
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner, name, tensor in _members(module):
        if tensor.is_meta:
            tied.setdefault(id(tensor), []).append((owner, name))

    def with_memory(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=place) if tensor.is_meta else tensor

    module._apply(with_memory)  # what to_empty() calls, and FSDP2 overrides
    for (first, name), *others in tied.values():
        for owner, alias in others:
            if getattr(owner, alias) is not getattr(first, name):
                setattr(owner, alias, getattr(first, name))


def _members(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield owner, name, parameter
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            yield owner, name, buffer


def _mesh_device(module: nn.Module) -> str | None:
    tensor = sys.modules.get("torch.distributed.tensor")  # not loaded: nothing can be sharded
    for parameter in module.parameters():
        if tensor is not None and isinstance(parameter, tensor.DTensor):
            return str(parameter.device_mesh.device_type)
    return None
