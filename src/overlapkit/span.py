"""What a component publishes about itself: spans of time, host or device, in one clock per device.

A component owns one SpanLog and offers `timings()`, the spans finished since the last call. Nothing
here logs, prints or synchronises: CUDA spans are pairs of events that are resolved by a later query.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work in one lane.

    Attributes:
        lane: One of input, transfer, compute, communication, optimizer, checkpoint.
        name: What was done, e.g. "wait", "copy", "all_gather blocks.3".
        start: Nanoseconds of `time.perf_counter_ns`; device spans are mapped onto it.
        end: Nanoseconds, same clock.
        bytes: Bytes moved, or None where nothing was counted.
        exposed: True where the training step stood still for it (the caller was blocked, or the
            consumer's stream was); False for work that ran beside the step.
    """

    lane: str
    name: str
    start: int
    end: int
    bytes: int | None = None
    exposed: bool = False


@dataclass(slots=True)
class _Pending:
    """A device span whose end event has not been seen to complete."""

    lane: str
    name: str
    start: torch.cuda.Event
    bytes: int | None
    exposed: bool
    end: torch.cuda.Event = field(init=False)


class SpanLog:
    """A bounded, thread-safe list of spans.

    Args:
        history: How many spans are kept while nobody takes them; the oldest are dropped first.
    """

    def __init__(self, history: int = 8192) -> None:
        self._spans: deque[Span] = deque(maxlen=history)
        self._pending: deque[_Pending] = deque(maxlen=history)
        self._anchors: dict[int, tuple[torch.cuda.Event, int]] = {}
        self._lock = threading.Lock()

    def add(self, span: Span) -> None:
        """Record a span that was timed elsewhere."""
        self._spans.append(span)

    @contextmanager
    def host(
        self, lane: str, name: str, *, bytes: int | None = None, exposed: bool = False
    ) -> Iterator[None]:
        """Time the body on the host clock; recorded also when it raises."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self._spans.append(Span(lane, name, start, time.perf_counter_ns(), bytes, exposed))

    @contextmanager
    def stream(
        self,
        lane: str,
        name: str,
        stream: torch.cuda.Stream,
        *,
        bytes: int | None = None,
        exposed: bool = False,
    ) -> Iterator[None]:
        """Time what the body queues on a CUDA stream, by two events on that stream."""
        self._anchor(stream)
        start = torch.cuda.Event(enable_timing=True)
        start.record(stream)
        pending = _Pending(lane, name, start, bytes, exposed)
        try:
            yield
        finally:
            pending.end = torch.cuda.Event(enable_timing=True)
            pending.end.record(stream)
            with self._lock:
                self._pending.append(pending)

    def take(self) -> list[Span]:
        """The spans finished since the last call, by start. Never waits for a device."""
        with self._lock:
            still: list[_Pending] = []
            for pending in self._pending:
                if pending.end.query():
                    self._spans.append(self._resolve(pending))
                else:
                    still.append(pending)
            self._pending.clear()
            self._pending.extend(still)
        taken = [self._spans.popleft() for _ in range(len(self._spans))]
        return sorted(taken, key=lambda span: span.start)

    def _anchor(self, stream: torch.cuda.Stream) -> None:
        """One event per device whose host time is known: it maps the device's clock onto the host's.

        The event is recorded on a fresh stream, where nothing can delay it.
        """
        index = stream.device.index
        with self._lock:
            if index in self._anchors:
                return
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.Stream(stream.device))
            self._anchors[index] = (event, time.perf_counter_ns())

    def _resolve(self, pending: _Pending) -> Span:
        anchor, zero = self._anchors[pending.end.device.index]
        start = zero + round(anchor.elapsed_time(pending.start) * 1e6)
        end = zero + round(anchor.elapsed_time(pending.end) * 1e6)
        return Span(pending.lane, pending.name, start, end, pending.bytes, pending.exposed)
