"""A sample's random numbers are uniform, independent, and its own."""

import math

import numpy as np
import pytest

from overlapkit.input.images.draws import uniforms

PINNED = [[0.2038253881837352, 0.21660018986200547], [0.6454407111329867, 0.22891201933857208]]


def test_they_are_the_samples_own_whoever_else_is_asked_for():
    samples = np.array([7, 3, 900_000_000_000, 3, 0])
    together = uniforms(samples, 23, 5, 2)
    for row, sample in zip(together, samples, strict=True):
        assert np.array_equal(row, uniforms(np.array([sample]), 23, 5, 2)[0])


def test_they_never_change_between_versions():
    """A resumed run would silently go on with other crops."""
    assert uniforms(np.array([0, 10**9]), 2, 3, 1).tolist() == PINNED


@pytest.mark.parametrize("changed", [{"seed": 6}, {"seed": -5}, {"seed": 2**80}, {"epoch": 3}])
def test_another_seed_or_epoch_gives_others(changed):
    one = uniforms(np.arange(50), 23, seed=5, epoch=2)
    assert not np.isin(uniforms(np.arange(50), 23, **{"seed": 5, "epoch": 2, **changed}), one).any()


def test_they_are_uniform():
    """Chi-square over 64 bins of each column, and of the low bits; 5 standard deviations."""
    drawn = uniforms(np.arange(20_000), 23, 0, 0)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    for column in (*drawn.T, *(drawn * 2.0**30 % 1).T):
        seen = np.bincount((column * 64).astype(int), minlength=64)
        expected = len(column) / 64
        assert abs(((seen - expected) ** 2 / expected).sum() - 63) < 5 * math.sqrt(2 * 63)


def test_columns_and_neighbours_are_independent():
    drawn = uniforms(np.arange(20_000), 23, 0, 0)
    among = np.corrcoef(drawn.T) - np.eye(23)
    following = np.corrcoef(drawn[:-1].T, drawn[1:].T)[:23, 23:]
    assert np.abs(among).max() < 5 / math.sqrt(20_000)
    assert np.abs(following).max() < 5 / math.sqrt(20_000)
