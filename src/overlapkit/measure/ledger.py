"""From finished timelines and published spans to records: waits for nothing, loses nothing in between."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from overlapkit.measure.intervals import Intervals
from overlapkit.measure.pending import Pending
from overlapkit.measure.record import WAITS, Segment, Shares, StepRecord, microbatches, share_out
from overlapkit.measure.sources import Coverage
from overlapkit.measure.timeline import Timeline
from overlapkit.span import Span

_TRACED = 100  # steps whose phases and collectives are kept: a report's usual window
_PACE = 10  # steps that are set aside together: one by one they cost twice as much
_ROOM = 4096  # spans: components and taps keep twice as many
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


_Over = tuple[Finished, list[Segment] | None]
"""A step and its segments, where a device timed them."""


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

    A step is set aside when it is over, with what was published up to then; the records are worked out when
    somebody reads them. Training pays for the first only: the second takes several times as long.

    Invariants:
        * A step is set aside when its last turn has been passed, and then only: what components publish
          up to that moment holds every wait of the step.
        * A span counts in each period that it reaches into, its bytes in the one in which it ends.
        * `settle` waits for nobody: not for a device, nor for a thread that reads.

    Args:
        coverage: The components, and which lanes they cover.
        history: How many records are kept.

    Attributes:
        settled: How many steps have been set aside so far.
        pace: After how many more steps to settle again, before what components publish is too much to keep.
        own: Spans that the meter itself saw, from whichever thread; taken by settle().
        lock: Held while records are worked out; hold it to read several of the lists as they belong together.
    """

    def __init__(self, coverage: Coverage, history: int) -> None:
        self.coverage = coverage
        self.settled = 0
        self.pace = 1
        self.own: deque[Span] = deque(maxlen=1024)
        self.lock = threading.RLock()
        self._history = history
        self._waiting: deque[Finished] = deque(maxlen=_BEHIND)
        self._settling = threading.Lock()
        self._aside: deque[tuple[list[_Over], list[Span]]] = deque()
        self._pending = Pending()
        self._records: deque[StepRecord] = deque(maxlen=history)
        self._traces: deque[Trace] = deque(maxlen=_TRACED)
        self._shown: deque[Span] = deque(maxlen=4096)
        self._compiled: deque[tuple[int, Span]] = deque(maxlen=512)
        self._saving: deque[Span] = deque(maxlen=512)

    @property
    def records(self) -> deque[StepRecord]:
        """Of the latest steps."""
        self._work_out()
        return self._records

    @property
    def traces(self) -> deque[Trace]:
        """Of the last hundred steps."""
        self._work_out()
        return self._traces

    @property
    def shown(self) -> deque[Span]:
        """The newest spans."""
        self._work_out()
        return self._shown

    @property
    def compiled(self) -> deque[tuple[int, Span]]:
        """The newest compilations, each with its step."""
        self._work_out()
        return self._compiled

    @property
    def saving(self) -> deque[Span]:
        """What the checkpointer did beside the steps, the newest."""
        self._work_out()
        return self._saving

    def finish(self, step: Finished) -> None:
        """The host has left a step."""
        self._waiting.append(step)

    def __iter__(self) -> Iterator[StepRecord]:
        """The records up to now."""
        self.settle()
        with self.lock:
            return iter(list(self.records))

    def settle(self) -> None:
        """Set the steps aside that are over on the device too. Never waits."""
        if not self._settling.acquire(blocking=False):
            return  # another thread is at it
        try:
            over: list[_Over] = []
            while self._waiting:
                step = self._waiting[0]
                segments = step.timeline.resolve() if step.on_device else None
                if step.on_device and segments is None:
                    break
                over.append((self._waiting.popleft(), segments))
                step.timeline.release()
            if over:
                spans = self._take_spans()
                self.pace = min(_PACE, max(1, _ROOM * len(over) // (len(spans) or 1)))
                self._aside.append((over, spans))
                self._forget_the_oldest()
            self.settled += len(over)
        finally:
            self._settling.release()

    def _take_spans(self) -> list[Span]:
        spans = [self.own.popleft() for _ in range(len(self.own))]
        for tap in self.coverage.taps.values():
            spans += tap.take()
        return spans

    def _forget_the_oldest(self) -> None:
        """Those that would be dropped from the records anyway, where nobody has read them."""
        if not self.lock.acquire(blocking=False):
            return  # another thread reads, and takes them from the same end
        try:
            kept = sum(len(over) for over, _ in self._aside)
            while self._aside and kept > self._history + len(self._aside[0][0]):
                kept -= len(self._aside.popleft()[0])
        finally:
            self.lock.release()

    def _work_out(self) -> None:
        with self.lock:
            while self._aside:
                over, spans = self._aside.popleft()
                self.coverage.note(spans)
                self._pending.add(spans)
                self._shown.extend(spans)
                self._saving.extend(s for s in spans if s.lane == "checkpoint" and not s.exposed)
                for step, segments in over:
                    self._enter(step, segments or step.timeline.resolve() or [])

    def _enter(self, step: Finished, segments: list[Segment]) -> None:
        ended, waits = self._pending.take(segments, on_device=step.on_device)
        shares = share_out(segments, waits, on_device=step.on_device)
        pauses = [part for part in segments if part.kind == "paused"]
        by_lane: dict[str, list[Span]] = {}
        for span in ended:
            cut_out = any(part.start <= span.start and span.end <= part.end for part in pauses)
            if not cut_out or span.lane == "checkpoint":  # a save counts wherever it is made
                by_lane.setdefault(span.lane, []).append(span)
        self._records.append(self._record(step, segments, shares, by_lane))
        self._compiled.extend((step.number, span) for span in by_lane.get("compilation", ()))
        collectives = tuple(by_lane.get("communication", ()))
        self._traces.append(Trace(step.number, segments, shares.waits, collectives))

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
        unknown = sum(parts[lane] for lane in WAITS if lane not in known)
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
            other=parts["other"] + unknown,
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
