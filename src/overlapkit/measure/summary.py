"""Means over the records of a window: what the answers, the findings and the table are made of."""

from collections.abc import Sequence
from dataclasses import dataclass

from overlapkit.measure.across.ranks import Ranks
from overlapkit.measure.intervals import length, union, within
from overlapkit.measure.ledger import Ledger, Trace
from overlapkit.measure.record import StepRecord
from overlapkit.measure.sources import Coverage
from overlapkit.span import Span

PARTS = (
    *("forward", "backward", "optimizer", "input", "transfer", "communication", "checkpoint"),
    *("compilation", "garbage", "other"),
)
"""The parts of a period, in the order in which they are shown. They add up to it."""

_LANE = {"forward": "compute", "backward": "compute"}
_LATEST = 8  # steps that the newest spans surely cover


@dataclass(frozen=True, slots=True)
class PartSummary:
    """One part of a step over the window.

    Attributes:
        mean_ms: Milliseconds a step, or None where it was not measured.
        share: Of the period, 0 to 1, or None.
        worst_ms: The largest of any step, or None.
        bytes: Bytes a step that the lane moved, exposed or not, or None where none were counted.
        reason: Why it was not measured, else None.
    """

    mean_ms: float | None
    share: float | None
    worst_ms: float | None
    bytes: float | None
    reason: str | None


class Window:
    """The last records of a meter and what was published meanwhile.

    Args:
        ledger: Where they come from.
        steps: How many records; step 0 and steps whose operators were counted are left out where there are
            others.
        ranks: All ranks compared, or why they are not.
    """

    def __init__(self, ledger: Ledger, steps: int, ranks: Ranks | str = "not compared") -> None:
        self.ranks = ranks
        with ledger.lock:
            records = list(ledger.records)[-steps:]
            self.traces: list[Trace] = list(ledger.traces)[-steps:]
            self.spans: list[Span] = list(ledger.shown)
            self.saving: list[Span] = list(ledger.saving)
            compiled = list(ledger.compiled)
        usual = [record for record in records if record.index and not record.counted]
        self.records: Sequence[StepRecord] = usual or records
        kept = {record.index for record in self.records}
        self.usual = [trace for trace in self.traces if trace.index in kept]
        self.compilations: dict[str, list[tuple[int, Span]]] = {}
        for index, span in compiled:
            if index in kept:
                self.compilations.setdefault(span.name, []).append((index, span))
        self.coverage: Coverage = ledger.coverage
        self.period_ms = _mean([record.period for record in self.records])
        self.parts = {part: self._summary(part) for part in PARTS}
        self.outside_ms = _mean([record.outside for record in self.records])

    @property
    def tokens(self) -> float | None:
        """A step on this rank, where they are known."""
        known = [record.tokens for record in self.records if record.tokens is not None]
        return sum(known) / len(known) if known else None

    def communicating_ms(self) -> float | None:
        """Milliseconds a step in which a collective was at work or waited for, exposed or not."""
        times = [length(union((span.start, span.end) for span in trace.collectives)) for trace in self.usual]
        return _mean(times) if any(times) else None

    def exposed_share(self) -> float | None:
        """Time that steps stood still for a lane, of the whole."""
        known = [r for r in self.records if r.exposed is not None]
        whole = sum(record.period for record in known)
        return sum(record.exposed or 0 for record in known) / whole if whole else None

    def tokens_per_s(self) -> float | None:
        """Over the steps whose tokens are known, on this rank."""
        known = [record for record in self.records if record.tokens is not None]
        whole = sum(record.period for record in known)
        return sum(record.tokens or 0 for record in known) * 1e9 / whole if whole else None

    def work_ms(self, lane: str) -> float | None:
        """What a lane did beside the steps, per step, over the latest ones; None where nothing was seen."""
        latest = self.traces[-_LATEST:]
        if not latest:
            return None
        start, end = latest[0].segments[0].start, latest[-1].segments[-1].end
        work = [s for s in self.spans if s.lane == lane and not s.exposed]
        busy = length(union((s.start, s.end) for s in work if start < s.end <= end))  # buckets overlap
        steps = latest[-1].index - latest[0].index + 1  # with those between them that are not measured
        return busy / 1e6 / steps if work else None

    def waits(self, lane: str) -> dict[str, int]:
        """Nanoseconds that steps stood still for a lane, by the names of its waits, over the latest steps."""
        felt = within(union(wait for trace in self.usual for wait in trace.waits.get(lane, ())))
        named: dict[str, int] = {}
        for span in self.spans:
            if span.lane == lane and span.exposed and (time := felt(span.start, span.end)):
                named[span.name] = named.get(span.name, 0) + time
        return named

    def tail_ms(self) -> float | None:
        """Of a step's exposed communication, what was left after backward; None where that is not told."""
        found, told = 0, False
        for trace in self.usual:
            felt = within(trace.waits.get("communication", []))
            for span in (span for span in trace.collectives if span.name.endswith(" tail")):
                found, told = found + felt(span.start, span.end), True
        return found / len(self.usual) / 1e6 if told else None

    def _summary(self, part: str) -> PartSummary:
        times = [time for record in self.records if (time := getattr(record, part)) is not None]
        periods = [record.period for record in self.records if getattr(record, part) is not None]
        if not times:
            return PartSummary(None, None, None, self._bytes(part), self._reason(part))
        share = sum(times) / sum(periods) if sum(periods) else 0.0
        return PartSummary(_mean(times), share, max(times) / 1e6, self._bytes(part), None)

    def _bytes(self, part: str) -> float | None:
        moved = [r.lane_bytes[part] for r in self.records if part in r.lane_bytes]
        return sum(moved) / len(self.records) if moved else None

    def _reason(self, part: str) -> str:
        missing = (
            None
            if part in ("compilation", "garbage", "other")
            else self.coverage.missing(_LANE.get(part, part))
        )
        if missing is None and not self.records:
            return "no step has been measured yet"
        if missing is None and part in _LANE:
            return _NOT_CALLED if part == "forward" else "no gradient reached its output"
        return missing or "not measured in this window"


_NOT_CALLED = "the model was not called: a meter belongs on what torch.compile(model) returned"


def _mean(times: Sequence[int]) -> float | None:
    """In milliseconds."""
    return sum(times) / len(times) / 1e6 if times else None
