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
    check_count("every", every)
    check_count("history", history)
    if not isinstance(on_report, Sequence) or not all(callable(tell) for tell in on_report):
        raise TypeError(f"on_report={on_report!r}: give a list of callables, each taking a StepReport")
    for name, option in (("trace_every", trace_every), ("hang_timeout", hang_timeout)):
        if option is not None:
            raise NotImplementedError(f"{name}={option!r}: not available yet, leave it None")


def check_count(name: str, value: int, remedy: str = "give an int of at least 1") -> None:
    """It is a number of things, at least one.

    Raises:
        TypeError: It is no int, or a bool.
        ValueError: It is below 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: {remedy}")
    if value < 1:
        raise ValueError(f"{name}={value}: {remedy}")


def check_tokens(tokens: int | None) -> None:
    """They are counted, or unknown.

    Raises:
        TypeError: `tokens` is neither an int nor None.
        ValueError: `tokens` is below 1.
    """
    if tokens is not None:
        check_count(
            "tokens", tokens, "give an int of at least 1 (a tensor would be a synchronisation), or None"
        )


def device_of(model: nn.Module | None, optimizer: Optimizer | None) -> torch.device:
    """Where the training happens: the clock and the memory statistics follow."""
    if model is not None:
        return next(model.parameters()).device
    if optimizer is not None:
        device: torch.device = optimizer.param_groups[0]["params"][0].device
        return device
    return torch.device("cpu")
