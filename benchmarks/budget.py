"""The seconds that a benchmark may take: rather than overrun, it leaves something out and says so."""

import argparse
import math
import time
import traceback
from collections.abc import Callable

from figure import Figure


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
        self, seconds: float, name: str, unit: str, measure: Callable[[], list[Figure]]
    ) -> list[Figure]:
        """The figures that `measure` returns; one in their place where no time is left, or where it raises.

        Args:
            seconds: That it is thought to take.
            name: Of what is measured.
            unit: Of its figure where no time is left.
            measure: What raises in it is printed, and is a missed goal: later figures must not be lost to it.
        """
        if self.left() < seconds:
            return [Figure(f"{name}: no time left", None, unit)]
        try:
            return measure()
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}".splitlines()[0][:100]
            return [Figure(f"{name}: {said}", 1, "error", better="lower", limit=0)]


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
