"""Goodput against a job that is played through; the interval against brute force and Daly's formula."""

import math
import random

import pytest

from overlapkit.checkpoint.auto import daly
from overlapkit.plan.failures import Failures


def played(failures: Failures, ranks: int, interval: float, work: float, seed: int) -> float:
    """The share of useful time of one job, failure by failure."""
    rng = random.Random(seed)
    done = clock = 0.0
    rate = ranks / failures.mtbf_s
    next_failure = rng.expovariate(rate)
    while done < work:
        end = clock + interval + failures.stall_s
        if end <= next_failure:
            clock, done = end, done + interval
            continue
        clock = next_failure
        while True:  # a restart may fail, too
            next_failure = clock + rng.expovariate(rate)
            if clock + failures.restart_s <= next_failure:
                clock += failures.restart_s
                break
            clock = next_failure
    return done / clock


@pytest.mark.parametrize(
    ("ranks", "interval"), [(16, 3600.0), (1024, 600.0), (16384, 120.0)], ids=["16", "1024", "16384"]
)
def test_goodput_is_that_of_a_job_that_is_played_through(ranks: int, interval: float) -> None:
    failures = Failures(mtbf_s=5e7, restart_s=300.0, stall_s=5.0)
    mean = failures.mtbf_s / ranks
    shares = [played(failures, ranks, interval, 200 * mean, seed) for seed in range(20)]
    assert failures.goodput(ranks, interval) == pytest.approx(sum(shares) / len(shares), rel=0.02)


def test_writing_beside_the_steps_costs_as_much_as_a_longer_restart() -> None:
    slow = Failures(mtbf_s=5e7, restart_s=300.0, stall_s=5.0, write_s=60.0)
    assert slow.goodput(1024, 600.0) == Failures(5e7, 360.0, 5.0).goodput(1024, 600.0)


@pytest.mark.parametrize("stall", [0.1, 5.0, 90.0])
@pytest.mark.parametrize("ranks", [1, 64, 16384])
def test_the_best_interval_beats_every_other_and_is_near_dalys(stall: float, ranks: int) -> None:
    failures = Failures(mtbf_s=5e7, restart_s=300.0, stall_s=stall)
    best = failures.best_interval(ranks)
    most = failures.goodput(ranks, best)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert failures.goodput(ranks, best * factor) <= most
    assert best == pytest.approx(daly(stall, failures.mtbf_s / ranks), rel=0.01)


def test_saves_come_no_faster_than_they_are_written() -> None:
    assert Failures(1e6, 10.0, 0.001, write_s=500.0).best_interval(16) == 500.0


def test_free_saves_have_an_interval_and_a_hopeless_job_gets_nothing_done() -> None:
    free = Failures(mtbf_s=1e6, restart_s=0.0, stall_s=0.0)
    assert 0 < free.best_interval(1) <= 2.0
    assert free.goodput(1, free.best_interval(1)) == pytest.approx(1.0, abs=1e-5)
    assert Failures(mtbf_s=1.0, restart_s=1e6, stall_s=0.0).goodput(16, 1.0) == 0.0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"mtbf_s": 0.0}, ValueError, "mtbf_s=0.0: give a finite number, above 0"),
        ({"mtbf_s": math.inf}, ValueError, "mtbf_s=inf"),
        ({"stall_s": -1.0}, ValueError, "stall_s=-1.0: give a finite number, 0 or more"),
        ({"restart_s": "5"}, TypeError, "restart_s='5': give a number"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, object], error: type, words: str) -> None:
    good: dict[str, object] = {"mtbf_s": 1e6, "restart_s": 1.0, "stall_s": 1.0}
    with pytest.raises(error, match=words.replace("(", r"\(")):
        Failures(**{**good, **arguments})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks=0: give at least 1"):
        Failures(1e6, 1.0, 1.0).goodput(0, 1.0)
