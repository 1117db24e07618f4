"""Logged values: what a loop would read with `.item()`, handed over once it is there, without a wait."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlapkit.lane import Lane, Ticket

Tell = Callable[[int, Mapping[str, float]], object]
"""Called with the number of the step and its values by name."""

_HELD = 4096  # calls of log() on their way; a device that is so far behind is waited for


class _Coming(NamedTuple):
    """Values that a device was asked for.

    Attributes:
        names: Of them, in order.
        device: Where they are copied from; it must live until the copy is done.
        host: Where they will be.
        copied: Of the copy.
    """

    names: list[str]
    device: Tensor
    host: Tensor
    copied: Ticket[object]


class _Entry:
    """One call of log().

    Attributes:
        step: Number of the step.
        values: By name; NaN stands for what is still on its way.
        coming: That, one for each device.
    """

    __slots__ = ("coming", "step", "values")

    def __init__(self, step: int) -> None:
        self.step = step
        self.values: dict[str, float] = {}
        self.coming: list[_Coming] = []

    def here(self) -> bool:
        return all(one.copied.done() for one in self.coming)

    def read(self) -> dict[str, float]:
        for one in self.coming:
            if not one.copied.done() or one.copied.error is not None:
                one.copied.wait()
            self.values.update(zip(one.names, one.host.tolist(), strict=True))
        return self.values


class Logged:
    """Values on their way from the device to whoever wants to hear of them.

    Invariants:
        * A value is what the tensor held when it was logged, whatever is written into it later.
        * Calls are delivered in their order, each once; `close()` delivers what is left.
        * Only `close()` waits for a device (and `log()`, 4096 undelivered calls behind).

    Args:
        tell: Called with each step's number and values, in the thread that trains.

    Attributes:
        latest: The newest value of each name that has arrived.
    """

    def __init__(self, tell: Tell) -> None:
        self.latest: dict[str, float] = {}
        self._tell = tell
        self._entries: deque[_Entry] = deque()
        self._lanes: dict[torch.device, Lane] = {}
        self._lock = threading.RLock()
        self._telling = False

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Take values of a step: tensors of one element, on any device, or numbers.

        Raises:
            TypeError: A value is neither, or is a DTensor that no rank holds whole.
            ValueError: A tensor has another number of elements than one.
            RuntimeError: A CUDA graph is being captured.
        """
        entry = _Entry(step)
        on_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, value in values.items():
            value = _plain(name, value)
            if isinstance(value, Tensor):
                on_device.setdefault(value.device, {})[name] = value
                value = float("nan")
            entry.values[name] = value  # in the order of the call
        for device, tensors in on_device.items():
            entry.coming.append(self._fetch(device, tensors))
        self._entries.append(entry)
        if len(self._entries) > _HELD:
            self._deliver(keep=_HELD)

    def deliver(self) -> None:
        """Hand over what has arrived. Never waits."""
        if self._entries:
            self._deliver(keep=None)

    def close(self) -> None:
        """Wait for what is still on its way, and hand it over."""
        self._deliver(keep=0)

    def _deliver(self, keep: int | None) -> None:
        """What has arrived; where `keep` says so, wait until no more than so many calls are left."""
        if not self._lock.acquire(blocking=keep is not None):
            return  # another thread does it
        try:
            if self._telling:
                return  # who is told has called us: what is left comes after this
            self._telling = True
            try:
                while self._entries and (
                    self._entries[0].here() or (keep is not None and len(self._entries) > keep)
                ):
                    entry = self._entries.popleft()
                    values = entry.read()
                    self.latest.update(values)
                    self._tell(entry.step, values)
            finally:
                self._telling = False
        finally:
            self._lock.release()

    def _fetch(self, device: torch.device, values: Mapping[str, Tensor]) -> _Coming:
        """Copy beside the step: behind a checkpoint's copies the same one would hold up the step's stream."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "log() while a CUDA graph is captured: log the graph's output after its replay"
            )
        lane = self._lanes.get(device)
        if lane is None:
            lane = self._lanes[device] = Lane("log", device)
        now = torch.stack([value.detach().reshape(()).to(torch.float64) for value in values.values()])
        host = torch.empty(len(values), dtype=now.dtype, pin_memory=True)
        return _Coming(list(values), now, host, lane.submit(partial(host.copy_, now, non_blocking=True)))


def _plain(name: str, value: Any) -> float | Tensor:
    """A number, or a tensor of one element on a CUDA device."""
    if not isinstance(value, Tensor):
        if not isinstance(value, Real):
            raise TypeError(f"{name}={value!r:.80}: log a number, or a tensor of one element")
        return float(value)
    if (
        placements := getattr(value, "placements", None)
    ) is not None:  # a DTensor; its module is not imported for other tensors
        if any(placement.is_partial() or placement.is_shard() for placement in placements):
            raise TypeError(
                f"{name} is a DTensor with placements {tuple(placements)}: log {name}.full_tensor(), "
                "which reduces it on all ranks (a collective: every rank must call it)"
            )
        value = value.to_local()  # type: ignore[attr-defined]
    if value.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: log one number, such as {name}.mean()")
    if value.is_complex() or value.device.type == "meta":
        raise TypeError(f"{name} is a tensor of {value.dtype} on {value.device}: log a real number")
    return value if value.device.type == "cuda" else float(value.item())
