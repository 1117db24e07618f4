"""The order of an epoch against brute force: all positions, all ranks, all hand-overs between world sizes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapkit.input.order import Order, permute

ORDER_OF_TEN = [3, 2, 4, 9, 8, 7, 6, 0]
ORDER_OF_MANY = [1294710720808, 669376783574, 1392380120459]


@given(size=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_permute_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, seed, epoch)), np.arange(size))


@given(size=st.integers(2**50, 2**62), positions=st.lists(st.integers(0, 2**50 - 1), min_size=1, unique=True))
def test_huge_sizes_stay_in_range_and_distinct(size: int, positions: list[int]) -> None:
    samples = permute(np.array(positions), size, 3, 1)
    assert samples.min() >= 0
    assert samples.max() < size
    assert len(set(samples.tolist())) == len(positions)


def test_a_position_has_its_sample_however_it_is_asked_for() -> None:
    whole = permute(np.arange(1001), 1001, 7, 2)
    assert whole.dtype == np.int64
    one_by_one = [int(permute(np.array([position]), 1001, 7, 2)[0]) for position in range(1001)]
    assert whole.tolist() == one_by_one


def test_the_order_never_changes_between_versions() -> None:
    """A state is one position: another function would silently give a resumed run other samples."""
    assert permute(np.arange(8), 10, 0, 0).tolist() == ORDER_OF_TEN
    assert permute(np.array([0, 1, 2**40]), 2**41 + 5, 123, 4).tolist() == ORDER_OF_MANY


@pytest.mark.parametrize("changed", [{"seed": 8}, {"epoch": 3}])
def test_another_seed_or_epoch_is_another_order(changed: dict[str, int]) -> None:
    one = permute(np.arange(1000), 1000, seed=7, epoch=2)
    other = permute(np.arange(1000), 1000, **{"seed": 7, "epoch": 2, **changed})
    assert (one == other).sum() < 10  # 1 by chance


def test_every_sample_is_equally_likely_everywhere() -> None:
    """Chi-square over (position, sample); 5 standard deviations of its distribution."""
    size, draws = 50, 4000
    seen = np.zeros((size, size))
    for seed in range(draws):
        seen[np.arange(size), permute(np.arange(size), size, seed, 0)] += 1
    expected, freedom = draws / size, (size - 1) ** 2
    assert abs(((seen - expected) ** 2 / expected).sum() - freedom) < 5 * math.sqrt(2 * freedom)


def test_neighbours_are_not_kept_together() -> None:
    """Pairs of consecutive samples: their distance is that of two random draws (mean n / 3)."""
    size = 100_000
    distance = np.abs(np.diff(permute(np.arange(size), size, 0, 0)))
    assert abs(distance.mean() / (size / 3) - 1) < 0.02
    assert (distance == 1).sum() < 20  # 2 by chance


@settings(max_examples=200)
@given(
    size=st.integers(1, 300),
    passes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=4),
    shuffle=st.booleans(),
    last_world=st.integers(1, 9),
    drop_last=st.booleans(),
)
def test_changing_worlds_neither_repeat_nor_lose(
    size: int, passes: list[tuple[int, int]], shuffle: bool, last_world: int, drop_last: bool
) -> None:
    whole = permute(np.arange(size), size, 5, 1).tolist() if shuffle else list(range(size))
    position, seen = 0, []
    for world, wanted in [*passes, (last_world, size)]:
        orders = [Order(size, rank, world, 5, shuffle, drop_last) for rank in range(world)]
        share = orders[0].share(position)
        taken = min(wanted, share)
        dealt = [order.samples(1, position, 0, taken).tolist() for order in orders]
        seen += [sample for step in zip(*dealt, strict=True) for sample in step]
        position = orders[0].after(position, taken)
        if not drop_last and taken == share:
            assert position == size
    assert seen[:size] == whole[: len(seen)]
    left_out, repeated = max(0, size - len(seen)), max(0, len(seen) - size)
    assert left_out < last_world if drop_last else left_out == 0
    assert repeated <= (0 if drop_last else max(last_world, *(world for world, _ in passes)))


def test_what_is_read_in_pieces_is_what_is_read_at_once() -> None:
    order = Order(1000, 1, 3, 0, True, False)
    pieces = [order.samples(4, 10, start, start + 7) for start in range(0, 70, 7)]
    assert np.concatenate(pieces).tolist() == order.samples(4, 10, 0, 70).tolist()
