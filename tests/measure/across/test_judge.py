"""Who came late, from hand-written windows whose answer is known to the microsecond."""

import json

import numpy as np
import pytest
import torch

from overlapkit.measure.across.handed import COLUMNS, LIMIT_BYTES, decode, hand_in
from overlapkit.measure.across.judge import LOCAL, judge, sum_up
from overlapkit.measure.across.ranks import Ranks
from overlapkit.measure.across.words import is_late, remedy, tail_split, together
from tests.measure.across.steps import record, trace

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def window(ranks, steps, late, *, spans=None, stood=(600, 650), **parts):
    """Each rank's window, as it arrives: `late(step)` gives {rank: (phase, microseconds)}.

    A step stands still from `stood[0]`, later by what the rank itself is late, to `stood[1]`, later by what
    the latest is.
    """
    handed = {}
    for rank in range(ranks):
        mine = []
        for step in steps:
            delays = late(step)
            phase, own = delays.get(rank, (None, 0))
            last = max((delay for _, delay in delays.values()), default=0)
            seen = (spans or reduction)(rank, own, last)
            zero = 10**6 * rank + 5000 * step  # every rank has a clock of its own
            times = {"forward": 100, "backward": 800, "communication": last - own + 50, **parts}
            if phase is not None:
                times[phase] = (times.get(phase) or 0) + own
            waits = [(stood[0] + own, stood[1] + last)]
            mine.append((record(step, **times), trace(step, seen, zero=zero, waits=waits)))
        handed[rank] = decode(hand_in(mine).encode())
    return handed


def reduction(rank, own, last):
    """Two buckets: the first before anything can be late, the second when `own` is over; both take 50."""
    return [("all_reduce a", 200 + rank, 253), ("all_reduce b", 600 + own, 650 + last)]


def compared(handed, world=None, **options):
    world = world or len(handed)
    ranks = sum_up([judge(handed, world, **options)], world, None)
    assert Ranks.from_dict(json.loads(json.dumps(ranks.to_dict()))) == ranks  # as it goes to the others
    return ranks


def test_ranks_that_come_together():
    ranks = compared(window(4, range(1, 6), lambda step: {}))
    assert (ranks.steps, ranks.first_step, ranks.last_step, ranks.collectives) == (5, 1, 5, 10)
    assert (ranks.late, ranks.rotating, ranks.missing, ranks.mismatches) == ((), False, (), ())
    assert ranks.waited_ms == pytest.approx(0.0015)  # 3, 2, 1 and 0 us at the first bucket
    assert together(ranks)[1].startswith("yes (0.00 ms")
    assert not is_late(ranks)


@pytest.mark.parametrize(
    "phase", ["backward", "forward", "input", "optimizer", "checkpoint", "garbage", "other"]
)
@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_late_rank_is_named_with_its_phase_although_all_steps_are_equally_long(world, phase):
    ranks = compared(
        window(world, range(1, 9), lambda step: {1: (phase, 200)}, input=0, checkpoint=0, garbage=0)
    )
    assert ranks.parts["communication"].worst_ms == pytest.approx(0.25)
    (late,) = ranks.late
    assert (late.rank, late.steps, late.of, late.phase) == (1, 8, 8, phase)
    assert late.late_ms == pytest.approx(0.2, rel=0.05)
    assert late.excess_ms == pytest.approx(0.2)
    assert late.at == "all_reduce b, in backward"
    assert is_late(ranks)
    value, verdict, evidence = together(ranks)
    assert value == pytest.approx(0.2, rel=0.05)
    assert verdict.startswith("no, 0.2")
    assert evidence.startswith("rank 1 in 8 of 8 steps, 0.2 ms late, 0.2 ms of it longer in ")
    who, what = remedy(ranks, CPU)
    assert who == "rank 1"
    assert ("collect_garbage" in what) == (phase == "garbage")
    assert "GPU" not in what
    assert ("GPU's clocks" in remedy(ranks, GPU)[1]) == (phase in ("forward", "backward"))
    assert ranks.parts[phase].worst_rank == 1
    assert ranks.parts[phase].skew_ms == pytest.approx(0.2)


def test_a_culprit_that_rotates_is_found_by_the_step():
    ranks = compared(window(4, range(1, 13), lambda step: {step % 3: ("backward", 200)}))
    assert ranks.rotating
    assert sorted((late.rank, late.steps, late.phase) for late in ranks.late) == [
        (0, 4, "backward"),
        (1, 4, "backward"),
        (2, 4, "backward"),
    ]
    assert ranks.late_ms == pytest.approx(0.2, rel=0.05)
    assert "changes from step to step: rank 0 in 4 of 12 steps" in together(ranks)[2]
    who, what = remedy(ranks, CPU)
    assert who == "ranks 0, 1, 2"
    assert what.startswith("late in turn, in backward")


def test_one_rank_that_is_explained_is_late_in_no_turn():
    """The other is late in most steps, but costs less, and nothing that it does explains it."""
    phases = {0: ("communication", 100), 1: ("forward", 400)}
    ranks = compared(window(2, range(1, 20), lambda step: {step % 3 // 2: phases[step % 3 // 2]}))
    assert ranks.rotating
    assert [late.rank for late in ranks.explained] == [1]
    who, what = remedy(ranks, CPU)
    assert (who, what.partition(":")[0]) == ("rank 1", "it computes longer in forward")


def test_each_of_many_ranks_that_are_late_in_turn_counts():
    ranks = compared(window(32, range(1, 33), lambda step: {step % 32: ("backward", 200)}))
    assert ranks.rotating
    assert len(ranks.late) == 32
    assert ranks.late_ms == pytest.approx(0.2, rel=0.05)
    assert is_late(ranks)
    assert remedy(ranks, CPU)[0].endswith(" and 28 more")


def test_a_rank_that_is_late_in_few_steps_is_told_by_its_steps():
    ranks = compared(window(3, range(1, 11), lambda step: {2: ("forward", 300)} if step % 5 == 0 else {}))
    (late,) = ranks.late
    assert (late.rank, late.steps, late.of) == (2, 2, 10)
    assert ranks.late_ms == pytest.approx(late.late_ms / 5)


def test_the_exposed_time_is_split_into_transfer_and_waiting():
    ranks = compared(window(4, range(1, 6), lambda step: {3: ("backward", 400)}))
    assert ranks.transfer_ms == pytest.approx(0.05, abs=0.005)
    assert ranks.waiting_ms == pytest.approx(0.3)  # three of four ranks wait 0.4
    assert tail_split(ranks) == "0.05 ms transfer, 0.30 ms waiting for a late rank (mean of ranks)"


def test_collectives_that_queue_behind_a_late_one_do_not_count_its_delay_again():
    def queued(rank, own, last):
        return [(f"all_reduce {at}", 200 + at + own, 250 + 10 * at + last) for at in range(20)]

    late = {0: ("forward", 500)}
    ranks = compared(window(3, range(1, 5), lambda step: late, spans=queued, stood=(200, 440)))
    assert ranks.late[0].late_ms == pytest.approx(0.5, rel=0.02)
    assert ranks.waited_ms == pytest.approx(0.5 * 2 / 3, rel=0.02)


def test_what_buckets_wait_beside_backward_is_not_lateness():
    """Backward fills eight buckets, 20 apart; all of a late rank's are 150 later, and so is the end."""

    def buckets(rank, own, last):
        return [(f"all_reduce {at}", 200 + 20 * at + own, 205 + 20 * at + last) for at in range(8)]

    ranks = compared(
        window(2, range(1, 5), lambda step: {1: ("forward", 150)}, spans=buckets, stood=(340, 345))
    )
    assert ranks.late[0].late_ms == pytest.approx(0.15, rel=0.02)
    assert ranks.waiting_ms == pytest.approx(0.15 / 2, rel=0.02)


def test_groups_are_compared_each_on_its_own():
    def meshed(rank, own, last):
        half, pair = f"shard {rank // 2}", f"copies {rank % 2}"
        here = last if rank // 2 == 1 else 0  # rank 3 is late, and rank 2 waits for it
        scatter = ("reduce_scatter a", 600 + own, 650 + here, half)
        return [scatter, ("all_reduce a", scatter[2] + 1, 700 + last, pair)]

    ranks = compared(window(4, range(1, 6), lambda step: {3: ("backward", 200)}, spans=meshed))
    (late,) = ranks.late
    assert (late.rank, late.phase) == (3, "backward")
    assert late.late_ms == pytest.approx(0.2, rel=0.05)
    assert late.at == "reduce_scatter a, in backward"


def test_without_collectives_local_times_are_compared_as_far_as_they_are_local():
    handed = window(3, range(1, 6), lambda step: {1: ("forward", 300)}, spans=lambda *of: [])
    ranks = compared(handed)
    assert (ranks.collectives, ranks.waited_ms, ranks.transfer_ms) == (0, None, None)
    assert [(late.rank, late.phase, late.at) for late in ranks.late] == [(1, "forward", None)]
    assert compared(handed, local=[part for part in LOCAL if part != "forward"]).late == ()


def test_what_a_device_waited_is_not_taken_for_work():
    """On CUDA, backward of every rank holds its wait: arrivals say who, and where."""

    handed = window(3, range(1, 6), lambda step: {})
    late = window(3, range(1, 6), lambda step: {2: ("communication", 200)})  # nothing local is longer
    for one in (*handed.values(), *late.values()):
        one.parts[:, COLUMNS.index("communication")] = -1
    ranks = compared(late)
    (found,) = ranks.late
    assert (found.rank, found.phase, found.at) == (2, None, "all_reduce b, in backward")
    assert is_late(ranks)
    assert remedy(ranks, CPU)[1].startswith("others wait for it at all_reduce b")


def test_lateness_that_local_times_do_not_explain_is_the_transports():
    ranks = compared(window(3, range(1, 6), lambda step: {2: ("communication", 200)}))
    assert [late.rank for late in ranks.late] == [2]
    assert not is_late(ranks)
    value, verdict, evidence = together(ranks)
    assert value == pytest.approx(0.2, rel=0.05)
    assert verdict.startswith("no, 0.2")
    assert "nothing that these ranks do explains it" in evidence


def test_ranks_that_handed_in_nothing_are_named_and_the_others_compared():
    handed = window(4, range(1, 6), lambda step: {1: ("backward", 200)})
    del handed[2]
    ranks = compared(handed, world=4)
    assert ranks.missing == (2,)
    assert [late.rank for late in ranks.late] == [1]
    assert "nothing came from rank 2" in together(ranks)[2]


def test_only_steps_that_all_measured_are_compared():
    handed = window(2, range(1, 6), lambda step: {})
    handed[1] = window(2, range(3, 8), lambda step: {})[1]
    ranks = compared(handed)
    assert (ranks.first_step, ranks.last_step, ranks.steps) == (3, 5, 3)
    apart = {0: window(2, [1], lambda step: {})[0], 1: window(2, [2], lambda step: {})[1]}
    assert compared(apart).steps == 0


def test_units_reduced_in_another_order_are_named_with_both_sides():
    def swapped(rank, own, last):
        names = ["b", "a"] if rank == 2 else ["a", "b"]
        return [(f"reduce_scatter {name}", 200 + 100 * at, 250 + 100 * at) for at, name in enumerate(names)]

    ranks = compared(window(4, range(1, 6), lambda step: {}, spans=swapped))
    (found,) = ranks.mismatches
    assert (found.ranks, found.issued, found.others) == ((2,), "reduce_scatter b", "reduce_scatter a")
    assert found.where == "step 5, reduce_scatter 0"
    assert together(ranks)[1] == "no, collectives differ"


def test_a_collective_that_one_step_lost_at_its_edge_is_no_mismatch():
    def edged(rank, own, last):
        return [("a", 200, 250), ("b", 300, 350), *([("a", 995, 999)] if rank else [])]

    assert compared(window(3, range(1, 6), lambda step: {}, spans=edged)).mismatches == ()


def test_a_thousand_ranks_hand_in_little_and_one_of_them_is_found():
    world, steps = 1024, list(range(20, 40))

    def layers(rank, own, last):
        after = [(0, 0)] * 100 + [(own, last)] * 100
        names = [f"{what} layers.{at}" for what in ("all_gather", "reduce_scatter") for at in range(100)]
        seen = zip(names, range(0, 2000, 10), after, strict=True)
        return [(name, at + mine, at + 9 + all_) for name, at, (mine, all_) in seen]

    mine = window(2, steps, lambda step: {1: ("backward", 300)}, spans=layers, stood=(1000, 2000))
    assert len(mine[0].details) == 5  # of 200 collectives each
    handed = {rank: mine[1] if rank == 777 else mine[0] for rank in range(world)}
    assert max(len(mine[rank].encode()) for rank in mine) < LIMIT_BYTES
    judged = judge(handed, world)
    ranks = sum_up([judged] * 6, world, None)
    assert [(late.rank, late.steps, late.of) for late in ranks.late] == [(777, 30, 30)]
    assert len(json.dumps(ranks.to_dict())) < 4096


def test_nothing_known_is_nothing_said():
    ranks = compared(window(2, [], lambda step: {}))
    assert (ranks.steps, ranks.parts, ranks.late, ranks.period_ms) == (0, {}, (), 0.0)
    assert np.isfinite(ranks.late_ms)
