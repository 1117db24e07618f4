"""Peak memory: the highest point so far, the phase that created it, and the peak within each phase.

The sources are the allocator's peak on a GPU, and VmHWM (the kernel's record of the largest resident set) on
Linux. Both only ever grow, so they are set back after each phase of a step that is looked at closely: what
`torch.cuda.max_memory_allocated` and `ru_maxrss` say then counts from there. Where they cannot be set back,
the phase in which the number last grew still made the peak.
"""

import contextlib
import weakref
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


def reset_peak(device: torch.device) -> bool:
    """Let the record begin again at what is in use now; whether that could be done."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "wb", buffering=0) as file:
        file.write(b"5")  # only this record: nothing of the process's memory is touched
        return True
    return False


_FOLDED = {
    "loss": "forward",
    "recompute": "backward",
    "inside": "between the phases",
    "outside": "between steps",
}
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
    """Follows the peak of this process from construction on; several may, though there is one record.

    Attributes:
        top: Where the highest point came from, once it has grown.
        phases: Bytes at the highest point within each phase, as far as the record could be set back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._latest = self._highest = peak_memory(device)
        self._own = False  # whether what is read next is the next phase's alone
        self._ended = -1  # the step at whose end the record was read last
        self.top: Peak | None = None
        self.phases: dict[str, int] = {}
        self._since = 0  # the highest that any watch has read since this one set the record back
        _watching.add(self)

    def begin(self, step: int) -> None:
        """A step begins that is looked at closely."""
        if self._ended >= step - 1:
            self.look(step, "outside")
        else:
            self._look_back(step - 1)

    def look(self, step: int, phase: str) -> None:
        """Read the peak at the end of a phase."""
        value = self._read(step, phase)
        if self._own and value is not None and phase != "paused":
            name = _FOLDED.get(phase, phase)
            self.phases[name] = max(value, self.phases.get(name, 0))
        self._own = self._reset()

    def after(self, step: int, phase: str | None) -> int | None:
        """The peak at the end of a step, in bytes, as last read."""
        follows = looks_closely(step + 1)
        if looks_closely(step) and phase is not None:
            self.look(step, phase)
            self._own = self._own and follows
            self._ended = step
        elif follows:
            self._look_back(step)
            self._ended = step
        return self._latest

    def _look_back(self, step: int) -> None:
        """What has grown unseen, up to the end of a step, is the doing of no phase."""
        self._read(step, None)
        self._own = self._reset()

    def _read(self, step: int, phase: str | None) -> int | None:
        value = peak_memory(self._device)
        if value is not None:
            for one in list(_watching):  # whoever reads next may find the record set back
                if one._device == self._device:
                    one._since = max(value, one._since)
            value = self._since
            self._latest = max(value, self._latest or 0)
        if value is not None and self._highest is not None and value > self._highest * _NOTABLE:
            self.top = Peak(value, value - self._highest, step, phase)
            self._highest = value
        return value

    def _reset(self) -> bool:
        self._since = 0
        return reset_peak(self._device)


_watching: "weakref.WeakSet[PeakWatch]" = weakref.WeakSet()


def looks_closely(step: int) -> bool:
    """Whether the peak is read at each phase of this step: reading takes 10 to 50 us.

    Peaks are made in the first steps (the optimizer's state, caches) and rarely afterwards.
    """
    return step < 8 or step % 16 == 0
