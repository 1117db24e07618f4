"""Putting restored values in place: into tensors that are there, or into new ones that are laid out alike."""

from typing import Any

import torch
from torch import nn

from overlapkit.checkpoint.box import is_dtensor, local_part
from overlapkit.checkpoint.catalog import Saved
from overlapkit.checkpoint.outline import reshards

Values = dict[str, torch.Tensor]
"""Host memory that holds the tensors' values, this rank's part of each; valid during a restore only."""

_LONG = 16 << 20  # bytes from which on a copy is made as memcpy does


def loads_plainly(module: nn.Module) -> bool:
    """Whether loading it does no more than to copy its parameters and buffers."""
    before = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    hooks = [*(hook for hook in before if not reshards(hook)), *module._load_state_dict_post_hooks.values()]
    loads = type(module)._load_from_state_dict
    by_torch = loads is nn.Module._load_from_state_dict or isinstance(module, nn.modules.batchnorm._NormBase)
    return by_torch and type(module).load_state_dict is nn.Module.load_state_dict and not hooks


def takes_as_it_is(now: Any, saved: Saved, like: torch.Tensor | None) -> bool:
    """Whether an optimizer state that is there can take a value as it is, laid out as `like`."""
    if not isinstance(now, torch.Tensor) or (tuple(now.shape), now.dtype) != (saved.shape, saved.dtype):
        return False
    if not is_dtensor(now) or not is_dtensor(like):
        return is_dtensor(now) == is_dtensor(like)
    return (now.device_mesh, now.placements) == (like.device_mesh, like.placements)


def copy_in_place(targets: dict[str, torch.Tensor], values: Values) -> None:
    """Copy values into tensors that are there, of the same names, shapes and dtypes."""
    if targets:
        pairs = [(local_part(target, name)[0], values[name]) for name, target in targets.items()]
        long = [pair for pair in pairs if _is_long(*pair)]
        short = [pair for pair in pairs if not _is_long(*pair)]
        with torch.no_grad():
            for target, value in long:
                torch.cat([_flat(value)], out=_flat(target))
            if short:  # one call, without the interpreter
                torch._foreach_copy_([target for target, _ in short], [value for _, value in short])


def _is_long(target: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether memcpy copies it past the caches; see `checkpoint.copying`."""
    plain = type(target) in (torch.Tensor, nn.Parameter) and target.device.type == "cpu"
    laid_out = target.is_contiguous() and not target.is_conj() and not target.is_neg()
    return plain and laid_out and target.dtype == value.dtype and target.nbytes == value.nbytes >= _LONG


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def laid_out_as(
    value: torch.Tensor, like: torch.Tensor | None, layout: torch.Tensor | None = None
) -> torch.Tensor:
    """A copy of a value, as a DTensor where `like` is one; else with the strides of `layout`."""
    if not is_dtensor(like):
        return _copy_laid_out(value, layout, value.device)
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        there = like.to_local()
    local = _copy_laid_out(value, there, there.device)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _copy_laid_out(value: torch.Tensor, layout: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """A copy of a value, with the strides that `zeros_like(layout)` has where their shapes are the same.

    torch's fused optimizers walk a parameter and its moments side by side, as flat memory.
    """
    if layout is None or layout.shape != value.shape:
        return torch.empty(value.shape, dtype=value.dtype, device=device).copy_(value)
    empty = torch.empty_like(
        layout, dtype=value.dtype, device=device, memory_format=torch.preserve_format, requires_grad=False
    )
    return empty.copy_(value)


def put_into(current: Any, restored: Any) -> Any:
    """A restored plain value; a dict keeps its identity, so that whoever holds it sees the new content."""
    if type(current) is dict and type(restored) is dict:
        merged = {key: put_into(current.get(key), item) for key, item in restored.items()}
        current.clear()
        current.update(merged)
        return current
    return restored
