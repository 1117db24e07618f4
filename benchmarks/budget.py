"""The seconds that a benchmark may take: rather than overrun, it leaves something out and says so."""

import argparse
import math
import time

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

    def refuses(self, seconds: float, name: str, unit: str) -> list[Figure]:
        """A figure that says so where what takes so many seconds does not fit any more; else none."""
        if self.left() >= seconds:
            return []
        return [Figure(f"{name}: no time left", None, unit)]


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
