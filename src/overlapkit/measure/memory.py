"""Peak memory, and the phase that created it, without resetting anybody's statistics.

Both sources only ever grow: the allocator's peak on a GPU, VmHWM (the kernel's record of the largest
resident set) on Linux. So the phase in which the number last grew (by 1 %) made the peak.
"""

import contextlib
from dataclasses import dataclass

import torch


def peak_memory(device: torch.device) -> int | None:
    """Bytes at the highest point of this process so far, or None where the system keeps no record."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status", "rb", buffering=0) as file:
        status = file.read(4096)
        start = status.index(b"VmHWM:") + len(b"VmHWM:")
        return int(status[start : status.index(b"kB", start)]) * 1024
    return None


_NOTABLE = 1.01  # a resident set creeps up all the time: who made its last page says nothing


@dataclass(frozen=True, slots=True)
class Peak:
    """Where the peak came from.

    Attributes:
        bytes: The peak, to 1 %.
        growth: By how much it exceeds what had been reached before.
        step: Index of the step.
        phase: forward, loss, backward, optimizer, inside (the step, between these), outside (between two
            steps) or paused; None where it was somewhere in the up to 16 steps before the end of `step`.
    """

    bytes: int
    growth: int
    step: int
    phase: str | None


class PeakWatch:
    """Follows the peak of this process from construction on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._latest = self._highest = peak_memory(device)
        self.top: Peak | None = None

    def look(self, step: int, phase: str) -> None:
        """Read the peak at the end of a phase."""
        self._read(step, phase)

    def after(self, step: int, phase: str | None) -> int | None:
        """The peak at the end of a step, in bytes, as last read."""
        if looks_closely(step):
            self._read(step, phase)
        elif looks_closely(step + 1):  # what has grown unseen is not the doing of the next step's phases
            self._read(step, None)
        return self._latest

    def _read(self, step: int, phase: str | None) -> None:
        self._latest = value = peak_memory(self._device)
        if value is not None and self._highest is not None and value > self._highest * _NOTABLE:
            self.top = Peak(value, value - self._highest, step, phase)
            self._highest = value


def looks_closely(step: int) -> bool:
    """Whether the peak is read at each phase of this step: reading takes 10 to 50 us.

    Peaks are made in the first steps (the optimizer's state, caches) and rarely afterwards.
    """
    return step < 8 or step % 16 == 0
