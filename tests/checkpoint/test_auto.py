"""every="auto": the interval is Daly's, all ranks save at the same calls, and a lost verdict heals."""

import itertools
import math
import random
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from overlapkit.checkpoint import Checkpointer, RankFailed
from overlapkit.checkpoint.auto import Auto, Rule, daly, next_due
from overlapkit.checkpoint.save import not_due
from tests.ranks import run_ranks


def lost(interval, cost, mtbf):
    """The share of time lost with failures at random, exactly: Daly's model, without the restarts."""
    return (math.exp((interval + cost) / mtbf) - 1) * mtbf / interval - 1


@pytest.mark.parametrize(("cost", "mtbf"), [(0.3, 3600), (10, 3600), (60, 86400), (300, 1000), (1e-4, 1e6)])
def test_the_interval_loses_the_least(cost, mtbf):
    """Against a search by brute force of the expected loss."""
    candidates = [mtbf * 10 ** (exponent / 200) for exponent in range(-1400, 200)]
    best = min(candidates, key=lambda interval: lost(interval, cost, mtbf))
    assert daly(cost, mtbf) == pytest.approx(best, rel=0.03)
    assert daly(cost, mtbf) + cost == pytest.approx(math.sqrt(2 * cost * mtbf), rel=0.2)  # Young's


def test_where_a_save_takes_longer_than_the_job_lives():
    assert daly(100, 10) == 10


def by_hand(call, rules):
    every = [rule.every for rule in rules if rule.after < call][-1]
    return call % every == 0


def test_what_is_due_against_brute_force():
    rng = random.Random(1)
    for _ in range(300):
        starts = [0, *sorted(rng.sample(range(1, 60), 3))]
        rules = [Rule(start, 2 ** rng.randint(0, 4)) for start in starts]
        at = rng.randint(0, 70)
        assert next_due(at, rules) == next(c for c in itertools.count(at + 1) if by_hand(c, rules))


class Loop:
    """A training loop in made-up time: every step takes one second, a save takes what it is told."""

    def __init__(self, mtbf, in_flight=1, step_s=1.0):
        self.now = random.random() * 1e6
        self.auto = Auto(mtbf, in_flight, lambda: self.now)
        self.step_s = step_s
        self.saved = []

    def run(self, calls, stall_s, took_s=0.0, slow_s=0.0):
        first = self.calls + 1 if self.saved else 1
        busy = False
        for call in range(first, first + calls):
            self.now += self.step_s + (slow_s if busy else 0)
            if call % 7 == 0:
                self.now += 50 * self.step_s  # an evaluation
            save = None
            busy = False
            if self.auto.enter(call, step=0):
                self.saved.append(call)
                save = not_due(0)
                save._blocked_s = stall_s
                self.now += stall_s
                self.auto.follow(self.auto.decide(call, took_s, [self.auto.report()]))
                busy = True
            self.auto.leave(save, busy)
            self.calls = call


@pytest.mark.parametrize(
    ("in_flight", "begins"), [(1, [16, 32, 48, 64, 128, 192]), (3, [16, 32, 48, 64, 80, 96, 128, 192])]
)
def test_it_finds_the_interval(in_flight, begins):
    loop = Loop(mtbf=3600.0, in_flight=in_flight)
    loop.run(4000, stall_s=0.5)
    assert loop.saved[: len(begins)] == begins  # it grows twofold at a time
    assert {b - a for a, b in itertools.pairwise(loop.saved[len(begins) :])} == {
        64
    }  # sqrt(2 x 0.5 x 3600) = 60


def test_slower_steps_count_as_cost_and_an_evaluation_does_not():
    loop = Loop(mtbf=3600.0)
    loop.run(4000, stall_s=0.0, slow_s=0.5)
    assert loop.saved[-1] - loop.saved[-2] == 64
    assert loop.auto._cost == pytest.approx(0.5)


def test_a_wait_in_the_optimizers_step_is_counted_once():
    loop = Loop(mtbf=3600.0)
    loop.auto._rules = [Rule(0, 2)]
    for call in range(1, 20):
        save = None
        if loop.auto.enter(call, step=0):
            save = not_due(0)
            save._staging = SimpleNamespace(stall_s=0.25)
        loop.auto.leave(save, busy=save is not None)
        loop.now += 1.0 if save is None else 1.25
    assert loop.auto._cost == pytest.approx(0.25)


def test_half_of_the_time_nothing_is_written():
    loop = Loop(mtbf=3600.0)
    loop.run(4000, stall_s=1e-6, took_s=100.0)
    assert loop.saved[-1] - loop.saved[-2] == 256  # 200 steps


def test_it_follows_when_saves_get_cheaper_or_dearer():
    loop = Loop(mtbf=3600.0)
    loop.run(3000, stall_s=0.5)
    loop.run(20000, stall_s=32.0)
    assert loop.saved[-1] - loop.saved[-2] == 512
    loop.run(20000, stall_s=0.001)
    assert loop.saved[-1] - loop.saved[-2] == 2


def test_steps_that_take_no_time_end_in_no_giant_leap():
    loop = Loop(mtbf=3600.0, step_s=0.0)
    loop.run(1000, stall_s=0.5)
    assert loop.saved == [16, 32, 48, *(2**n for n in range(6, 10))]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_ranks_with_other_clocks_and_delays_save_at_the_same_calls(tmp_path, in_flight):
    """Nothing holds the ranks together but the saves: one runs far ahead, its clock is another one's."""
    due = []

    def run(rank):
        rng = random.Random(rank)
        ticks = itertools.accumulate(iter(lambda: rng.random() * 10 ** rng.randint(-3, 1), None))
        with Checkpointer(
            tmp_path, every="auto", mtbf=20.0, in_flight=in_flight, keep=1, timeout=20
        ) as checkpointer:
            checkpointer._every._clock = lambda: next(ticks)
            checkpointer._every._rules = [Rule(0, 2)]
            for call in range(1, 150):
                if rng.random() < 0.1:
                    time.sleep(rng.random() * 0.05)
                if checkpointer.save(call, {"x": torch.ones(3)}).due:
                    due.append(call)
            checkpointer.wait()
        return due, len({rule.every for rule in checkpointer._every._rules})

    one, other = run_ranks(2, run)
    assert one == other
    assert one[0][:3] == [2, 4, 6]
    assert len({b - a for a, b in itertools.pairwise(one[0])}) > 1  # the interval did change


def test_a_rank_that_missed_a_verdict_is_back_in_step_by_itself(tmp_path):
    def run(rank):
        due, failed = [], 0
        with Checkpointer(tmp_path, every="auto", mtbf=1e6, keep=1, timeout=0.5) as checkpointer:
            auto = checkpointer._every
            auto._rules = [Rule(0, 2)]
            follow, told = auto.follow, itertools.count()
            auto.decide = lambda call, took, reports: {"rules": [Rule(0, 2)] if call < 8 else [Rule(8, 4)]}
            if rank == 1:
                auto.follow = lambda verdict: None if next(told) in (3, 4) else follow(verdict)
            for call in range(1, 41):
                dist.barrier()
                try:
                    save = checkpointer.save(call, {"x": 1})
                except RankFailed:  # of the save before
                    failed += 1
                if save.due:
                    due.append(call)
                    save.committed.settle()
            dist.barrier()
        return due, auto._rules

    (mine, rules), (other, there) = run_ranks(2, run)
    assert mine[:4] == other[:4] == [2, 4, 6, 8]
    assert mine[-4:] == other[-4:] == [28, 32, 36, 40]
    assert rules == there == [Rule(8, 4)]
    assert set(other) > set(mine)  # it did make saves by the old rule


def test_the_first_saves_come_at_stated_calls(tmp_path):
    with Checkpointer(tmp_path, every="auto", mtbf=1e9) as checkpointer:
        due = [call for call in range(1, 200) if checkpointer.save(1000 + call, {"x": 1}).due]
    assert due[:3] == [16, 32, 48]
    assert due[3:] == [64, 128]  # a save costs something, so at this mtbf they are as far apart as may be
