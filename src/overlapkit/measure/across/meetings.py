"""The collectives of one step on all ranks: matched by name, on one clock, group by group."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overlapkit.measure.across.handed import PHASES, Detail, Key
from overlapkit.measure.arrival import Ints, Meeting, attend, clock_offsets, time_waited

Floats = npt.NDArray[Any]

_MOST = 0.8  # of the longest wait


@dataclass(frozen=True, slots=True)
class StepArrivals:
    """Who waited for whom in one step. Microseconds.

    Attributes:
        collectives: How many were compared.
        late: How long a typical rank waited for each, where that was the last; where in two collectives at
            once, once. NaN where it was not compared, (world,).
        where: For ranks that others waited for, the first collective at which they did so much, in words.
        waited: For later ranks, mean of ranks.
        exposed: Time in which the step stood still for communication, mean of ranks.
        waiting: Of it, for a late rank.
    """

    collectives: int
    late: Floats
    where: Mapping[int, str]
    waited: float
    exposed: float
    waiting: float


@dataclass(frozen=True, slots=True)
class _Part:
    """The same collectives of one group on some ranks."""

    keys: tuple[Key, ...]
    ranks: tuple[int, ...]
    columns: Ints  # (4, collectives, ranks): starts, durations, exposed, phases


def compare_step(details: Mapping[int, Detail], world: int) -> StepArrivals | None:
    """Compare one step; None where no two ranks were in the same collectives.

    Args:
        details: By rank.
        world: How many ranks there are.
    """
    blocks: list[tuple[Ints, ...]] = []
    blamed: list[tuple[Ints, Ints, Ints]] = []
    waiting, met = np.zeros(world), np.zeros(world, dtype=bool)
    latest: dict[int, list[tuple[int, float, str]]] = {}
    for part in _parts(details):
        ranks = np.array(part.ranks)
        arrived, lasted, exposed, _ = part.columns
        ends = arrived + lasted
        begin = _queued(arrived, ends)
        lasted = ends - begin
        meeting = Meeting(np.arange(len(ranks)), begin, ends)
        seen = attend(meeting, clock_offsets(len(ranks), [meeting], agree=None))
        # What was waited beside a rank's own work, as DDP's buckets are, costs nobody anything; and what the
        # last one itself stands still for is the transfer.
        turns, last = np.arange(len(begin)), begin.argmax(axis=1)
        held = np.maximum(exposed - exposed[turns, last][:, None], 0)
        typical = np.partition(held, len(ranks) // 2, axis=1)[:, len(ranks) // 2]
        late = np.where(seen.last[:, None] == np.arange(len(ranks)), typical[:, None], 0)
        blamed.append((ranks, late.sum(axis=0), held.sum(axis=0)))
        blocks.append(tuple(_spread(column, ranks, world) for column in (begin, seen.waits)))
        waiting[ranks] += held.sum(axis=0)
        met[ranks] = True
        _note_latest(latest, part, seen.last, typical)
    if not met.any():
        return None
    starts, waits = (np.vstack(columns) for columns in zip(*blocks, strict=True))
    total = [details[rank].exposed.sum() for rank in np.flatnonzero(met).tolist()]
    return StepArrivals(
        collectives=len(starts),
        late=np.where(met, _own_lateness(blamed, world), np.nan),
        where={rank: _first(of) for rank, of in latest.items()},
        waited=float(time_waited(starts, waits)[met].mean()),
        exposed=float(np.mean(total)),
        waiting=float(np.minimum(waiting[met], total).mean()),
    )


def _own_lateness(blamed: Sequence[tuple[Ints, Ints, Ints]], world: int) -> Floats:
    """Of each rank, the most of any group: who is late in one is late for the next group, too.

    What it waited for others in other groups is not its own doing.

    Args:
        blamed: Of each group its ranks, how long each was waited for, and how long it waited.
        world: How many ranks there are.
    """
    waited, late = np.zeros(world), np.zeros(world)
    for ranks, _, waits in blamed:
        waited[ranks] += waits
    for ranks, blame, waits in blamed:
        late[ranks] = np.maximum(late[ranks], blame - (waited[ranks] - waits))
    return late


def _queued(starts: Ints, ends: Ints) -> Ints:
    """When each rank came to a collective with nothing else to wait for: not before an earlier one ended.

    A rank that begins fifty at once and waits 20 ms for somebody late waits 20 ms, not fifty times.
    """
    order = np.argsort(starts, axis=0, kind="stable")
    reached = np.maximum.accumulate(np.take_along_axis(ends, order, axis=0), axis=0)
    earlier = np.empty_like(starts)
    earlier[:1] = np.iinfo(starts.dtype).min
    earlier[1:] = reached[:-1]
    begins = np.empty_like(starts)
    np.put_along_axis(begins, order, np.maximum(np.take_along_axis(starts, order, axis=0), earlier), axis=0)
    queued: Ints = np.minimum(begins, ends)
    return queued


def _spread(column: Ints, ranks: Ints, world: int) -> Ints:
    whole = np.zeros((len(column), world), dtype=np.int64)
    whole[:, ranks] = column
    return whole


def _note_latest(seen: dict[int, list[tuple[int, float, str]]], part: _Part, last: Ints, waits: Ints) -> None:
    """For each rank, the collectives at which it was the last by the most: when, how much, and in words."""
    starts, _, _, phases = part.columns
    for place in np.unique(last):
        mine = np.flatnonzero(last == place)
        mine = mine[waits[mine] >= _MOST * waits[mine].max()]
        turn = int(mine[starts[mine, place].argmin()])
        text = f"{part.keys[turn][0]}, in {PHASES[phases[turn, place]]}"
        seen.setdefault(part.ranks[place], []).append((int(starts[turn, place]), float(waits[turn]), text))


def _first(seen: list[tuple[int, float, str]]) -> str:
    """The earliest of those that were about as late as the latest: what follows is late for its sake."""
    most = max(wait for _, wait, _ in seen)
    return min(one for one in seen if one[1] >= _MOST * most)[2]


def _parts(details: Mapping[int, Detail]) -> Iterator[_Part]:
    """The collectives of each group, on the ranks that were in the same ones: of each group the most."""
    sorted_keys: dict[tuple[Key, ...], dict[str, tuple[tuple[Key, ...], Ints]]] = {}
    found: dict[str, dict[tuple[Key, ...], list[tuple[int, Ints]]]] = {}
    for rank, detail in details.items():
        if detail.keys not in sorted_keys:
            sorted_keys[detail.keys] = _by_group(detail.keys)
        for group, (keys, places) in sorted_keys[detail.keys].items():
            found.setdefault(group, {}).setdefault(keys, []).append((rank, places))
    for by_keys in found.values():
        keys, members = max(by_keys.items(), key=lambda item: len(item[1]))
        if len(members) < 2:
            continue
        columns = np.empty((4, len(keys), len(members)), dtype=np.int64)
        for column, (rank, places) in enumerate(members):
            one = details[rank]
            for row, values in enumerate((one.starts, one.durations, one.exposed, one.phases)):
                columns[row, :, column] = values[places]
        yield _Part(keys, tuple(rank for rank, _ in members), columns)


def _by_group(listing: tuple[Key, ...]) -> dict[str, tuple[tuple[Key, ...], Ints]]:
    """The listing's keys in an order that is the same on every rank, and where each is; by group."""
    groups: dict[str, list[tuple[Key, int]]] = {}
    for place, key in enumerate(listing):
        groups.setdefault(key[2], []).append((key, place))
    found = {}
    for group, keyed in groups.items():
        keyed.sort()
        found[group] = tuple(key for key, _ in keyed), np.array([place for _, place in keyed])
    return found
