"""Collecting what components publish, and knowing which lanes that covers.

A component offers `timings() -> list[Span]`, the spans finished since the last call: it hands each one
out once. Two meters on one component share what comes.
"""

import threading
import weakref
from collections import deque

import torch
from torch import nn

from overlapkit.span import Span


def publishes(component: object) -> bool:
    """Whether it speaks the protocol."""
    timings = getattr(component, "timings", None)
    return callable(timings) and not isinstance(timings, nn.Module)


class Tap:
    """One meter's share of what a component publishes.

    Args:
        component: Has `timings()`.
        argument: The meter's name for it, used in errors.

    Raises:
        TypeError: Its `timings()` returns something else than spans.
    """

    def __init__(self, component: object, argument: str) -> None:
        self._component = component
        self._queue: deque[Span] = deque(maxlen=8192)
        self._readers, self._lock = _readers_of(component)
        spans = component.timings()  # type: ignore[attr-defined]  # what was before this meter is not its own
        if not isinstance(spans, list) or not all(isinstance(span, Span) for span in spans):
            raise TypeError(
                f"{argument}: {type(component).__qualname__}.timings() must return a list of "
                f"overlapkit.span.Span, got {type(spans).__name__}"
            )
        for reader in self._readers:
            reader._queue.extend(spans)
        self._readers.add(self)

    def take(self) -> list[Span]:
        """The spans finished since the last call."""
        with self._lock:
            self._pull()
            mine = list(self._queue)
            self._queue.clear()
        return mine

    def peek(self) -> list[Span]:
        """The spans finished since anybody's last call; they stay for those that take."""
        with self._lock:
            return self._pull()

    def _pull(self) -> list[Span]:
        spans: list[Span] = self._component.timings()  # type: ignore[attr-defined]
        if spans:
            for reader in self._readers:
                reader._queue.extend(spans)
        return spans

    def close(self) -> None:
        """Leave what comes to the others."""
        self._readers.discard(self)


_Readers = tuple["weakref.WeakSet[Tap]", threading.Lock]
_shared: "weakref.WeakKeyDictionary[object, _Readers]" = weakref.WeakKeyDictionary()


def _readers_of(component: object) -> _Readers:
    try:
        return _shared.setdefault(component, (weakref.WeakSet(), threading.Lock()))
    except TypeError:  # no weak references or no hash: such a component has one meter
        return weakref.WeakSet(), threading.Lock()


class Coverage:
    """Which lanes a meter can measure, and why not the others.

    Args:
        parts: The meter's model, optimizer, loader and checkpointer, by these names, None where absent.
        world: Number of ranks.
    """

    def __init__(self, parts: dict[str, object | None], world: int) -> None:
        self.device = torch.device("cpu")
        self.world = world
        # `value and ...` would ask a loader for its length, which it may not have.
        self.names = {
            part: None if value is None else type(value).__qualname__ for part, value in parts.items()
        }
        self.ours = {part for part, value in parts.items() if _is_ours(value)}
        self.taps = {
            part: Tap(value, part) for part, value in parts.items() if value is not None and publishes(value)
        }
        self._done: set[str] = set()
        self._waited: set[str] = set()
        self._known: dict[tuple[bool, torch.device, int, int], frozenset[str]] = {}

    def note(self, spans: list[Span]) -> None:
        """Remember which lanes publish what they did, and which of them what the step waited for."""
        self._waited.update(span.lane for span in spans if span.exposed)
        self._done.update(span.lane for span in spans if not span.exposed)

    def missing(self, lane: str, *, fed: bool = False) -> str | None:
        """Why the time that steps wait for a lane is unknown; None where it is known.

        Args:
            lane: input, transfer, communication, checkpoint, compute or optimizer.
            fed: The meter drew the batches itself (`steps()`).
        """
        if lane in ("input", "transfer"):
            reason = self._loader_missing(lane, fed)
        elif lane == "communication":
            reason = self._communication_missing()
        elif lane == "checkpoint":
            reason = self._untapped("checkpointer")
        else:
            part = "model" if lane == "compute" else "optimizer"
            return None if self.names[part] else f"no {part} was given to StepMeter"
        on_stream = self.device.type != "cpu" and lane in ("transfer", "communication")
        if reason is None and on_stream and lane in self._done and lane not in self._waited:
            return "only the work itself is published, not what the device waited for"
        return reason

    def known(self, *, fed: bool) -> frozenset[str]:
        """The lanes of which `missing` has nothing to say. Asked for at every step, so kept."""
        key = fed, self.device, len(self._done), len(self._waited)
        if key not in self._known:
            lanes = ("input", "transfer", "communication", "checkpoint", "compute", "optimizer")
            self._known[key] = frozenset(lane for lane in lanes if not self.missing(lane, fed=fed))
        return self._known[key]

    def close(self) -> None:
        """Take no more from the components."""
        for tap in self.taps.values():
            tap.close()

    def _untapped(self, part: str) -> str | None:
        if part in self.taps:
            return None
        if self.names[part] is None:
            return f"no {part} was given to StepMeter"
        return f"{self.names[part]} publishes no timings"

    def _loader_missing(self, lane: str, fed: bool) -> str | None:
        if lane == "input" and fed:
            return None
        if lane == "transfer" and self.device.type == "cpu" and not self._waited & {"transfer"}:
            return "tensors stay on the CPU: nothing is copied to a device"
        reason = self._untapped("loader")
        if reason is None or lane == "transfer":
            return reason
        return f"{reason}: loop over meter.steps(loader), or use overlapkit.DeviceLoader"

    def _communication_missing(self) -> str | None:
        if "model" in self.taps:
            return None
        if self.world == 1:
            return "single process"
        if self.names["model"] is None:
            return "no model was given to StepMeter"
        return (
            f"foreign wrapper: {self.names['model']} publishes no timings; "
            "wrap with overlapkit.shard or overlapkit.replicate"
        )


def _is_ours(part: object | None) -> bool:
    return type(part).__module__.startswith("overlapkit.")
