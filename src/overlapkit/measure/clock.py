"""The clock that a step's phases are read from: the host's, or the device's by pooled events.

A mark is taken when a phase turns and timed later; timing it never waits for the device.
"""

import time
from typing import Any, Protocol

import torch

from overlapkit.span import DeviceClock, Mark


class Clock(Protocol):
    """What the meter asks of a clock. Times are nanoseconds of `time.perf_counter_ns`."""

    on_device: bool
    """Whether a mark is passed later than it is taken: by the device, once it has come so far."""

    def now(self) -> int:
        """The host's time."""

    def mark(self, now: int) -> Any:
        """Mark this point of the step; `now` is the host's time of it."""

    def time(self, mark: Any) -> int | None:
        """When the mark was passed, or None where it has not been yet."""

    def release(self, mark: Any) -> None:
        """The mark will not be asked for again."""


class HostClock:
    """Phases on the host: where tensors live on the CPU, work is done when the call returns."""

    on_device = False

    def now(self) -> int:
        """The host's time."""
        return time.perf_counter_ns()

    def mark(self, now: int) -> int:
        """The mark is the time itself."""
        return now

    def time(self, mark: int) -> int:
        """Known at once."""
        return mark

    def release(self, mark: int) -> None:
        """Nothing was borrowed."""


class StreamClock:
    """Phases on a CUDA device, as its current stream passes them."""

    on_device = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = DeviceClock(device)

    def now(self) -> int:
        """The host's time."""
        return time.perf_counter_ns()

    def mark(self, now: int) -> Mark:
        """Record a pooled event on the caller's current stream."""
        return self._clock.mark(torch.cuda.current_stream(self._device))

    def time(self, mark: Mark) -> int | None:
        """When the stream passed the mark, or None."""
        return self._clock.time(mark)

    def release(self, mark: Mark) -> None:
        """Put the event back into the pool."""
        self._clock.release(mark)


def clock_of(device: torch.device) -> Clock:
    """The clock for a model on `device`."""
    return StreamClock(device) if device.type == "cuda" else HostClock()
