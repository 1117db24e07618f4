"""What one step cost, and how its time is shared out among the lanes.

The period of step k runs from the end of step k-1 to its own end, so that waiting for the next batch
and saving after the step belong to it; pauses are cut out. Every nanosecond of it is given to exactly
one part, so the parts add up to the period.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from overlapkit.measure.intervals import Interval, Intervals, cut, length, union
from overlapkit.span import Span

WAITS = ("transfer", "communication", "checkpoint", "input")
"""Lanes that a step waits for, in the order in which overlapping waits are attributed.

The device's own waits come first: a host wait beside one of them costs nothing more. Of the host's, a
batch that is late because a save held the training thread is the save's doing.
"""

PHASES = ("forward", "loss", "backward", "recompute", "optimizer")
"""Phases of a step in which the model or the optimizer works; the rest of a step is other time."""


STOPS = (*WAITS, "compilation", "garbage")
"""What a step stands still for: the lanes, and after them torch.compile and Python's garbage collector."""


class Microbatch(NamedTuple):
    """What one forward and its backward cost this rank, in nanoseconds, waits excluded.

    Attributes:
        forward: With the loss.
        backward: Up to the optimizer or the next forward; 0 where none followed.
    """

    forward: int
    backward: int


class Segment(NamedTuple):
    """One phase of a step, in nanoseconds.

    Attributes:
        kind: forward, loss, backward, recompute (forward run again inside backward), optimizer, inside (the
            step, between these), outside (between the previous step's end and this step's begin) or paused.
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
        * forward + backward + optimizer + transfer + communication + checkpoint + input + compilation +
          garbage + other = period, None counted as nothing: time of an unmeasured part is in `other`.

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
        compilation: Standing still for torch.compile.
        garbage: Standing still for Python's garbage collector, 20 us or longer at a time.
        recompute: The part of `backward` in which forward was run again; looked at in some steps only.
        microbatches: Local compute of each forward and backward of the step, in order.
        compiled: How often torch.compile went to work in this period.
        saves: Saves that began in this period.
        counted: Its operators were counted, which costs a few percent: means leave such a step out.
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
    compilation: int | None = None
    garbage: int | None = None
    recompute: int | None = None
    microbatches: tuple[Microbatch, ...] = ()
    compiled: int = 0
    saves: int = 0
    counted: bool = False

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
        parts: Nanoseconds of "period", of each of STOPS and PHASES, of "other" and of its part "outside".
        waits: When each of STOPS was waited for, as far as it was attributed to that lane.
        local: Of each segment, what is left without them.
    """

    parts: dict[str, int]
    waits: dict[str, Intervals]
    local: list[int]


def share_out(segments: Sequence[Segment], spans: Iterable[Span], *, on_device: bool) -> Shares:
    """Give every nanosecond of a period to one part.

    Args:
        segments: The period, gapless and in order.
        spans: Spans of all lanes, of this period or beyond; only exposed ones of STOPS count.
        on_device: Segments were timed by a device, so a host wait costs only what is left of it when
            the device has come to it.
    """
    asked: dict[str, list[Interval]] = {}
    for span in spans:
        if span.exposed and span.lane in STOPS:
            felt = _felt_by_device(span, segments) if on_device and not span.device else [(span[2], span[3])]
            asked.setdefault(span.lane, []).extend(felt)
    left = _not_paused(segments)
    parts = {"period": length(left), **dict.fromkeys(STOPS, 0)}
    waits: dict[str, Intervals] = dict.fromkeys(STOPS, [])
    for lane in STOPS if asked else ():
        if lane in asked:
            waits[lane] = []
            for start, end in union(asked[lane]):
                felt, left = cut(left, start, end)
                waits[lane] += felt
            parts[lane] = length(waits[lane])
    local = _local(segments, left)
    kinds: dict[str, int] = {}
    for segment, time in zip(segments, local, strict=True):
        kinds[segment.kind] = kinds.get(segment.kind, 0) + time
    parts.update((kind, kinds.get(kind, 0)) for kind in (*PHASES, "outside"))
    parts["other"] = parts["outside"] + kinds.get("inside", 0)
    return Shares(parts, waits, local)


def microbatches(segments: Sequence[Segment], local: Sequence[int]) -> tuple[Microbatch, ...]:
    """Each forward of a step with the backward that follows it; forwards without one between count as one."""
    found: list[list[int]] = []
    over = True
    for segment, time in zip(segments, local, strict=True):
        if segment.kind in ("forward", "loss"):
            if over:
                found.append([0, 0])
            found[-1][0] += time
            over = False
        elif segment.kind in ("backward", "recompute") and found:
            found[-1][1] += time
            over = True
    return tuple(Microbatch(*pair) for pair in found)


def backwards(segments: Sequence[Segment]) -> Intervals:
    """When each backward of a step began and ended, recomputation in it or not."""
    return union((part.start, part.end) for part in segments if part.kind in ("backward", "recompute"))


def _not_paused(segments: Sequence[Segment]) -> Intervals:
    """Segments are gapless: most periods are one interval."""
    if any(segment.kind == "paused" for segment in segments):
        return union((part.start, part.end) for part in segments if part.kind != "paused")
    start, end = segments[0].start, segments[-1].end
    return [(start, end)] if end > start else []


def _local(segments: Sequence[Segment], left: Intervals) -> list[int]:
    """How much of what is left lies in each segment; one pass over both."""
    times: list[int] = []
    i = 0
    for segment in segments:
        begin, close, time = segment.start, segment.end, 0
        while i < len(left):
            start, end = left[i]
            overlap = (end if end < close else close) - (start if start > begin else begin)
            if overlap > 0:
                time += overlap
            if end > close:
                break
            i += 1
        times.append(time)
    return times


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
