"""The seconds that a benchmark may take: rather than overrun, it leaves something out and says so."""

import argparse
import gc
import math
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from figure import Figure, short

AGAIN_S = 5.0
"""After which what goes on nevertheless is told again: an error in a callback is lost."""


class Budget:
    """What is left of so many seconds from now on.

    Args:
        seconds: None for no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        """Seconds; negative after the end, infinite without a limit."""
        return self._end - time.monotonic()

    def attempt(
        self,
        seconds: float,
        name: str,
        measure: Callable[[], list[Figure]],
        *,
        at_most: float = math.inf,
    ) -> list[Figure]:
        """The figures that `measure` returns; one in their place where no time is left, or where it raises.

        That one is a missed goal: what was not measured has met none. Figures are printed as they come: a
        log has them even where the process dies later. What the GPU still caches is given back afterwards.

        Args:
            seconds: That it is thought to take.
            name: Of what is measured.
            measure: What raises in it is printed: later figures must not be lost to it. Nor must earlier ones
                to one that takes longer: at the end of the budget TimeoutError is raised in it.
            at_most: Seconds after which that is raised in any case: what is stuck takes the time of others.
        """
        if self.left() < seconds:
            return [not_measured(f"{name}: no time left", "left out")]
        try:
            with Budget(min(self.left(), at_most)).ended():
                figures = measure()
        except Exception as error:
            traceback.print_exc()
            figures = [not_measured(f"{name}: {said(error)}", "error")]
        for figure in figures:
            print(f"{figure.name}: {short(figure.value, figure.unit)}", flush=True)
        _free()
        return figures

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Raise TimeoutError in the body when the time is up; only the main thread can be told."""
        if (left := self.left()) == math.inf:
            yield
            return
        before = signal.signal(signal.SIGALRM, _time_is_up)
        signal.setitimer(signal.ITIMER_REAL, max(left, 0.001), AGAIN_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def not_measured(name: str, what: str) -> Figure:
    """In place of figures that were to be measured and were not: a goal that is missed."""
    return Figure(name, 1, what, better="lower", limit=0)


def said(error: Exception) -> str:
    """An error in one short line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:100]


def _free() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # of a device that is broken: what was measured on it has said so
            torch.cuda.empty_cache()


def _time_is_up(signum: int, frame: object) -> None:
    raise TimeoutError("the time is up")


def add_budget(options: argparse.ArgumentParser) -> None:
    """Add `--budget SECONDS`."""
    options.add_argument(
        "--budget",
        type=_seconds,
        metavar="SECONDS",
        help="do less rather than take longer (default: no limit)",
    )


def _seconds(text: str) -> float:
    if not 0 < (seconds := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give a number of seconds above 0")
    return seconds
