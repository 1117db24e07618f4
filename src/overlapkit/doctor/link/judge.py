"""The decision tree of slow collectives, walked over what was read and measured.

Link, transport, environment, topology, late rank: each says what it saw. Begin with the first weak one.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any

from overlapkit.counted import counted
from overlapkit.doctor.layers.job import JOB
from overlapkit.doctor.line import Line, joined, spans
from overlapkit.doctor.link.fit import WIRE, fit

# Times the usual pair of the same kind. Sockets and switches between make less of a difference; what makes
# a link half as fast (lanes, a port's rate) was read before.
_SLOW_PAIR = 2.0
_NAMED = 5  # pairs
_SLOW_WORK = 1.5  # times the usual rank: GPUs of one model differ by some percent, a throttled one by half
_STEPS: dict[str, dict[str, set[str] | None]] = {
    "link": {"path": None, "fabric": {"ports", "nic links", "counters"}},
    "transport": {"nccl": {"version", "transport"}, "fabric": {"gpudirect", "sockets", "hostname"}},
    "environment": {
        "nccl": {"variables", "names"},
        "kernels": {"left on"},
        "loop": {"affinity", "cores", "cpu quota", "threads", "locked memory", "swap"},
        "job": {"agreement"},
    },
}
"""For each of the first steps the lines that it looks at; None for all of a layer."""


def judge(figures: Mapping[str, Any], lines: Sequence[Line], hosts: Sequence[str]) -> list[Line]:
    """The lines of the walk, and one of what the collectives reached.

    Args:
        figures: Of `measure`.
        lines: All that was read before.
        hosts: Each rank's machine.
    """
    walk = [_read(step, layers, lines) for step, layers in _STEPS.items()]
    walk += _topology(figures, hosts)
    walk.append(_late(figures["work"]))
    return [*_collectives(figures), *walk]


def _collectives(figures: Mapping[str, Any]) -> Iterator[Line]:
    world = figures["world"]
    for kind, times in figures["collectives"].items():
        sizes = sorted(map(int, times))
        line = fit(sizes, [times[str(size)] for size in sizes], WIRE[kind](world))
        largest = sizes[-1]
        reached = largest * WIRE[kind](world) / times[str(largest)]
        beta = "no limit seen" if line.beta == float("inf") else f"{line.beta / 1e9:.3g} GB/s"
        yield JOB.ok(
            kind.replace("_", "-"),
            f"{world} ranks: {line.alpha * 1e6:.0f} us + bytes on the wire at {beta}; "
            f"{largest >> 20} MiB reach {reached / 1e9:.3g} GB/s (bus bandwidth)",
        )


def _read(step: str, layers: Mapping[str, set[str] | None], lines: Sequence[Line]) -> Line:
    """A step whose evidence was read, not measured."""
    seen = [
        line for line in lines if line.layer in layers and line.name in (layers[line.layer] or {line.name})
    ]
    weak = [line for line in seen if line.state == "weak"]
    if weak:
        names = joined(dict.fromkeys(f"{line.layer} {line.name}" for line in weak))
        return JOB.weak(
            step, f"weak: {names}", weak[0].cost, f"first {weak[0].layer} {weak[0].name}: {weak[0].remedy}"
        )
    if dark := [f"{line.layer} {line.name}" for line in seen if line.state == "unknown"]:
        return JOB.unknown(step, f"nothing weak; could not be read: {joined(dict.fromkeys(dark))}")
    told = [line.saw for line in seen if line.name == "transport"] or [
        f"nothing weak in {counted(len(seen), 'line')}"
    ]
    return JOB.ok(step, told[0])


def _topology(figures: Mapping[str, Any], hosts: Sequence[str]) -> Iterator[Line]:
    """Ranks all of whose pairs are slow, then the pairs that are slow without such a rank."""
    pairs = {(int(a), int(b)): took for key, took in figures["pairs"].items() for a, b in [key.split("-")]}
    measured, rounds = figures["rounds"], figures["all_rounds"]
    part = "" if measured == rounds else f" ({measured} of {rounds} rounds: there was no time for more)"
    usual = figures["pair_bytes"] / median_low(sorted(pairs.values())) / 1e9
    if len(pairs) < 2:
        yield JOB.ok("topology", f"one pair ({usual:.3g} GB/s each way): nothing to compare it with")
        return
    slow = {pair: ratio for pair, ratio in _ratios(pairs, hosts).items() if ratio > _SLOW_PAIR}
    if not slow:
        least, most = (figures["pair_bytes"] / of(pairs.values()) / 1e9 for of in (max, min))
        rates = f"{least:.3g} to {most:.3g} GB/s each way, usually {usual:.3g}"
        saw = f"{counted(len(pairs), 'pair')}, none slow: {rates}{part}"
        yield JOB.ok("topology", saw)
        return
    ranks = [rank for rank in range(figures["world"]) if _all_slow(rank, pairs, slow)]
    if len(ranks) >= figures["world"] / 2:  # then it is no matter of single ranks
        ranks = []
    for rank in ranks:
        worst = max(ratio for pair, ratio in slow.items() if rank in pair)
        yield JOB.weak(
            "topology",
            f"rank {rank} on {hosts[rank]}: its pairs are all slow, up to {worst:.1f} times the usual{part}",
            "rings and trees go through it: every collective has its rate",
            "look at this rank's own lines (path, fabric, loop); leave its machine out and measure again",
        )
    yield from _slow_pairs(
        {pair: ratio for pair, ratio in slow.items() if not {*pair} & {*ranks}}, hosts, part
    )


def _slow_pairs(slow: Mapping[tuple[int, int], float], hosts: Sequence[str], part: str) -> Iterator[Line]:
    """The worst of them by name."""
    worst_first = sorted(slow.items(), key=lambda one: -one[1])
    for (a, b), ratio in worst_first[:_NAMED]:
        where = hosts[a] if hosts[a] == hosts[b] else f"{hosts[a]} and {hosts[b]}"
        yield JOB.weak(
            "topology",
            f"ranks {a} and {b} ({where}): {ratio:.1f} times the usual pair{part}",
            "a ring that takes this way has its rate",
            "look at what only these two share: NVLink, a PCIe switch, a cable or switch between them; "
            "order ranks so that they are no neighbours",
        )
    if more := worst_first[_NAMED:]:
        yield JOB.weak(
            "topology",
            f"and {len(more)} more pairs, {more[-1][1]:.1f} to {more[0][1]:.1f} times the usual one",
            "where slow pairs are many, the network between two groups of ranks is",
            "see which machines the pairs above have in common (--json has all pairs)",
        )


def _ratios(pairs: Mapping[tuple[int, int], float], hosts: Sequence[str]) -> dict[tuple[int, int], float]:
    """Each pair's time, in times of a fast pair of its kind: of one machine, or between machines.

    The lower quartile is what is usual: where one rank of three is slow, so are two of three pairs.
    """
    kinds: dict[bool, list[float]] = {}
    for (a, b), took in pairs.items():
        kinds.setdefault(hosts[a] == hosts[b], []).append(took)
    usual = {kind: sorted(times)[(len(times) - 1) // 4] for kind, times in kinds.items()}
    return {(a, b): took / usual[hosts[a] == hosts[b]] for (a, b), took in pairs.items()}


def _all_slow(
    rank: int, pairs: Mapping[tuple[int, int], float], slow: Mapping[tuple[int, int], float]
) -> bool:
    own = [pair for pair in pairs if rank in pair]
    return len(own) > 1 and all(pair in slow for pair in own)


def _late(work: Sequence[float]) -> Line:
    usual = median_low(sorted(work)) if len(work) > 2 else min(work)
    late = [rank for rank, took in enumerate(work) if took > _SLOW_WORK * usual]
    if not late:
        return JOB.ok(
            "late rank", f"the same compute takes {min(work) * 1e3:.3g} to {max(work) * 1e3:.3g} ms"
        )
    worst = max(work[rank] for rank in late) / usual
    return JOB.weak(
        "late rank",
        f"rank {spans(late)}: {worst:.1f} times the others' time for the same compute",
        "it comes last to every collective, and all others wait: communication looks slow and is not",
        "look at its clocks, heat and other processes (gpu), its cores and binding (loop)",
    )
