"""What StepMeter accepts: a mistake is one error at construction, before any step has run."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from overlapkit.measure.sources import publishes


def check_parts(model: object, optimizer: object, loader: object, checkpointer: object) -> None:
    """Each part is what it should be.

    Raises:
        TypeError: A part is something else.
        ValueError: The model has no parameters.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: give a torch.nn.Module, or None")
    if model is not None and next(model.parameters(), None) is None:
        raise ValueError(f"model={type(model).__name__} has no parameters: give the module that is trained")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer={type(optimizer).__name__}: give a torch.optim.Optimizer, or None")
    if loader is not None and not publishes(loader) and not isinstance(loader, Iterable):
        raise TypeError(f"loader={type(loader).__name__}: give an iterable of batches, or None")
    if checkpointer is not None and not publishes(checkpointer):
        raise TypeError(
            f"checkpointer={type(checkpointer).__name__} has no timings(): give an overlapkit.Checkpointer, "
            "or None"
        )


def check_options(
    every: int, history: int, on_report: object, trace_every: int | None, hang_timeout: float | None
) -> None:
    """Each option is in range and available.

    Raises:
        TypeError: An option is of the wrong type.
        ValueError: A number is out of range.
        NotImplementedError: An option is not available yet.
    """
    for name, value in (("every", every), ("history", history)):
        if not isinstance(value, int):
            raise TypeError(f"{name}={value!r}: give an int")
        if value < 1:
            raise ValueError(f"{name}={value}: give at least 1")
    if not isinstance(on_report, Sequence) or not all(callable(tell) for tell in on_report):
        raise TypeError(f"on_report={on_report!r}: give a list of callables, each taking a StepReport")
    for name, option in (("trace_every", trace_every), ("hang_timeout", hang_timeout)):
        if option is not None:
            raise NotImplementedError(f"{name}={option!r}: not available yet, leave it None")


def device_of(model: nn.Module | None, optimizer: Optimizer | None) -> torch.device:
    """Where the training happens: the clock and the memory statistics follow."""
    if model is not None:
        return next(model.parameters()).device
    if optimizer is not None:
        device: torch.device = optimizer.param_groups[0]["params"][0].device
        return device
    return torch.device("cpu")
