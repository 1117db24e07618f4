"""What one step cost, and how its time is shared out among the lanes.

The period of step k runs from the end of step k-1 to its own end, so that waiting for the next batch
and saving after the step belong to it; pauses are cut out. Every nanosecond of it is given to exactly
one part, so the parts add up to the period.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from overlapkit.measure.intervals import Interval, Intervals, intersect, length, subtract, union
from overlapkit.span import Span

WAITS = ("transfer", "communication", "checkpoint", "input")
"""Lanes that a step waits for, in the order in which overlapping waits are attributed.

The device's own waits come first: a host wait beside one of them costs nothing more. Of the host's, a
batch that is late because a save held the training thread is the save's doing.
"""

PHASES = ("forward", "loss", "backward", "optimizer")
"""Phases of a step in which the model or the optimizer works; the rest of a step is other time."""


class Segment(NamedTuple):
    """One phase of a step, in nanoseconds.

    Attributes:
        kind: forward, loss, backward, optimizer, inside (the step, between these), outside (between the
            previous step's end and this step's begin) or paused.
        start: On the clock that counts: the device's where there is one.
        end: Same clock.
        host_start: When the host came by.
        host_end: Same clock.
    """

    kind: str
    start: int
    end: int
    host_start: int
    host_end: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One measured step. Times are nanoseconds; what was not measured is None, never 0.

    Invariants:
        * forward + backward + optimizer + transfer + communication + checkpoint + input + other = period,
          None counted as nothing: time of an unmeasured part is in `other`.

    Attributes:
        index: Number of the step, from 0; steps that `every` skips are counted too.
        period: From the end of the previous step to the end of this one, without pauses.
        forward: The model's forward and, where the model does not return it, the loss; waits excluded.
        backward: From the first gradient that reaches the model's output to the optimizer (or the next
            forward, or the step's end), so with what is done to gradients in between; waits excluded.
        optimizer: Inside the optimizer's step(); waits excluded.
        transfer: Standing still for a copy to the device.
        communication: Standing still for a collective.
        checkpoint: Standing still for a save.
        input: Standing still for a batch.
        other: The rest: host work between the phases, logging, scheduling, zeroing.
        outside: The part of `other` that lies between two steps.
        lane_bytes: Bytes that each lane finished moving in this period, exposed or not, where counted.
        peak_memory: Bytes at the highest point so far: allocated on the GPU, or resident on Linux.
        tokens: As given to `step()`, on this rank.
    """

    index: int
    period: int
    forward: int | None
    backward: int | None
    optimizer: int | None
    transfer: int | None
    communication: int | None
    checkpoint: int | None
    input: int | None
    other: int
    outside: int
    lane_bytes: Mapping[str, int]
    peak_memory: int | None
    tokens: int | None

    @property
    def compute(self) -> int | None:
        """Forward and backward, or None where neither was seen."""
        seen = [part for part in (self.forward, self.backward) if part is not None]
        return sum(seen) if seen else None

    @property
    def exposed(self) -> int | None:
        """Time that the step stood still for a lane: transfer, communication, checkpoint and input."""
        seen = [part for lane in WAITS if (part := getattr(self, lane)) is not None]
        return sum(seen) if seen else None

    @property
    def exposed_share(self) -> float | None:
        """`exposed` as a share of the period, 0 to 1."""
        return None if self.exposed is None or not self.period else self.exposed / self.period

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of this rank per second."""
        return None if self.tokens is None or not self.period else self.tokens * 1e9 / self.period


class Shares(NamedTuple):
    """How a period was shared out.

    Attributes:
        parts: Nanoseconds of "period", of each of WAITS and PHASES, of "other" and of its part "outside".
        waits: When each of WAITS was waited for, as far as it was attributed to that lane.
    """

    parts: dict[str, int]
    waits: dict[str, Intervals]


def share_out(segments: Sequence[Segment], spans: Iterable[Span], *, on_device: bool) -> Shares:
    """Give every nanosecond of a period to one part.

    Args:
        segments: The period, gapless and in order.
        spans: Spans of all lanes, of this period or beyond; only exposed ones of WAITS count.
        on_device: Segments were timed by a device, so a host wait costs only what is left of it when
            the device has come to it.
    """
    asked: dict[str, list[Interval]] = {lane: [] for lane in WAITS}
    for span in spans:
        if span.exposed and span.lane in asked:
            if on_device and not span.device:
                asked[span.lane].extend(_felt_by_device(span, segments))
            else:
                asked[span.lane].append((span.start, span.end))
    left = union((part.start, part.end) for part in segments if part.kind != "paused")
    parts = {"period": length(left)}
    waits: dict[str, Intervals] = {}
    for lane in WAITS:
        waits[lane] = intersect(left, union(asked[lane])) if asked[lane] else []
        left = subtract(left, waits[lane]) if waits[lane] else left
        parts[lane] = length(waits[lane])
    kinds = _by_kind(segments, left)
    parts.update((kind, kinds.get(kind, 0)) for kind in (*PHASES, "outside"))
    parts["other"] = parts["outside"] + kinds.get("inside", 0)
    return Shares(parts, waits)


def _by_kind(segments: Sequence[Segment], left: Intervals) -> dict[str, int]:
    """How much of what is left lies in segments of each kind; one pass over both."""
    kinds: dict[str, int] = {}
    i = 0
    for kind, begin, close, *_ in segments:
        while i < len(left):
            start, end = left[i]
            overlap = min(end, close) - max(start, begin)
            if overlap > 0:
                kinds[kind] = kinds.get(kind, 0) + overlap
            if end > close:
                break
            i += 1
    return kinds


def _felt_by_device(span: Span, segments: Sequence[Segment]) -> list[Interval]:
    """The part of a host wait in which the device had run out of work.

    The device enters a segment when it has done everything that was queued before it. What the host
    waits inside a segment is felt from there on, and not while the device is still in an earlier one.
    """
    felt: list[Interval] = []
    for segment in segments:
        start = max(span.start, segment.host_start, segment.start)
        end = min(span.end, segment.host_end, segment.end)
        if start < end:
            felt.append((start, end))
    return felt
