"""Who came late: collectives of several ranks side by side, on one clock (see `measure.arrival`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from overlapkit.measure.arrival import Meeting, attend, clock_offsets, time_waited
from overlapkit.measure.traces.columns import Collective, Ints
from overlapkit.measure.traces.lanes import COMMUNICATION
from overlapkit.measure.traces.timeline import UNKNOWN, Timeline
from overlapkit.measure.traces.traced import TracedRank, TracedStep


@dataclass(frozen=True, slots=True)
class Arrival:
    """One rank in all collectives that could be compared. Nanoseconds.

    Attributes:
        rank: Of the job.
        waited: For later ones, in all; where it waited in two collectives at once, once.
        last: In how many it was the last.
        shared: In how many it took part.
        offset: How far its clock was ahead; 0 where that cannot be told from how far ends differ anyway.
        late: How long a typical rank waited for it, in the group of ranks where that was most; what it waited
            itself in other groups is not its own doing, and taken off.
    """

    rank: int
    waited: int
    last: int
    shared: int
    offset: int
    late: int

    def to_dict(self) -> dict[str, object]:
        """Times in microseconds."""
        return {
            "rank": self.rank,
            "waited_us": self.waited / 1e3,
            "late_us": self.late / 1e3,
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
        """For whom others waited most."""
        return max((one for one in self.ranks if one.shared), key=lambda one: one.late)

    @property
    def patient(self) -> Arrival:
        """Who waited most."""
        return max(self.ranks, key=lambda one: one.waited)

    def waited_in_steps(self, place: int, timeline: Timeline) -> int:
        """What a rank waited within the profiler's steps, nanoseconds; in all where there are none.

        Args:
            place: Of the rank among those compared.
            timeline: Of that rank.
        """
        anywhere = not len(timeline.host.windows.starts)
        waits = self.waits[place].items()
        return _waited(timeline, {row: wait for row, wait in waits if anywhere or timeline.steps[row] >= 0})

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
    meetings = [_meeting(match) for match in matched]
    offsets = clock_offsets(len(ranks), meetings)
    waits: list[dict[int, int]] = [{} for _ in ranks]
    last, transfer = [0] * len(ranks), 0
    blamed: dict[str, tuple[Ints, Ints]] = {}  # of each group, what each rank was waited for, and waited
    for match, meeting in zip(matched, meetings, strict=True):
        seen = attend(meeting, offsets)
        last[int(seen.last[0])] += 1
        _, one, row = match[0]
        nobody = np.zeros(len(ranks), dtype=np.int64), np.zeros(len(ranks), dtype=np.int64)
        blame, waited = blamed.setdefault(_says(one, row).group, nobody)
        blame[seen.last[0]] += np.partition(seen.waits[0], len(match) // 2)[len(match) // 2]
        waited[meeting.places] += seen.waits[0]
        transfer += int(seen.transfer[0])
        for (place, _, row), wait in zip(match, seen.waits[0], strict=True):
            waits[place][row] = int(wait)
    everywhere = sum(waited for _, waited in blamed.values())
    late = np.max([blame - (everywhere - waited) for blame, waited in blamed.values()], axis=0)
    arrivals = [
        Arrival(
            rank=one.rank,
            waited=_waited(one.timeline, waits[place]),
            last=last[place],
            shared=len(waits[place]),
            offset=int(offsets[place]),
            late=max(0, int(late[place])),
        )
        for place, one in enumerate(ranks)
    ]
    return Arrivals(len(matched), transfer, tuple(arrivals), tuple(waits))


def _waited(timeline: Timeline, waits: dict[int, int]) -> int:
    rows = np.array(list(waits), dtype=np.int64)
    lengths = np.array(list(waits.values()), dtype=np.int64)
    return int(time_waited(timeline.starts[rows][:, None], lengths[:, None])[0])


_Entry = tuple[int, TracedRank, Ints]  # place among the ranks, the rank, its rows in the order of launches
_Match = list[tuple[int, TracedRank, int]]  # one collective: the same with its one row


def _meeting(match: _Match) -> Meeting:
    places = np.array([place for place, _, _ in match])
    starts = np.array([[int(one.timeline.starts[row]) for _, one, row in match]])
    ends = np.array([[int(one.timeline.ends[row]) for _, one, row in match]])
    return Meeting(places, starts, ends)


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
    """The n-th of one rank is the n-th of another, where kinds and steps are the same; else step by step."""
    if all(_says(one, row).sequence is not None for _, one, rows in group for row in rows):
        by_number = [{_number(_says(one, row)): row for row in rows} for _, one, rows in group]
        for number in sorted(set.intersection(*(set(rows) for rows in by_number))):
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
    stepped = [_steps(one, rows).tolist() for _, one, rows in group if len(one.timeline.host.windows.starts)]
    return all(of_rank == all_ranks[0] for all_ranks in (kinds, stepped) for of_rank in all_ranks)


def _number(says: Collective) -> tuple[str, int]:
    """Process groups of the same ranks each count by themselves."""
    return says.name, says.sequence or 0


def _says(one: TracedRank, row: int) -> Collective:
    says: Collective = one.timeline.host.collectives[one.timeline.places[row]]
    return says


def _by_step(group: list[_Entry]) -> Iterator[list[_Entry]]:
    numbers = [_steps(one, rows) for _, one, rows in group]
    known = [set(of.tolist()) for of in numbers]
    for number in sorted(set.intersection(*known) - {-1}):
        yield [
            (place, one, rows[of == number]) for (place, one, rows), of in zip(group, numbers, strict=True)
        ]


def _steps(one: TracedRank, rows: Ints) -> Ints:
    """The numbers of the profiler's steps that launched some work; -1 for none."""
    return np.append(one.timeline.host.windows.numbers, -1)[one.timeline.steps[rows]]
