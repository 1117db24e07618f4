"""From finished timelines and published spans to records: waits for nothing, loses nothing in between."""

import threading
from collections import deque
from dataclasses import dataclass

from overlapkit.measure.intervals import Intervals
from overlapkit.measure.record import Segment, Shares, StepRecord, microbatches, share_out
from overlapkit.measure.sources import Coverage
from overlapkit.measure.timeline import Timeline
from overlapkit.span import Span

_TRACED = 100  # steps whose phases and collectives are kept: a report's usual window
_AHEAD = 8192  # spans that may end after the step: a component with another clock must not fill memory
_BEHIND = 64  # steps that the device may lag; a host runs ahead by far fewer


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that the host has left.

    Attributes:
        index: Number of the step.
        timeline: Its turns.
        tokens: As the user gave them.
        fed: Whether the meter drew its batch.
        peak: Peak memory when the host left it, in bytes.
        on_device: Whether its turns are timed by a device.
    """

    index: int
    timeline: Timeline
    tokens: int | None
    fed: bool
    peak: int | None
    on_device: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """One recorded step in time.

    Attributes:
        index: Number of the step.
        segments: Its phases, gapless and in order.
        waits: When it stood still, by lane (see `record.STOPS`).
        collectives: Spans of the lane communication that ended in it, by start; exposed ones among them.
    """

    index: int
    segments: list[Segment]
    waits: dict[str, Intervals]
    collectives: tuple[Span, ...] = ()


class Ledger:
    """The records of a meter.

    Invariants:
        * A step is recorded when its last turn has been passed, and then only: what components publish
          up to that moment holds every wait of the step.
        * A span counts in each period that it reaches into, its bytes in the one in which it ends.

    Args:
        coverage: The components, and which lanes they cover.
        history: How many records are kept.
    """

    def __init__(self, coverage: Coverage, history: int) -> None:
        self.coverage = coverage
        self.records: deque[StepRecord] = deque(maxlen=history)
        self.traces: deque[Trace] = deque(maxlen=_TRACED)
        self.shown: deque[Span] = deque(maxlen=4096)
        self.lock = threading.Lock()
        self._waiting: deque[Finished] = deque(maxlen=_BEHIND)
        self._drawn: deque[Span] = deque(maxlen=256)
        self._spans: list[Span] = []

    def drew(self, span: Span) -> None:
        """The meter itself waited for a batch."""
        self._drawn.append(span)

    def finish(self, step: Finished) -> None:
        """The host has left a step."""
        self._waiting.append(step)

    def settle(self) -> int:
        """Record the steps that are over on the device too, and return how many they were. Never waits."""
        new = 0
        with self.lock:
            while self._waiting:
                step = self._waiting[0]
                segments = step.timeline.resolve()
                if segments is None:
                    break
                self._waiting.popleft()
                self._collect()
                shares = share_out(segments, self._spans, on_device=step.on_device)
                ended = self._take_ended(step, segments)
                self.records.append(self._record(step, segments, shares, ended))
                collectives = tuple(span for span in ended if span.lane == "communication")
                self.traces.append(Trace(step.index, segments, shares.waits, collectives))
                step.timeline.release()
                new += 1
        return new

    def _collect(self) -> None:
        spans = [self._drawn.popleft() for _ in range(len(self._drawn))]
        for tap in self.coverage.taps.values():
            spans += tap.take()
        self.coverage.note(spans)
        self._spans += spans
        self.shown.extend(spans)

    def _take_ended(self, step: Finished, segments: list[Segment]) -> list[Span]:
        """The spans that ended in the period; those that end later are kept, earlier ones forgotten."""
        first, last = segments[0], segments[-1]
        ended: list[Span] = []
        kept: list[Span] = []
        for span in self._spans:
            by_host = step.on_device and not span.device
            if span.end > (last.host_end if by_host else last.end):
                kept.append(span)
            elif span.end > (first.host_start if by_host else first.start):
                ended.append(span)
        self._spans = kept[-_AHEAD:]
        return ended

    def _record(
        self, step: Finished, segments: list[Segment], shares: Shares, ended: list[Span]
    ) -> StepRecord:
        parts, kinds = shares.parts, {segment.kind for segment in segments}
        moved: dict[str, int] = {}
        for span in ended:
            if span.bytes is not None:
                moved[span.lane] = moved.get(span.lane, 0) + span.bytes

        def known(lane: str) -> int | None:
            return None if self.coverage.missing(lane, fed=step.fed) else parts[lane]

        return StepRecord(
            index=step.index,
            period=parts["period"],
            forward=parts["forward"] + parts["loss"] if "forward" in kinds else None,
            backward=parts["backward"] if "backward" in kinds else None,
            optimizer=known("optimizer"),
            transfer=known("transfer"),
            communication=known("communication"),
            checkpoint=known("checkpoint"),
            input=known("input"),
            other=parts["other"],
            outside=parts["outside"],
            lane_bytes=moved,
            peak_memory=step.peak,
            tokens=step.tokens,
            garbage=parts["garbage"],
            microbatches=microbatches(segments, shares.local),
            saves=sum(span.name == "save" and span.lane == "checkpoint" for span in ended),
        )
