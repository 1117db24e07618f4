"""Memory for a model that was built on the meta device: loading weights needs it, and making them does."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from overlapkit.device import as_device


def on_meta(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers on the meta device, by every name that they have."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in named if tensor.is_meta}


def materialise(
    module: nn.Module, device: torch.device | str | int | None, *, shards_on_host: bool = False
) -> None:
    """Give every tensor that is on the meta device memory, with no values in it; leave the others alone.

    As `module.to_empty()`, which takes the others' values away and unties what is tied.

    Args:
        module: A module, sharded by FSDP2 or not.
        device: Where to; None is the device of the mesh that a tensor is sharded over, without one the
            current accelerator, else the CPU.
        shards_on_host: Sharded tensors go to the CPU, as FSDP2's offload wants them.

    Raises:
        ValueError: There is no such device.
    """
    place = as_device(device if device is not None else _mesh_device(module))
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner, name, tensor in _members(module):
        if tensor.is_meta:
            tied.setdefault(id(tensor), []).append((owner, name))

    def with_memory(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        return torch.empty_like(tensor, device="cpu" if shards_on_host and _is_sharded(tensor) else place)

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
    sharded: Any = next(filter(_is_sharded, module.parameters()), None)
    return None if sharded is None else str(sharded.device_mesh.device_type)


def _is_sharded(tensor: torch.Tensor) -> bool:
    known = sys.modules.get("torch.distributed.tensor")  # not loaded: nothing can be sharded
    return known is not None and isinstance(tensor, known.DTensor)
