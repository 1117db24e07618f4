"""The collectives of one step on all ranks: matched by name, on one clock, group by group."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overlapkit.measure.across.handed import PHASES, Detail, Key
from overlapkit.measure.arrival import Ints, Meeting, attend, clock_offsets, time_waited

Floats = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class StepArrivals:
    """Who waited for whom in one step. Microseconds.

    Attributes:
        collectives: How many were compared.
        late: How long a typical rank waited for each, where that was the last; where in two collectives at
            once, once. NaN where it was not compared, (world,).
        where: For ranks that others waited for, the collective at which they did so most, in words.
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
    waiting, met = np.zeros(world), np.zeros(world, dtype=bool)
    most: dict[int, tuple[float, str]] = {}
    for part in _parts(details):
        ranks = np.array(part.ranks)
        begin, lasted, exposed, phases = part.columns
        meeting = Meeting(np.arange(len(ranks)), begin, begin + lasted)
        seen = attend(meeting, clock_offsets(len(ranks), [meeting], agree=None))
        typical = np.partition(seen.waits, len(ranks) // 2, axis=1)[:, len(ranks) // 2]
        late = np.where(seen.last[:, None] == np.arange(len(ranks)), typical[:, None], 0)
        blocks.append(tuple(_spread(column, ranks, world) for column in (begin, seen.waits, late)))
        waiting[ranks] += np.maximum(exposed - np.maximum(lasted - seen.waits, 0), 0).sum(axis=0)
        met[ranks] = True
        _note_latest(most, part, seen.last, typical, phases)
    if not met.any():
        return None
    starts, waits, lates = (np.vstack(columns) for columns in zip(*blocks, strict=True))
    total = [details[rank].exposed.sum() for rank in np.flatnonzero(met).tolist()]
    return StepArrivals(
        collectives=len(starts),
        late=np.where(met, time_waited(starts - lates, lates), np.nan),
        where={rank: text for rank, (_, text) in most.items()},
        waited=float(time_waited(starts, waits)[met].mean()),
        exposed=float(np.mean(total)),
        waiting=float(np.minimum(waiting[met], total).mean()),
    )


def _spread(column: Ints, ranks: Ints, world: int) -> Ints:
    whole = np.zeros((len(column), world), dtype=np.int64)
    whole[:, ranks] = column
    return whole


def _note_latest(
    most: dict[int, tuple[float, str]], part: _Part, last: Ints, waits: Floats, phases: Ints
) -> None:
    """For each rank, the collective at which it was the last by the most."""
    for place in np.unique(last):
        mine = np.flatnonzero(last == place)
        turn = int(mine[waits[mine].argmax()])
        rank, wait = part.ranks[place], float(waits[turn])
        if wait > most.get(rank, (-1.0, ""))[0]:
            most[rank] = wait, f"{part.keys[turn][0]}, in {PHASES[phases[turn, place]]}"


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
