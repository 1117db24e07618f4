"""Measures a job's links, phase by phase: every phase ends on all ranks, or says which rank did not come."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

from overlapkit.doctor.link.fit import WIRE
from overlapkit.doctor.link.measures import Measures, Plan
from overlapkit.doctor.link.rounds import rounds
from overlapkit.quorum import Quorum, RankFailed, Report

Progress = Callable[[int, int, str], None]
Figures = dict[str, Any]
_FEW, _MANY = 3, 30


def measure(quorum: Quorum, measures: Measures, plan: Plan, progress: Progress | None = None) -> Figures:
    """Measure; every rank calls this, and every rank gets the figures.

    Returns:
        "world"; "collectives": {kind: {size in bytes: seconds}}; "pairs": {"0-1": seconds}, with "rounds"
        measured of how many there are; "work": each rank's seconds for the same piece of compute.

    Raises:
        RankFailed: A rank did not come, or failed; the message names it.
    """
    world, steps = quorum.world, len(plan.sizes) * len(WIRE) + 2
    done = 0

    def shared(what: str, work: Callable[[], Report], judge: Callable[[list[Report]], Report]) -> Report:
        nonlocal done
        if progress is not None:
            progress(done, steps, what)
        done += 1
        # first all come, so that who is absent is named before anybody waits for it in a collective
        quorum.settle(f"{what}: begin", {}, lambda reports: {})
        return quorum.settle(what, _tried(work), lambda reports: judge(_unless_failed(reports)))

    found: Figures = {
        "world": world,
        "collectives": {kind: {} for kind in WIRE},
        "pair_bytes": plan.pair_bytes,
    }
    for kind in WIRE:
        for size in plan.sizes:
            told = shared(f"{kind} of {size} bytes", partial(_collective, measures, kind, size, plan), _least)
            found["collectives"][kind][str(size)] = told["seconds"]
    found |= shared(
        "pairs of ranks", lambda: _pairs(quorum.rank, world, measures, plan), lambda all: _joined(all, world)
    )
    work = shared(
        "each rank's own pace", lambda: _work(measures), lambda all: {"work": [r["work"] for r in all]}
    )
    return found | work


def quorum_of(rank: int, timeout: float) -> Quorum:
    """All ranks of the process group, of which rank 0 names who is absent.

    The others wait for that: rank 0 may first wait for a collective to be given up, then for their reports.
    """
    return Quorum("doctor", timeout if rank == 0 else 3 * timeout)


def _tried(work: Callable[[], Report]) -> Report:
    """Its report, or its error as one: that a rank's partner is gone says less than who is."""
    try:
        return work()
    except RuntimeError as error:
        return {"error": " ".join(str(error).split())[:160]}


def _unless_failed(reports: list[Report]) -> list[Report]:
    failed = [f"rank {rank}: {one['error']}" for rank, one in enumerate(reports) if "error" in one]
    if failed:
        raise RankFailed("; ".join(failed[:4]))
    return reports


def _collective(measures: Measures, kind: str, size: int, plan: Plan) -> Report:
    once = partial(measures.collective, kind, size)
    for _ in range(2):  # connections are made, buffers touched
        once()
    slowest = measures.largest(max(once() for _ in range(_FEW)))  # so that all ranks repeat equally often
    repeats = min(_MANY, max(_FEW, int(plan.each_s / max(slowest, 1e-6))))
    return {"seconds": median(once() for _ in range(repeats))}


def _pairs(rank: int, world: int, measures: Measures, plan: Plan) -> Report:
    """This rank's best time with each partner; as many rounds as there is time for.

    All rounds twice, where that fits: what disturbs a pair for a moment does not do so again.
    """
    found: dict[str, float] = {}
    planned = rounds(world)
    spent, done = 0.0, 0
    for pairs in planned * 2:
        partner = next((b if a == rank else a for a, b in pairs if rank in (a, b)), None)
        took = (
            [] if partner is None else [measures.exchange(partner, plan.pair_bytes) for _ in range(_FEW + 1)]
        )
        if took:  # the first one may have to connect
            found[str(partner)] = min(*took[1:], found.get(str(partner), float("inf")))
        spent = measures.largest(spent + sum(took))  # all ranks stop after the same round
        done += 1
        if spent > plan.rounds_s:
            break
    return {"pairs": found, "rounds": min(done, len(planned))}


def _work(measures: Measures) -> Report:
    for _ in range(2):
        measures.work()
    return {"work": min(measures.work() for _ in range(7))}


def _least(reports: Sequence[Report]) -> Report:
    """A rank that comes late to a collective waits least in it: its time is the transfer alone."""
    return {"seconds": min(report["seconds"] for report in reports)}


def _joined(reports: Sequence[Report], world: int) -> Report:
    """A pair is as slow as the slower of the two saw it."""
    pairs: dict[str, float] = {}
    for rank, report in enumerate(reports):
        for partner, seconds in report["pairs"].items():
            key = f"{min(rank, int(partner))}-{max(rank, int(partner))}"
            pairs[key] = max(pairs.get(key, 0.0), seconds)
    return {
        "pairs": pairs,
        "rounds": min(report["rounds"] for report in reports),
        "all_rounds": len(rounds(world)),
    }
