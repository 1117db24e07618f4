"""From finished timelines and published spans to records: waits for nothing, loses nothing in between."""

import threading
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from overlapkit.measure.intervals import Intervals
from overlapkit.measure.pending import Pending
from overlapkit.measure.record import Segment, Shares, StepRecord, microbatches, share_out
from overlapkit.measure.sources import Coverage
from overlapkit.measure.timeline import Timeline
from overlapkit.span import Span

_TRACED = 100  # steps whose phases and collectives are kept: a report's usual window
_BEHIND = 64  # steps that the device may lag; a host runs ahead by far fewer


class Finished(NamedTuple):
    """A step that the host has left.

    Attributes:
        number: Number of the step.
        timeline: Its turns.
        tokens: As the user gave them.
        fed: Whether the meter drew its batch.
        peak: Peak memory when the host left it, in bytes.
        on_device: Whether its turns are timed by a device.
        recompute: Whether recomputation in it would have been seen.
        counted: Whether its operators were counted.
    """

    number: int
    timeline: Timeline
    tokens: int | None
    fed: bool
    peak: int | None
    on_device: bool
    recompute: bool = False
    counted: bool = False


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

    Attributes:
        records: Of the latest steps.
        traces: Of the last hundred.
        shown: The newest spans.
        compiled: The newest compilations, each with its step.
        saving: Of the checkpointer, the newest: what it did beside the steps.
        own: Spans that the meter itself saw, from whichever thread; taken by settle().
        lock: Held while any of these but `own` changes.
    """

    def __init__(self, coverage: Coverage, history: int) -> None:
        self.coverage = coverage
        self.records: deque[StepRecord] = deque(maxlen=history)
        self.traces: deque[Trace] = deque(maxlen=_TRACED)
        self.shown: deque[Span] = deque(maxlen=4096)
        self.lock = threading.Lock()
        self._waiting: deque[Finished] = deque(maxlen=_BEHIND)
        self.compiled: deque[tuple[int, Span]] = deque(maxlen=512)
        self.saving: deque[Span] = deque(maxlen=512)
        self.own: deque[Span] = deque(maxlen=1024)
        self._pending = Pending()

    def finish(self, step: Finished) -> None:
        """The host has left a step."""
        self._waiting.append(step)

    def settle(self) -> int:
        """Record the steps that are over on the device too, and return how many they were. Never waits."""
        over: list[tuple[Finished, list[Segment]]] = []
        with self.lock:
            while self._waiting and (segments := self._waiting[0].timeline.resolve()) is not None:
                over.append((self._waiting.popleft(), segments))
            if over:
                self._collect()
            for step, segments in over:
                ended, waits = self._pending.take(segments, on_device=step.on_device)
                shares = share_out(segments, waits, on_device=step.on_device)
                by_lane: dict[str, list[Span]] = {}
                for span in ended:
                    by_lane.setdefault(span.lane, []).append(span)
                self.records.append(self._record(step, segments, shares, by_lane))
                self.compiled.extend((step.number, span) for span in by_lane.get("compilation", ()))
                collectives = tuple(by_lane.get("communication", ()))
                self.traces.append(Trace(step.number, segments, shares.waits, collectives))
                step.timeline.release()
        return len(over)

    def _collect(self) -> None:
        spans = [self.own.popleft() for _ in range(len(self.own))]
        for tap in self.coverage.taps.values():
            spans += tap.take()
        self.coverage.note(spans)
        self._pending.add(spans)
        self.shown.extend(spans)
        self.saving.extend(span for span in spans if span.lane == "checkpoint" and not span.exposed)

    def _record(
        self, step: Finished, segments: list[Segment], shares: Shares, ended: dict[str, list[Span]]
    ) -> StepRecord:
        parts, kinds = shares.parts, {segment.kind for segment in segments}
        moved: dict[str, int] = {}
        for lane, spans in ended.items():
            counted = [span.bytes for span in spans if span.bytes is not None]
            if counted:
                moved[lane] = sum(counted)
        known = self.coverage.known(fed=step.fed)
        return StepRecord(
            index=step.number,
            period=parts["period"],
            forward=parts["forward"] + parts["loss"] if "forward" in kinds else None,
            backward=parts["backward"] + parts["recompute"] if "backward" in kinds else None,
            optimizer=parts["optimizer"] if "optimizer" in known else None,
            transfer=parts["transfer"] if "transfer" in known else None,
            communication=parts["communication"] if "communication" in known else None,
            checkpoint=parts["checkpoint"] if "checkpoint" in known else None,
            input=parts["input"] if "input" in known else None,
            other=parts["other"],
            outside=parts["outside"],
            lane_bytes=moved,
            peak_memory=step.peak,
            tokens=step.tokens,
            compilation=parts["compilation"],
            garbage=parts["garbage"],
            recompute=parts["recompute"] if step.recompute and "backward" in kinds else None,
            counted=step.counted,
            microbatches=microbatches(segments, shares.local),
            compiled=len(ended.get("compilation", ())),
            saves=sum(span.name == "save" for span in ended.get("checkpoint", ())),
        )
