"""Draws and the weights that decide on them, against a choice made one by one."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapkit.input.weights import Plan, uniform

NAMES = ["a", "b", "c"]
FIRST_DRAWS = [0.5489184285241209, 0.8830749232394378, 0.09858846083501838, 0.7174839595507776]
LATER_DRAWS = [0.42645870293489885, 0.5710331156356419]


def test_draws_never_change_between_versions() -> None:
    """A state is a position and counts: other draws would silently give a resumed run other samples."""
    assert uniform(0, 0, 0, 4).tolist() == FIRST_DRAWS
    assert uniform(7, 3, 2**40, 2**40 + 2).tolist() == LATER_DRAWS


def test_a_draw_is_a_function_of_its_place() -> None:
    whole = uniform(3, 1, 0, 1000)
    pieces = [uniform(3, 1, start, start + 7) for start in range(0, 994, 7)]
    assert np.concatenate(pieces).tolist() == whole[:994].tolist()
    assert whole.min() >= 0
    assert whole.max() < 1


def test_draws_are_uniform_and_unrelated() -> None:
    """5 standard deviations each: chi-square over 1,000 cells, and correlations of neighbours and epochs."""
    count = 1_000_000
    draws = uniform(0, 0, 0, count)
    cells = np.histogram(draws, bins=1000, range=(0, 1))[0]
    assert abs(((cells - 1000) ** 2 / 1000).sum() - 999) < 5 * math.sqrt(2 * 999)
    for other in (
        np.roll(draws, 1),
        np.roll(draws, 2),
        np.roll(draws, 32),
        uniform(0, 1, 0, count),
        uniform(1, 0, 0, count),
        uniform(0, 0, 2**33, 2**33 + count),
    ):
        assert abs(np.corrcoef(draws, other)[0, 1]) < 5 / math.sqrt(count)


WEIGHT = st.sampled_from([0, 0.0, 1, 3, 0.25, 1e-9, 1e9])
STEP = st.lists(WEIGHT, min_size=3, max_size=3).filter(any)


def one_by_one(
    steps: list[tuple[tuple[int, int], list[float]]], epoch: int, start: int, stop: int
) -> list[int]:
    """The source of each sample, by a walk over the steps and another over the weights."""
    chosen = []
    for at in range(start, stop):
        weights = [weights for place, weights in steps if place <= (epoch, at)][-1]
        left = float(uniform(5, epoch, at, at + 1)[0]) * sum(weights)
        for source, weight in enumerate(weights):
            if weight and left < sum(weights[: source + 1]):
                chosen.append(source)
                break
    return chosen


@given(
    first=STEP,
    changes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), STEP), max_size=5),
    epoch=st.integers(0, 3),
    start=st.integers(0, 60),
    count=st.integers(1, 60),
)
def test_each_sample_is_drawn_with_the_weights_of_its_place(
    first: list[float], changes: list[tuple[int, int, list[float]]], epoch: int, start: int, count: int
) -> None:
    plan = Plan(NAMES, dict(zip(NAMES, first, strict=True)))
    steps = [((0, 0), first)]
    for at_epoch, at, weights in sorted(changes):
        plan.set((at_epoch, at), dict(zip(NAMES, weights, strict=True)), (0, 0))
        steps = [step for step in steps if step[0] < (at_epoch, at)] + [((at_epoch, at), weights)]
    want = one_by_one(steps, epoch, start, start + count)
    assert plan.choose(5, epoch, start, start + count).tolist() == want
    again = Plan.from_state(NAMES, plan.state((epoch, start)))
    assert again.choose(5, epoch, start, start + count).tolist() == want
    assert again.at((epoch, start)) == plan.at((epoch, start))


def test_a_change_replaces_what_was_to_come() -> None:
    plan = Plan(["a", "b"], [(0, {"a": 1, "b": 0}), (10, {"a": 0, "b": 1}), (20, {"a": 1, "b": 1})])
    assert [plan.at((0, at))["b"] for at in (0, 9, 10, 19, 20)] == [0, 0, 1, 1, 1]
    assert plan.at((1, 0)) == {"a": 1, "b": 1}, "the last of a schedule stays in force"
    plan.set((0, 5), {"a": 2, "b": 3}, (0, 0))
    assert [plan.at((0, at))["b"] for at in (4, 5, 10, 20)] == [0, 3, 3, 3]
    assert plan.state((0, 7)) == [[0, 5, 2.0, 3.0]]


def test_proportions() -> None:
    weights = {"a": 7, "b": 2, "c": 1}
    counts = np.bincount(Plan(NAMES, weights).choose(0, 0, 0, 1_000_000))
    for count, weight in zip(counts, weights.values(), strict=True):
        share = weight / 10
        assert abs(count - share * 1e6) < 5 * math.sqrt(1e6 * share * (1 - share))


def test_a_run_of_changes_is_bounded() -> None:
    plan = Plan(["a"], {"a": 1})
    for at in range(3000):
        plan.set((0, at), {"a": 1 + at}, (0, at))
    assert len(plan.state((0, 0))) == 1001
    assert plan.at((0, 2500)) == {"a": 2501}
    assert plan.choose(0, 0, 2990, 3010).tolist() == [0] * 20


def test_what_is_in_force_or_to_come_is_never_forgotten() -> None:
    """Changes far ahead of the reader, and a schedule of more steps than are remembered behind it."""
    plan = Plan(["a"], {"a": 1})
    for at in range(3000):
        plan.set((0, 10 + at), {"a": 2 + at}, (0, 5))
    assert [plan.at((0, at))["a"] for at in (5, 10, 3009)] == [1, 2, 3001]
    plan = Plan(["a"], [(at, {"a": 1 + at}) for at in range(3000)])
    plan.set((0, 2999), {"a": 7}, (0, 20))
    assert [plan.at((0, at))["a"] for at in (0, 20, 2998, 2999)] == [1, 21, 2999, 7]
    plan.set((1, 0), {"a": 8}, (1, 0))
    assert [plan.at(place)["a"] for place in ((0, 2998), (0, 2999), (1, 0))] == [2999, 7, 8]


def test_numbers_of_numpy() -> None:
    given = {"a": np.float32(0.5), "b": np.int64(2), "c": np.float16(0)}
    assert Plan(NAMES, [(np.int64(0), given)]).state((0, 0)) == [[0, 0, 0.5, 2.0, 0.0]]  # type: ignore[list-item]
    for weight in (np.float32("nan"), np.float32("inf"), np.float32(-1), np.True_):
        with pytest.raises(ValueError, match=r"weights\['a'\]=.*: a weight is a number from 0 to 1e\+300"):
            Plan(NAMES, {**given, "a": weight})


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (
            {"a": 1, "b": 1},
            ValueError,
            "weights are of 'a', 'b', sources are 'a', 'b', 'c': give one to each",
        ),
        ({"a": 1, "b": 1, "c": 1, "d": 1}, ValueError, "weights are of .*'d'"),
        ({}, ValueError, "weights are of nothing"),
        ({"a": -1, "b": 1, "c": 1}, ValueError, r"weights\['a'\]=-1: a weight is a number from 0 to 1e\+300"),
        ({"a": math.nan, "b": 1, "c": 1}, ValueError, r"weights\['a'\]=nan"),
        ({"a": math.inf, "b": 1, "c": 1}, ValueError, r"weights\['a'\]=inf"),
        ({"a": "1", "b": 1, "c": 1}, ValueError, r"weights\['a'\]='1'"),
        ({"a": True, "b": 1, "c": 1}, ValueError, r"weights\['a'\]=True"),
        ({"a": 0, "b": 0, "c": 0.0}, ValueError, "at least one weight is above 0"),
        ([0.5, 0.3, 0.2], ValueError, "a schedule is"),
        ([], TypeError, "give one weight for each source"),
        (None, TypeError, "weights=None"),
        ("abc", TypeError, "weights='abc'"),
        ([(0, [1, 1, 1])], TypeError, r"weights=\[1, 1, 1\]: give one weight for each of a, b, c"),
        ([(1, {"a": 1, "b": 1, "c": 1})], ValueError, "a schedule is"),
        ([(0, {"a": 1, "b": 1, "c": 1})] * 2, ValueError, "rising"),
        ([(0, {"a": 1, "b": 1, "c": 1}), (2.5, {"a": 1, "b": 1, "c": 1})], ValueError, "rising"),
        ([(False, {"a": 1, "b": 1, "c": 1})], ValueError, "rising"),
        ([(0, {"a": 1, "b": 1, "c": 1}), (5, {"a": 1})], ValueError, "weights are of 'a'"),
    ],
    ids=str,
)
def test_weights_that_are_none(weights: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Plan(NAMES, weights)
    if isinstance(weights, dict):
        plan = Plan(NAMES, {"a": 1, "b": 1, "c": 1})
        with pytest.raises(error, match=message):
            plan.set((0, 5), weights, (0, 0))
        assert plan.at((0, 5)) == {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize(
    "state",
    [
        [],
        None,
        3,
        [[0, 0, 1.0]],
        [[0, 0, 1.0, 1.0, -1.0]],
        [[0, 0, 0, 0, 0]],
        [["x", 0, 1, 1, 1]],
        [["0", 0, 1, 1, 1]],
        [[0, 0.0, 1, 1, 1]],
        [[False, 0, 1, 1, 1]],
        [3],
        [[0, 5, 1, 1, 1], [0, 0, 1, 1, 1]],
    ],
)
def test_a_damaged_state_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="state has weights .* damaged"):
        Plan.from_state(NAMES, state)
