"""From what all ranks handed in about a window to who came late in each of its steps, and why."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overlapkit.measure.across.handed import COLUMNS, PARTS, Handed, Key
from overlapkit.measure.across.meetings import StepArrivals, compare_step
from overlapkit.measure.across.ranks import LateRank, RankPart, Ranks
from overlapkit.measure.across.sequence import Mismatch, find_mismatch, name_odd

LOCAL = PARTS
"""Parts of a step that a rank spends without the others, where its wrapper is one of ours."""

_NOTABLE = 0.05  # of a step: below, somebody is always the last
_SHOWN = 8

Floats = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """One step on all ranks. Microseconds.

    Attributes:
        step: Its index.
        period: Of the median rank.
        culprit: The latest rank, or None where none was late by enough to matter.
        late: By how much.
        excess: How much longer than the median rank it took in each of PARTS.
        at: The collective at which others waited for it most, in words.
        arrivals: Of the collectives; None where this step's were not handed in.
    """

    step: int
    period: float
    culprit: int | None
    late: float
    excess: Floats
    at: str | None
    arrivals: StepArrivals | None


@dataclass(frozen=True, slots=True)
class JudgedWindow:
    """A window on all ranks.

    Attributes:
        steps: Its steps.
        sums: For each rank and column, microseconds over all steps, (world, columns).
        counts: Over how many, (world, columns).
        missing: Ranks that handed in nothing.
        mismatches: Found in it.
    """

    steps: tuple[JudgedStep, ...]
    sums: Floats
    counts: Floats
    missing: tuple[int, ...]
    mismatches: tuple[Mismatch, ...]


def judge(handed: Mapping[int, Handed], world: int, local: Sequence[str] = LOCAL) -> JudgedWindow:
    """Compare a window.

    Args:
        handed: By rank, of those that came.
        world: How many ranks there are.
        local: The parts in which no rank waits for another: with a wrapper whose collectives are not
            published, a wait for a late rank looks like work in the others.
    """
    steps = sorted(set.intersection(*(set(one.steps.tolist()) for one in handed.values())) if handed else ())
    table = np.full((len(steps), world, len(COLUMNS)), np.nan)
    for rank, one in handed.items():
        rows = np.searchsorted(one.steps, steps)
        table[:, rank] = np.where(one.parts[rows] < 0, np.nan, one.parts[rows])
    details = {rank: {detail.step: detail for detail in one.details} for rank, one in handed.items()}
    judged = []
    for row, step in enumerate(steps):
        here = {rank: of[step] for rank, of in details.items() if step in of}
        arrivals = compare_step(here, world) if len(here) > 1 else None
        judged.append(_judge_step(step, table[row], arrivals, local))
    issued = {rank: one.issued for rank, one in handed.items() if one.issued is not None}
    found = [find_mismatch(issued), _other_order(details)]
    return JudgedWindow(
        steps=tuple(judged),
        sums=np.nansum(table, axis=0),
        counts=np.isfinite(table).sum(axis=0),
        missing=tuple(rank for rank in range(world) if rank not in handed),
        mismatches=tuple(one for one in found if one is not None),
    )


def _judge_step(step: int, parts: Floats, arrivals: StepArrivals | None, local: Sequence[str]) -> JudgedStep:
    longer = parts[:, : len(PARTS)] - _median(parts[:, : len(PARTS)])
    period = float(_median(parts[:, len(COLUMNS) - 1 :])[0])
    if arrivals is not None:
        late, at = arrivals.late, arrivals.where
    else:
        mine = [PARTS.index(part) for part in local]
        late, at = np.nansum(longer[:, mine], axis=1), {}
    culprit = int(np.nanargmax(late))
    if not late[culprit] > _NOTABLE * period:
        return JudgedStep(step, period, None, 0.0, np.zeros(len(PARTS)), None, arrivals)
    excess = np.nan_to_num(longer[culprit])
    return JudgedStep(step, period, culprit, float(late[culprit]), excess, at.get(culprit), arrivals)


def _median(values: Floats) -> Floats:
    """Over ranks, the lower of two: with two ranks the faster one. NaN where nobody knows."""
    rows = np.sort(values, axis=0)
    known = np.isfinite(values).sum(axis=0)
    middle: Floats = rows[np.maximum((known - 1) // 2, 0), np.arange(values.shape[1])]
    return middle


def _other_order(details: Mapping[int, Mapping[int, Any]]) -> Mismatch | None:
    """Collectives of one kind begun in another order, in every step that both sides handed in in detail.

    Only whole listings of the same collectives are compared: at its edges a step may miss one.
    """
    steps = sorted({step for of in details.values() for step in of})
    found: Mismatch | None = None
    for step in steps:
        here = {rank: of[step].keys for rank, of in details.items() if step in of}
        found = _order_of_step(step, here)
        if found is None:
            return None
    return found


def _order_of_step(step: int, listings: Mapping[int, tuple[Key, ...]]) -> Mismatch | None:
    sequences: dict[tuple[Key, ...], dict[tuple[str, str], list[str]]] = {}
    for listing in set(listings.values()):
        kinds = sequences.setdefault(listing, {})
        for name, _, group in listing:
            kinds.setdefault((group, name.partition(" ")[0]), []).append(name)
    for kind in dict.fromkeys(kind for of in sequences.values() for kind in of):
        mine = {rank: sequences[keys][kind] for rank, keys in listings.items() if kind in sequences[keys]}
        if len({tuple(sorted(names)) for names in mine.values()}) != 1:
            continue
        for turn, names in enumerate(zip(*mine.values(), strict=True)):
            if len(set(names)) > 1:
                where = f"step {step}, {kind[1]} {turn}"
                return name_odd(kind[0], where, dict(zip(mine, names, strict=True)))
    return None


def sum_up(windows: Sequence[JudgedWindow], world: int, unseen: str | None) -> Ranks:
    """What the latest windows say together.

    Args:
        windows: In order, at least one.
        world: How many ranks there are.
        unseen: What cannot be told, and why.
    """
    steps = [step for window in windows for step in window.steps]
    seen = [step.arrivals for step in steps if step.arrivals is not None]
    compared = [step for step in steps if step.arrivals is not None] if seen else steps
    late = _late(compared)
    most = late[0].steps if late else 0
    sums, counts = (sum(getattr(window, name) for window in windows) for name in ("sums", "counts"))
    with np.errstate(invalid="ignore"):
        means: Floats = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan) / 1e3
    parts = {name: part for at, name in enumerate(COLUMNS) if (part := _part(means[:, at])) is not None}
    period = parts.pop("period").median_ms if "period" in parts else 0.0
    return Ranks(
        world=world,
        first_step=compared[0].step if compared else None,
        last_step=compared[-1].step if compared else None,
        steps=len(compared),
        parts=parts,
        collectives=sum(one.collectives for one in seen),
        waited_ms=_mean([one.waited for one in seen]),
        late=late,
        rotating=len(late) > 1 and most <= sum(one.steps for one in late) / 2,
        transfer_ms=_mean([one.exposed - one.waiting for one in seen]),
        waiting_ms=_mean([one.waiting for one in seen]),
        period_ms=period,
        missing=windows[-1].missing[:_SHOWN],
        mismatches=tuple({str(one): one for window in windows for one in window.mismatches}.values())[
            :_SHOWN
        ],
        unseen=unseen,
    )


def _late(steps: Sequence[JudgedStep]) -> tuple[LateRank, ...]:
    by_rank: dict[int, list[JudgedStep]] = {}
    for step in steps:
        if step.culprit is not None:
            by_rank.setdefault(step.culprit, []).append(step)
    found = []
    for rank, mine in by_rank.items():
        late = sum(step.late for step in mine) / len(mine)
        excess = np.mean([step.excess for step in mine], axis=0)
        longest = int(excess.argmax())
        explained = excess[longest] > late / 2
        places = Counter(step.at for step in mine if step.at is not None)
        found.append(
            LateRank(
                rank=rank,
                steps=len(mine),
                of=len(steps),
                late_ms=late / 1e3,
                phase=PARTS[longest] if explained else None,
                excess_ms=float(excess[longest]) / 1e3 if explained else 0.0,
                at=places.most_common(1)[0][0] if places else None,
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.steps * one.late_ms, one.rank)))


def _part(means: Floats) -> RankPart | None:
    if not np.isfinite(means).any():
        return None
    median, worst = float(_median(means[:, None])[0]), int(np.nanargmax(means))
    return RankPart(median, float(means[worst]), worst, float(means[worst]) - median)


def _mean(times: Sequence[float]) -> float | None:
    return sum(times) / len(times) / 1e3 if times else None
