"""Counters of ports at two moments: what matters is how fast they rise, not how far since boot."""

import time
from collections.abc import Callable

from overlapkit.doctor.layers import ports
from overlapkit.doctor.machine import Machine


class Watch:
    """Remembers the counters, and compares.

    Attributes:
        first: The counters when it began; None before.
        passed: Seconds between the two readings.

    Args:
        machine: Whose.
        clock: Seconds.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        machine: Machine,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._machine, self._clock, self._sleep = machine, clock, sleep
        self.first: dict[tuple[str, str], int] | None = None
        self.passed = 0.0
        self._began = 0.0

    def begin(self) -> None:
        """Read them for the first time."""
        self._began = self._clock()
        self.first = ports.counters(self._machine)

    def rates(self, seconds: float) -> dict[tuple[str, str], float]:
        """How many a second, of those that rose, over `seconds` at least since it began."""
        assert self.first is not None, "begin() comes first"
        left = self._began + seconds - self._clock()
        if self.first and left > 0:
            self._sleep(left)
        now = ports.counters(self._machine)
        self.passed = self._clock() - self._began
        rises = {key: value - self.first.get(key, value) for key, value in now.items()}
        return {key: rise / self.passed for key, rise in rises.items() if rise > 0 and self.passed > 0}
