"""Who came late: collectives of several ranks side by side, on one clock.

A collective begins on a rank when that rank arrives and ends on all at once, so the ends align the clocks and
the starts say who was waited for: wait = latest start - own start, transfer = the least duration of any rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from overlapkit.measure.intervals import length, union
from overlapkit.measure.traces.columns import Collective, Ints
from overlapkit.measure.traces.lanes import COMMUNICATION
from overlapkit.measure.traces.timeline import UNKNOWN, Timeline
from overlapkit.measure.traces.traced import TracedRank, TracedStep

_AGREE_NS = 10_000  # ends of one collective agree within 7 us where the clock is the same


@dataclass(frozen=True, slots=True)
class Arrival:
    """One rank in all collectives that could be compared. Nanoseconds.

    Attributes:
        rank: Of the job.
        waited: For later ones, in all; where it waited in two collectives at once, once.
        last: In how many it was the last.
        shared: In how many it took part.
        offset: How far its clock was ahead; 0 where that cannot be told from how far ends differ anyway.
    """

    rank: int
    waited: int
    last: int
    shared: int
    offset: int

    def to_dict(self) -> dict[str, object]:
        """Times in microseconds."""
        return {
            "rank": self.rank,
            "waited_us": self.waited / 1e3,
            "last": self.last,
            "shared": self.shared,
            "clock_offset_us": self.offset / 1e3,
        }


@dataclass(frozen=True)
class Arrivals:
    """All ranks.

    Attributes:
        collectives: How many could be compared.
        transfer: What they took once all had arrived, in nanoseconds, in all.
        ranks: By rank.
        waits: For each rank the waits of its timeline's rows.
    """

    collectives: int
    transfer: int
    ranks: tuple[Arrival, ...]
    waits: tuple[dict[int, int], ...]

    @property
    def straggler(self) -> Arrival:
        """Who waited least."""
        return min(self.ranks, key=lambda one: one.waited)

    @property
    def patient(self) -> Arrival:
        """Who waited most."""
        return max(self.ranks, key=lambda one: one.waited)

    def tail_wait(self, place: int, timeline: Timeline, step: TracedStep) -> int:
        """What of a step's tail was spent waiting for a late rank.

        Args:
            place: Of the rank among those compared.
            timeline: Of that rank.
            step: One of its steps.
        """
        if not step.tail:
            return 0
        end = max(int(timeline.ends[row]) for row in step.tail_rows)
        waited, since = 0, end - step.tail
        for row in sorted(step.tail_rows, key=lambda row: int(timeline.starts[row])):
            start = max(since, int(timeline.starts[row]))
            until = min(end, int(timeline.starts[row]) + self.waits[place].get(row, 0))
            waited += max(0, until - start)
            since = max(since, until)
        return waited

    def to_dict(self) -> dict[str, object]:
        """Times in microseconds."""
        return {
            "collectives": self.collectives,
            "straggler": self.straggler.rank,
            "transfer_us": self.transfer / 1e3,
            "ranks": [one.to_dict() for one in self.ranks],
        }


def compare(ranks: Sequence[TracedRank]) -> Arrivals | str:
    """The arrivals at every collective that two or more ranks recorded; or why there are none."""
    if len(ranks) < 2:
        return "one rank only: give the traces of all"
    matched = [match for group in _groups(ranks) for match in _matches(group)]
    if not matched:
        return "no collective was recorded by several ranks"
    offsets = _offsets(len(ranks), matched)
    waits: list[dict[int, int]] = [{} for _ in ranks]
    last, transfer = [0] * len(ranks), 0
    for match in matched:
        starts = {place: int(one.timeline.starts[row]) - offsets[place] for place, one, row in match}
        latest = max(starts, key=lambda place: starts[place])
        last[latest] += 1
        transfer += min(int(one.timeline.ends[row] - one.timeline.starts[row]) for _, one, row in match)
        for place, _, row in match:
            waits[place][row] = starts[latest] - starts[place]
    arrivals = [
        Arrival(one.rank, _waited(one, waits[place]), last[place], len(waits[place]), offsets[place])
        for place, one in enumerate(ranks)
    ]
    return Arrivals(len(matched), transfer, tuple(arrivals), tuple(waits))


def _waited(one: TracedRank, waits: dict[int, int]) -> int:
    starts = ((int(one.timeline.starts[row]), wait) for row, wait in waits.items())
    return length(union((start, start + wait) for start, wait in starts))


_Entry = tuple[int, TracedRank, Ints]  # place among the ranks, the rank, its rows in the order of launches
_Match = list[tuple[int, TracedRank, int]]  # one collective: the same with its one row


def _groups(ranks: Sequence[TracedRank]) -> Iterator[list[_Entry]]:
    """The collectives of each process group, on each of its ranks."""
    found: dict[str, list[_Entry]] = {}
    for place, one in enumerate(ranks):
        timeline = one.timeline
        rows = np.flatnonzero(timeline.lanes == COMMUNICATION)
        at = np.where(timeline.launched[rows] == UNKNOWN, timeline.starts[rows], timeline.launched[rows])
        mine: dict[str, list[int]] = {}
        for row in rows[np.argsort(at, kind="stable")]:
            says = timeline.host.collectives[timeline.places[row]]
            if says.kind.lower() not in ("send", "recv"):  # of two ranks only, each with another peer
                mine.setdefault(says.group, []).append(int(row))
        for group, of_group in mine.items():
            found.setdefault(group, []).append((place, one, np.array(of_group)))
    yield from (entries for entries in found.values() if len(entries) > 1)


def _matches(group: list[_Entry]) -> Iterator[_Match]:
    """The n-th of one rank is the n-th of another, where they are of the same kinds; else step by step."""
    if all(_says(one, row).sequence is not None for _, one, rows in group for row in rows):
        by_number = [{_says(one, row).sequence: row for row in rows} for _, one, rows in group]
        for number in sorted(set.intersection(*(set(rows) for rows in by_number)), key=lambda n: n or 0):
            pairs = zip(group, by_number, strict=True)
            yield [(place, one, int(rows[number])) for (place, one, _), rows in pairs]
    elif _same(group):
        for turn in range(len(group[0][2])):
            yield [(place, one, int(rows[turn])) for place, one, rows in group]
    else:
        for part in _by_step(group):
            if _same(part):
                yield from _matches(part)


def _same(group: list[_Entry]) -> bool:
    kinds = [[_says(one, row).kind for row in rows] for _, one, rows in group]
    return all(of_rank == kinds[0] for of_rank in kinds)


def _says(one: TracedRank, row: int) -> Collective:
    says: Collective = one.timeline.host.collectives[one.timeline.places[row]]
    return says


def _by_step(group: list[_Entry]) -> Iterator[list[_Entry]]:
    numbers = [
        one.timeline.host.windows.numbers[steps] if len(one.timeline.host.windows.numbers) else steps
        for _, one, rows in group
        for steps in [one.timeline.steps[rows]]
    ]
    known = [set(of.tolist()) for of in numbers]
    for number in sorted(set.intersection(*known)):
        yield [
            (place, one, rows[(of == number) & (one.timeline.steps[rows] >= 0)])
            for (place, one, rows), of in zip(group, numbers, strict=True)
        ]


def _offsets(ranks: int, matched: list[_Match]) -> list[int]:
    """How far each clock is ahead: the median over all collectives of how much later they end on it."""
    off: list[list[float]] = [[] for _ in range(ranks)]
    for match in matched:
        ends = [int(one.timeline.ends[row]) for _, one, row in match]
        middle = sorted(ends)[len(ends) // 2]
        for (place, _, _), end in zip(match, ends, strict=True):
            off[place].append(end - middle)
    found = []
    for differences in off:
        middle = round(float(np.median(differences))) if differences else 0
        spread = float(np.median(np.abs(np.array(differences) - middle))) if differences else 0.0
        found.append(middle if abs(middle) > max(_AGREE_NS, 3 * spread) else 0)
    return found
