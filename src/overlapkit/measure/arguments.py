"""What StepMeter accepts: a mistake is one error at construction, before any step has run."""

import math
from collections.abc import Iterable, Sequence
from os import PathLike

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


def check_options(every: int, history: int, hang_timeout: object, on_hang: object) -> None:
    """Each option is in range.

    Raises:
        TypeError: An option is of the wrong type.
        ValueError: A number or name is out of range.
    """
    check_count("every", every)
    check_count("history", history)
    if hang_timeout is not None:
        if isinstance(hang_timeout, bool) or not isinstance(hang_timeout, int | float):
            raise TypeError(f"hang_timeout={hang_timeout!r}: give seconds, such as 300, or None")
        if not (math.isfinite(hang_timeout) and hang_timeout > 0):
            raise ValueError(f"hang_timeout={hang_timeout}: give seconds above 0, such as 300, or None")
    if not callable(on_hang) and on_hang not in ("exit", "wait"):
        raise ValueError(f"on_hang={on_hang!r}: give 'exit', 'wait', or a callable that takes a HangReport")
    if hang_timeout is None and on_hang != "exit":
        raise ValueError(f"on_hang={on_hang!r} without hang_timeout: set hang_timeout=300, say")


def check_speed(**numbers: float | None) -> None:
    """What utilisation is counted with.

    Raises:
        TypeError: One is no number.
        ValueError: One is not above 0, or not finite.
    """
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise TypeError(f"{name}={value!r}: give a number above 0, such as 989e12, or None")
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name}={value}: give a number above 0, such as 989e12, or None")


def check_live(on_report: object, on_log: object, progress: object) -> None:
    """What is told while training goes on.

    Raises:
        TypeError: A listener is no callable, or `progress` neither a bool nor a ProgressLine.
    """
    for name, given, taking in (
        ("on_report", on_report, "a StepReport"),
        ("on_log", on_log, "a step's number and a dict of its values"),
    ):
        if not isinstance(given, Sequence) or not all(callable(tell) for tell in given):
            raise TypeError(f"{name}={given!r}: give a list of callables, each taking {taking}")
    if not isinstance(progress, bool) and not hasattr(progress, "step"):
        raise TypeError(f"progress={progress!r}: give a bool or an overlapkit.measure.ProgressLine")


def check_tracing(trace_every: int | None, trace_folder: object) -> None:
    """Which steps are traced.

    Raises:
        TypeError: `trace_every` is no int, or `trace_folder` no path.
        ValueError: `trace_every` is below 2, or there is a folder and nothing to keep there.
    """
    if trace_every is not None:
        check_count("trace_every", trace_every, remedy := "give an int of at least 2, such as 1000, or None")
        if trace_every == 1:
            raise ValueError(f"trace_every=1: a step that is traced is not measured; {remedy}")
    if trace_folder is not None and not isinstance(trace_folder, str | PathLike):
        raise TypeError(f"trace_folder={trace_folder!r}: give the name of a folder, or None")
    if trace_folder is not None and trace_every is None:
        raise ValueError(f"trace_folder={str(trace_folder)!r} without trace_every: set trace_every=1000, say")


def check_count(
    name: str, value: object, remedy: str = "give an int of at least 1", *, least: int = 1
) -> None:
    """It is a number of things, at least `least`.

    Raises:
        TypeError: It is no int, or a bool.
        ValueError: It is below `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: {remedy}")
    if value < least:
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
    groups = [] if optimizer is None else optimizer.param_groups
    devices = (parameter.device for group in groups for parameter in group["params"])
    return next(devices, torch.device("cpu"))
