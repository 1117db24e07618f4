"""The decision tree over figures with known answers; fits and rounds against their definitions."""

import itertools

import pytest

from overlapkit.doctor.line import Layer
from overlapkit.doctor.link.fit import WIRE, fit
from overlapkit.doctor.link.judge import judge
from overlapkit.doctor.link.rounds import rounds

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)


@pytest.mark.parametrize("world", [*range(2, 10), 64])
def test_rounds_hold_every_pair_once_and_no_rank_twice(world):
    found = rounds(world)
    assert sorted(pair for one in found for pair in one) == list(itertools.combinations(range(world), 2))
    for one in found:
        ranks = [rank for pair in one for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert len(found) == world - 1 + world % 2


@pytest.mark.parametrize(("alpha", "beta"), [(20e-6, 200e9), (1e-3, 1e8), (0.0, 5e9)])
def test_a_fit_finds_what_the_times_were_made_of(alpha, beta):
    factor = WIRE["all_reduce"](8)
    assert factor == 1.75  # 2 (n - 1) / n
    line = fit(SIZES, [alpha + size * factor / beta for size in SIZES], factor)
    assert line.alpha == pytest.approx(alpha, abs=1e-9)
    assert line.beta == pytest.approx(beta, rel=1e-6)


def test_a_fit_of_odd_times_stays_possible():
    assert fit(SIZES, [1e-3] * 4, 1.0).beta > 1e12  # all is latency
    assert fit(SIZES, [4e-3, 3e-3, 2e-3, 1e-3], 1.0) == (1e-3, float("inf"))
    line = fit(SIZES, [1e-9, 1e-5, 1e-3, 1e-1], 1.0)  # faster than linear: no negative latency
    assert line.alpha == 0.0
    assert 0 < line.beta < float("inf")


def figures(world, slow=None, work=None, rounds=None):
    """What `measure` returns where everything is well, but for pairs that take so many times as long."""
    pairs = {f"{a}-{b}": 0.01 for a, b in itertools.combinations(range(world), 2)}
    for key, times in (slow or {}).items():
        pairs[key] *= times
    return {
        "world": world,
        "collectives": {kind: {str(size): 1e-4 + size / 1e9 for size in SIZES} for kind in WIRE},
        "pairs": pairs,
        "pair_bytes": 1 << 20,
        "rounds": rounds or max(0, world - 1),
        "all_rounds": max(0, world - 1),
        "work": work or [0.1] * world,
    }


def walk(figures, lines=(), hosts=None):
    found = judge(figures, lines, hosts or ["a"] * figures["world"])
    return {line.name: line for line in found}, found


def test_a_well_job_walks_through():
    by_name, found = walk(figures(4))
    assert [line.name for line in found] == [
        "all-reduce", "all-gather", "link", "transport", "environment", "topology", "late rank",
    ]  # fmt: skip
    assert {line.state for line in found} == {"ok"}
    assert "6 pairs, none slow: 0.105 to 0.105 GB/s each way, usually 0.105" in by_name["topology"].saw
    assert "16 MiB reach" in by_name["all-reduce"].saw


def test_each_step_names_what_was_read():
    lines = [
        Layer("path").weak("nvlink", "GPU 1: 2 of 18 links are up", "cost", "reset it"),
        Layer("fabric").weak("counters", "symbols", "cost", "cable"),
        Layer("fabric").weak("gpudirect", "none", "cost", "modprobe"),
        Layer("nccl").weak("variables", "NCCL_P2P_DISABLE=1", "cost", "unset it"),
        Layer("loop").unknown("affinity", "not said"),
        Layer("gpu").weak("clocks", "hot", "cost", "cool it"),
        Layer("storage").weak("data", "slow", "cost", "move it"),
    ]
    by_name, _ = walk(figures(2), lines)
    assert by_name["link"].saw == "weak: path nvlink, fabric counters"
    assert by_name["link"].remedy == "first path nvlink: reset it"
    assert by_name["transport"].saw == "weak: fabric gpudirect"
    assert by_name["environment"].saw == "weak: nccl variables"
    by_name, _ = walk(figures(2), lines[4:])
    assert by_name["environment"].state == "unknown"
    assert by_name["link"].state == by_name["transport"].state == "ok"


PLACES = [
    # slow pairs and how many times, hosts, what is named
    ({"1-3": 5.0}, "aaaa", ["ranks 1 and 3 (a): 5.0 times"]),
    ({"0-2": 3.0, "1-2": 3.5, "2-3": 3.0}, "aaaa", ["rank 2 on a: its pairs are all slow, up to 3.5 times"]),
    ({"0-2": 3.0, "1-2": 3.0}, "abc", ["rank 2 on c: its pairs are all slow"]),
    ({"0-1": 1.9}, "aaaa", []),
    # pairs between machines are compared with each other, and are no slow pairs of one machine
    ({"0-2": 20.0, "0-3": 20.0, "1-2": 20.0, "1-3": 20.0}, "aabb", []),
    ({"0-2": 20.0, "0-3": 20.0, "1-2": 20.0, "1-3": 90.0}, "aabb", ["ranks 1 and 3 (a and b): 4.5 times"]),
]


@pytest.mark.parametrize(("slow", "hosts", "named"), PLACES)
def test_slow_pairs_and_slow_ranks(slow, hosts, named):
    _, found = walk(figures(len(hosts), slow), hosts=list(hosts))
    seen = [line.saw for line in found if line.name == "topology" and line.state == "weak"]
    assert len(seen) == len(named), seen
    assert all(saw.startswith(name) for saw, name in zip(seen, named, strict=True))


def test_a_slow_rank_and_a_slow_pair_elsewhere_are_both_named():
    slow = {**{f"{min(5, r)}-{max(5, r)}": 4.0 for r in range(8) if r != 5}, "0-1": 6.0}
    _, found = walk(figures(8, slow))
    seen = [line.saw for line in found if line.name == "topology"]
    assert [saw.split(":")[0] for saw in seen] == ["rank 5 on a", "ranks 0 and 1 (a)"]


def test_of_many_slow_pairs_the_worst_are_named():
    slow = {f"{a}-{b}": 3.0 + a for a in range(4) for b in range(4, 8) if (a, b) != (0, 4)}
    _, found = walk(figures(8, slow))
    seen = [line.saw for line in found if line.name == "topology"]
    assert [saw.split(" times")[0] for saw in seen[:4]] == [f"ranks 3 and {b} (a): 6.0" for b in (4, 5, 6, 7)]
    assert seen[-1] == "and 10 more pairs, 3.0 to 5.0 times the usual one"


def test_one_pair_cannot_be_compared_and_rounds_left_out_are_said():
    by_name, _ = walk(figures(2, {"0-1": 50.0}))
    assert by_name["topology"].state == "ok"
    assert "nothing to compare it with" in by_name["topology"].saw
    by_name, _ = walk(figures(8, rounds=3))
    assert "(3 of 7 rounds: there was no time for more)" in by_name["topology"].saw


def test_a_late_rank_is_named():
    by_name, _ = walk(figures(4, work=[0.1, 0.11, 0.25, 0.1]))
    assert by_name["late rank"].saw == "rank 2: 2.5 times the others' time for the same compute"
    assert walk(figures(2, work=[0.3, 0.1]))[0]["late rank"].saw.startswith("rank 0: 3.0 times")
    assert walk(figures(4, work=[0.1, 0.14, 0.1, 0.12]))[0]["late rank"].state == "ok"
