"""Means over the steps of all ranks: what the answers and findings about a trace are made of."""

from collections.abc import Iterable

from overlapkit.measure.record import StepRecord
from overlapkit.measure.summary import PARTS, PartSummary
from overlapkit.measure.traces.arrivals import Arrivals
from overlapkit.measure.traces.detail import TraceDetail

_REASONS = {
    "forward": "no operator in the trace: record ProfilerActivity.CPU as well",
    "backward": "no operator of autograd in the trace",
    "optimizer": "no Optimizer.step in the trace",
    "input": "no DataLoader in the trace",
    "transfer": "no device in the trace",
    "communication": "no collective in the trace",
    "checkpoint": "not told by a profiler's trace",
    "compilation": "not told by a profiler's trace",
    "garbage": "not told by a profiler's trace",
}


class Summary:
    """Means of a trace, in milliseconds a step. A trace without steps counts as one.

    Args:
        detail: The trace.
    """

    def __init__(self, detail: TraceDetail) -> None:
        self.detail = detail
        self.steps = [step for one in detail.ranks for step in one.steps]
        self.records = tuple(step.record for step in self.steps)
        self.period_ms = self._mean(record.period for record in self.records)
        self.parts = {part: _part(part, self.records) for part in PARTS}
        self.idle_ms = self._mean(step.idle for step in self.steps)
        self.host_wait_ms = self._mean(step.host_wait for step in self.steps)

    @property
    def per(self) -> str:
        """What a mean is of, in words."""
        return "a step" if self.detail.steps else "in the trace"

    def share(self, part_ms: float) -> float:
        """Of the period, 0 to 1."""
        return part_ms / self.period_ms if self.period_ms else 0.0

    def exposed_share(self) -> float | None:
        """Time in which only a lane was at work that should be hidden, or the input was waited for."""
        known = [record for record in self.records if record.exposed is not None]
        whole = sum(record.period for record in known)
        return sum(record.exposed or 0 for record in known) / whole if whole else None

    def copies_ms(self) -> tuple[float, float, float] | None:
        """Of copies to the device: all, exposed, from pageable memory. None where there is no device."""
        copies = [step.copies for step in self.steps if step.copies is not None]
        if not copies:
            return None
        return (
            self._mean(copy.total for copy in copies),
            self._mean(copy.exposed for copy in copies),
            self._mean(copy.pageable for copy in copies),
        )

    def tail_ms(self) -> tuple[float, float | None] | None:
        """The tail, and what of it was spent waiting for a late rank, where ranks could be compared."""
        tails = [step.tail for step in self.steps if step.tail is not None]
        if not tails:
            return None
        return self._mean(tails), self._tail_wait_ms(len(tails))

    def waited_ms(self) -> float | None:
        """Of a rank, for later ones, in a step."""
        arrivals = self.detail.arrivals
        if not isinstance(arrivals, Arrivals):
            return None
        places = enumerate(self.detail.ranks)
        waits = [arrivals.waited_in_steps(place, one.timeline) for place, one in places]
        return sum(waits) / len(self.steps) / 1e6

    def _tail_wait_ms(self, tails: int) -> float | None:
        arrivals = self.detail.arrivals
        if not isinstance(arrivals, Arrivals):
            return None
        waits = [
            arrivals.tail_wait(place, one.timeline, step)
            for place, one in enumerate(self.detail.ranks)
            for step in one.steps
        ]
        return sum(waits) / tails / 1e6

    @staticmethod
    def _mean(times: Iterable[int]) -> float:
        values = list(times)
        return sum(values) / len(values) / 1e6


def _part(part: str, records: tuple[StepRecord, ...]) -> PartSummary:
    known = [(time, record.period) for record in records if (time := getattr(record, part)) is not None]
    if not known:
        return PartSummary(None, None, None, None, _REASONS.get(part))
    total, periods = (sum(column) for column in zip(*known, strict=True))
    worst = max(time for time, _ in known)
    return PartSummary(total / len(known) / 1e6, total / periods if periods else 0.0, worst / 1e6, None, None)
