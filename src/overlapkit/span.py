"""What a component publishes about itself: spans of time, host or device, in one clock per device.

A component owns one SpanLog and offers `timings()`, the spans finished since the last call. Nothing
here logs, prints or synchronises: CUDA spans are pairs of events that are resolved by a later query.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")


class Span(NamedTuple):
    """One stretch of work in one lane.

    Attributes:
        lane: One of input, transfer, compute, communication, optimizer, checkpoint.
        name: What was done, e.g. "wait", "copy", "all_gather blocks.3".
        start: Nanoseconds of `time.perf_counter_ns`; device spans are mapped onto it.
        end: Nanoseconds, same clock.
        bytes: Bytes moved, or None where nothing was counted.
        exposed: True where the training step stood still for it (the caller was blocked, or the
            consumer's stream was); False for work that ran beside the step.
        device: True where a device's stream was timed, False where the host was. A host that waits
            while its device still has work queued holds nothing up.
        ready: Of a collective, when this rank had all that it gives to it (same clock as `start`, which may
            be later: when the collective began to run); None where it is not known or means nothing.
        parameters: Of a collective, the names of the parameters that it gathers or reduces.
        group: Of a collective, the name of its process group where not all ranks of the job take part.
    """

    lane: str
    name: str
    start: int
    end: int
    bytes: int | None = None
    exposed: bool = False
    device: bool = False
    ready: int | None = None
    parameters: tuple[str, ...] = ()
    group: str = ""


_START = itemgetter(Span._fields.index("start"))


@dataclass(slots=True)
class Mark:
    """A point on a CUDA stream, and the event of known host time that it will be timed against."""

    event: torch.cuda.Event
    anchor: torch.cuda.Event
    zero: int


class DeviceClock:
    """Times the points of one device's streams on `perf_counter_ns`, without waiting for the device.

    Two events are compared in float32 milliseconds, and the device's clock drifts: so the anchor, an
    event whose host time is known, is renewed every second, and the error stays near a microsecond
    however long the run.
    """

    def __init__(self, device: torch.device) -> None:
        self._quiet = torch.cuda.Stream(device)  # nothing else is queued there, so nothing delays an anchor
        self._anchor: tuple[torch.cuda.Event, int] | None = None  # one value: other threads mark too
        self._free: list[torch.cuda.Event] = []

    def mark(self, stream: torch.cuda.Stream) -> Mark:
        """Mark the point that `stream` has been given work up to."""
        anchor = self._anchor
        if anchor is None or time.perf_counter_ns() - anchor[1] > 1_000_000_000:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._quiet)
            self._anchor = anchor = event, time.perf_counter_ns()
        mark = Mark(self._take_event(), *anchor)
        mark.event.record(stream)
        return mark

    def time(self, mark: Mark) -> int | None:
        """When the stream passed the mark, or None where it has not yet. Never waits."""
        if not (mark.event.query() and mark.anchor.query()):
            return None
        since_ms: float = mark.anchor.elapsed_time(mark.event)
        return mark.zero + round(since_ms * 1e6)

    def release(self, mark: Mark) -> None:
        """Let a mark that has been timed be reused: it must not be timed again."""
        self._free.append(mark.event)

    def _take_event(self) -> torch.cuda.Event:
        try:
            return self._free.pop()
        except IndexError:
            return torch.cuda.Event(enable_timing=True)


@dataclass(slots=True)
class _Pending:
    """A device span whose end has not been seen to be passed."""

    lane: str
    name: str
    clock: DeviceClock
    start: Mark
    bytes: int | None
    exposed: bool
    ready: Mark | None
    parameters: tuple[str, ...]
    group: str
    end: Mark = field(init=False)

    def resolve(self) -> Span | None:
        marks = [mark for mark in (self.end, self.start, self.ready) if mark is not None]
        times = [self.clock.time(mark) for mark in marks]
        if None in times:
            return None
        for mark in marks:
            self.clock.release(mark)
        end, start, *ready = (at for at in times if at is not None)
        span = Span(self.lane, self.name, start, end, self.bytes, self.exposed, device=True)
        at = ready[0] if ready else None
        return span._replace(ready=at, parameters=self.parameters, group=self.group)


class _HostSpan:
    """Times a body. Written out, for it stands in every batch's way: a generator costs four times as much."""

    __slots__ = ("_bytes", "_exposed", "_lane", "_name", "_spans", "_start")

    def __init__(self, spans: deque[Span], lane: str, name: str, bytes: int | None, exposed: bool) -> None:
        self._spans = spans
        self._lane = lane
        self._name = name
        self._bytes = bytes
        self._exposed = exposed

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        end = time.perf_counter_ns()
        self._spans.append(Span(self._lane, self._name, self._start, end, self._bytes, self._exposed))


class SpanLog:
    """A bounded, thread-safe list of spans.

    Invariant:
        * No lock is held, ever: the garbage collector may run in any of this, and what it collects may wait
          for a thread that is in here, too.

    Args:
        history: How many spans are kept while nobody takes them; the oldest are dropped first.
    """

    def __init__(self, history: int = 8192) -> None:
        self._spans: deque[Span] = deque(maxlen=history)
        self._pending: deque[_Pending] = deque(maxlen=history)
        self._clocks: dict[int, DeviceClock] = {}

    def add(self, span: Span) -> None:
        """Record a span that was timed elsewhere."""
        self._spans.append(span)

    def host(
        self, lane: str, name: str, *, bytes: int | None = None, exposed: bool = False
    ) -> AbstractContextManager[None]:
        """Time the body on the host clock; recorded also when it raises."""
        return _HostSpan(self._spans, lane, name, bytes, exposed)

    @contextmanager
    def stream(
        self,
        lane: str,
        name: str,
        stream: torch.cuda.Stream,
        *,
        bytes: int | None = None,
        exposed: bool = False,
        ready: Mark | None = None,
        parameters: tuple[str, ...] = (),
        group: str = "",
    ) -> Iterator[None]:
        """Time what the body queues on a CUDA stream, by two events on that stream.

        A mark given as `ready` belongs to this span alone.
        """
        clock = self._clock(stream)
        pending = _Pending(lane, name, clock, clock.mark(stream), bytes, exposed, ready, parameters, group)
        try:
            yield
        finally:
            pending.end = clock.mark(stream)
            self._pending.append(pending)

    def mark(self, stream: torch.cuda.Stream) -> Mark:
        """Mark what `stream` has been given so far, for one `stream(ready=)` or `between`."""
        return self._clock(stream).mark(stream)

    def between(
        self,
        lane: str,
        name: str,
        stream: torch.cuda.Stream,
        ends: tuple[Mark, Mark],
        *,
        bytes: int | None = None,
        exposed: bool = False,
        parameters: tuple[str, ...] = (),
        group: str = "",
    ) -> None:
        """Record what lies between two marks of the stream's device; nothing where the first is passed last.

        So a wait lies between a mark of the stream that waits and one of the stream that is waited for.
        """
        start, end = ends
        pending = _Pending(lane, name, self._clock(stream), start, bytes, exposed, None, parameters, group)
        pending.end = end
        self._pending.append(pending)

    def take(self) -> list[Span]:
        """The spans finished since the last call, by start. Never waits for a device."""
        taken, still = [], []
        for pending in _drained(self._pending):
            span = pending.resolve()
            if span is None:
                still.append(pending)
            elif span.end >= span.start:
                taken.append(span)
        self._pending.extend(still)
        taken += _drained(self._spans)
        taken.sort(key=_START)
        return taken

    def _clock(self, stream: torch.cuda.Stream) -> DeviceClock:
        index = stream.device.index
        if (clock := self._clocks.get(index)) is None:
            clock = self._clocks.setdefault(index, DeviceClock(stream.device))
        return clock


def _drained(queue: deque[T]) -> list[T]:
    """What is in it now, each item handed to one caller alone, while others append and drain."""
    taken = []
    with suppress(IndexError):
        for _ in range(len(queue)):
            taken.append(queue.popleft())
    return taken
