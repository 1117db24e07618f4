"""Checks that every kernel's arguments share: they name the argument, its value and the remedy."""

from collections.abc import Callable

import torch
from torch import Tensor

from overlapkit.launch import transformed


def check_floating(name: str, x: Tensor) -> None:
    """Refuse what is not a floating-point tensor of at least one dimension."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}: pass a torch.Tensor")
    if not x.is_floating_point():
        raise ValueError(f"{name} has dtype {x.dtype}: pass a floating-point tensor, e.g. {name}.float()")
    if x.dim() == 0:
        raise ValueError(f"{name} has no dimensions: pass at least one, the last is the row")


def check_like(name: str, tensor: Tensor, shape: tuple[int, ...], of: str, x: Tensor) -> None:
    """Refuse a floating-point tensor whose shape is not `shape` or whose device is not that of `x`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}: pass a torch.Tensor")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} has dtype {tensor.dtype}: pass a floating-point tensor")
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: {of} needs {tuple(shape)}")
    if tensor.device != x.device:
        raise ValueError(
            f"{name} is on {tensor.device}, but {of} is on {x.device}: move one of them with .to(...)"
        )


def check_no_gradient(name: str, tensor: Tensor | None, op: str) -> None:
    """Refuse a tensor that asks for a gradient and would get none."""
    if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, and {op} gives it none: pass {name}.detach()")


def check_number(name: str, value: float) -> None:
    """Refuse what is no Python number: a tensor would be a synchronisation, True a slip."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass a float")


def check_not_negative(name: str, value: float) -> None:
    """Refuse what is no number, and a number below zero or without end."""
    check_number(name, value)
    if not 0.0 <= value < float("inf"):  # math.isfinite ends a graph that has symbolic floats
        raise ValueError(f"{name}={value}: allowed are finite numbers from 0 up")


def check_not_transformed(op: str, instead: str) -> None:
    """Refuse torch.func's transforms and forward mode, for what is an operator on every device."""
    if transformed():
        raise RuntimeError(
            f"{op} cannot be transformed by torch.func or differentiated in forward mode: use {instead}"
        )


def no_double_backward(op: str, instead: str = "") -> Callable[..., None]:
    """The backward of a backward: an error in words, where a wrong gradient would be silent."""
    instead = instead or f"torch's own function, e.g. on float64 tensors, which {op} always hands to torch"

    def refuse(*ctx_and_grads: object) -> None:
        raise RuntimeError(
            f"{op} cannot be differentiated twice: for second derivatives (create_graph=True) use {instead}"
        )

    return refuse
