"""What is no value of an argument that all sources have is refused by its name."""

import numpy as np
import pytest

from overlapkit.input.checks import as_count, as_epoch, as_integer, as_rank, as_seed, check_choice


@pytest.mark.parametrize("seed", ["abc", 1.5, None, True])
def test_a_seed_is_an_integer(seed):
    with pytest.raises(ValueError, match=f"seed={seed!r}: give an integer"):
        as_seed(seed)


@pytest.mark.parametrize("drop_last", ["no", 1, None])
def test_a_choice_is_true_or_false(drop_last):
    with pytest.raises(ValueError, match=f"drop_last={drop_last!r}: use True or False"):
        check_choice("drop_last", drop_last)


@pytest.mark.parametrize(("rank", "world"), [(True, 2), (0, True), (2, 2), (-1, 2), (0, None), (0.0, 1)])
def test_a_rank_is_an_integer_below_the_world_size(rank, world):
    with pytest.raises(ValueError, match=f"rank={rank!r}, world_size={world!r}: give both"):
        as_rank(rank, world)


def test_integers_of_numpy_are_integers():
    made = [as_count("size", np.int32(3)), as_seed(np.int64(-3)), *as_rank(np.int64(0), np.uint8(2))]
    made += [as_epoch(np.int64(0)), as_integer("epoch", np.int16(-1))]
    assert (made, [type(one) for one in made]) == ([3, -3, 0, 2, 0, -1], [int] * 6)
