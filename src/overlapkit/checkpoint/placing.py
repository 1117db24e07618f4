"""Putting restored values in place: into tensors that are there, or into new ones that are laid out alike."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from overlapkit.checkpoint.box import is_dtensor, local_memory
from overlapkit.checkpoint.catalog import Saved
from overlapkit.checkpoint.copying import flat_bytes
from overlapkit.checkpoint.outline import reshards
from overlapkit.checkpoint.turns import take_turns
from overlapkit.lane import Lane

Values = dict[str, torch.Tensor]
"""Host memory that holds the tensors' values, this rank's part of each; valid during a restore only."""

_LONG = 16 << 20  # bytes from which on a copy is made as memcpy does
_TOGETHER = 64  # shorter tensors that are copied by one call


def loads_plainly(module: nn.Module) -> bool:
    """Whether loading it does no more than to copy its parameters and buffers.

    FSDP2's hooks see to parameters that were replaced, and none is.
    """
    before = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    hooks = [hook for hook in (*before, *module._load_state_dict_post_hooks.values()) if not reshards(hook)]
    loads = type(module)._load_from_state_dict
    by_torch = loads is nn.Module._load_from_state_dict or isinstance(module, nn.modules.batchnorm._NormBase)
    return by_torch and type(module).load_state_dict is nn.Module.load_state_dict and not hooks


def load(module: nn.Module, values: dict[str, Any], plainly: bool, extras: Collection[str]) -> None:
    """Have a module take values that its state_dict makes up: copies, extra state.

    What a state_dict hook leaves out, a module that loads plainly does without, too.

    Raises:
        RuntimeError: It does not take them back.
    """
    if not plainly:
        module.load_state_dict(values)
        return
    left = module.load_state_dict(values, strict=False)
    lost = [name for name in left.unexpected_keys if left.missing_keys or name in extras]
    if lost:
        raise RuntimeError(
            f"{type(module).__name__}.load_state_dict does not take back what its state_dict gives: {lost}"
        )


def refusal(target: torch.Tensor) -> str | None:
    """Why nothing can be copied into a tensor, in words; None where something can."""
    if nn.parameter.is_lazy(target):
        return "has no shape yet: run a batch through its lazy module first"
    if target.is_meta:
        return "is on the meta device and has no memory yet: call to_empty(), or parallel.materialize()"
    strides = target.stride()
    if 0 in strides and any(stride == 0 and n > 1 for stride, n in zip(strides, target.shape, strict=True)):
        return "was expanded, and has one memory for many elements: clone() it"
    return None


def keep_dtypes(optimizer: Optimizer, saved: Mapping[torch.Tensor, dict[str, Any]]) -> None:
    """Give an optimizer's state the dtypes that were saved.

    torch has cast all of it to the parameters' (pytorch#43706), and spoilt what is text. An optimizer that
    loads in a way of its own has seen to that itself.
    """
    hooks = optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks
    if type(optimizer).load_state_dict is Optimizer.load_state_dict and not hooks:
        for parameter, moments in saved.items():
            optimizer.state[parameter] = _as_saved(optimizer.state[parameter], moments)


def _as_saved(loaded: Any, saved: Any) -> Any:
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return loaded | {key: _as_saved(loaded[key], item) for key, item in saved.items() if key in loaded}
    if type(loaded) is type(saved) and type(saved) in (list, tuple):
        return type(saved)(map(_as_saved, loaded, saved))
    return saved if type(loaded) is type(saved) else loaded


def takes_as_it_is(now: Any, saved: Saved, like: torch.Tensor | None) -> bool:
    """Whether an optimizer state that is there can take a value as it is, laid out as `like`."""
    if not isinstance(now, torch.Tensor) or (tuple(now.shape), now.dtype) != (saved.shape, saved.dtype):
        return False
    if not is_dtensor(now) or not is_dtensor(like):
        return is_dtensor(now) == is_dtensor(like)
    return (now.device_mesh, now.placements) == (like.device_mesh, like.placements)


def copy_in_place(targets: dict[str, torch.Tensor], values: Values, helper: Lane) -> None:
    """Copy values into tensors that are there, of the same names, shapes and dtypes.

    Args:
        targets: Where to.
        values: What.
        helper: A thread that copies half of what is short, where no order matters.
    """
    short: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for name, target in targets.items():
            local, value = local_memory(target), values[name]
            flat = flat_bytes(local) if _is_long(local, value) else None
            if flat is not None:  # by memcpy, past the caches: see `checkpoint.copying`
                torch.cat([value.view(-1).view(torch.uint8)], out=flat)
            else:
                short.append((local, value))
    places = {local.untyped_storage().data_ptr() for local, _ in short if local.device.type == "cpu"}
    apart = len(places) == len(short)  # else the last of those that share memory is to win
    each = _TOGETHER if apart else max(1, len(short))
    jobs = [short[at : at + each] for at in range(0, len(short), each)]
    take_turns([partial(_copy, job, torch.is_inference_mode_enabled()) for job in jobs], helper)


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]], inference: bool) -> None:
    """Copy short tensors in one call, without the interpreter. A thread has modes of its own."""
    with torch.inference_mode(inference), torch.no_grad():
        torch._foreach_copy_([local for local, _ in pairs], [value for _, value in pairs])


def _is_long(target: torch.Tensor, value: torch.Tensor) -> bool:
    plain = type(target) in (torch.Tensor, nn.Parameter)
    return plain and target.dtype == value.dtype and target.nbytes == value.nbytes >= _LONG


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
