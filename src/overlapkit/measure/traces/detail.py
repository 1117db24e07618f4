"""What a report on a trace holds beyond a meter's: lanes of the whole, of each step and of each rank."""

from dataclasses import dataclass

from overlapkit.measure.perfetto import Rank
from overlapkit.measure.traces.arrivals import Arrivals
from overlapkit.measure.traces.picture import detailed
from overlapkit.measure.traces.traced import TracedRank, TracedStep


@dataclass(frozen=True)
class TraceDetail:
    """The traces that `explain()` read.

    Attributes:
        ranks: One for each device of each trace, by rank.
        arrivals: What they show side by side, or why they show nothing.
    """

    ranks: tuple[TracedRank, ...]
    arrivals: Arrivals | str

    @property
    def steps(self) -> tuple[TracedStep, ...]:
        """The profiler's steps, rank by rank; none where the profiler was not stepped."""
        return tuple(step for one in self.ranks for step in one.steps if step.number is not None)

    @property
    def lanes_us(self) -> dict[str, float]:
        """Of the whole trace, in microseconds: the mean of all ranks."""
        parts = [one.lanes.to_dict() for one in self.ranks]
        return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}

    @property
    def overlap(self) -> float | None:
        """Percent of all communication that computation hides, or None where there is none."""
        lanes = self.lanes_us
        if not lanes["communication"]:
            return None
        return 100 * (1 - lanes["exposed_communication"] / lanes["communication"])

    def shown(self) -> list[Rank]:
        """The last steps of each device of each rank, for `save_perfetto`."""
        offsets: dict[int, int] = {}
        if isinstance(self.arrivals, Arrivals):
            offsets = {one.rank: one.offset for one in self.arrivals.ranks}
        shown = []
        for place, one in enumerate(self.ranks):
            traces, spans = detailed(one)
            where = "cpu" if one.device is None else f"device {one.device}"
            records = [step.record for step in one.steps]
            if traces:
                shown.append(
                    Rank(
                        place, f"rank {one.rank} on {where}", traces, spans, records, offsets.get(one.rank, 0)
                    )
                )
        return shown

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values; times in microseconds."""
        compared = isinstance(self.arrivals, Arrivals)
        return {
            "lanes_us": self.lanes_us,
            "overlap_percent": self.overlap,
            "per_step": [step.to_dict() for step in self.steps],
            "per_rank": [one.to_dict() for one in self.ranks],
            "arrivals": self.arrivals.to_dict() if isinstance(self.arrivals, Arrivals) else None,
            "arrivals_reason": None if compared else self.arrivals,
        }
