"""Which checkpoints stay."""

import math
import random

import pytest

from overlapkit.checkpoint.retention import Best, Policy


@pytest.mark.parametrize(
    ("steps", "newest", "keep", "keep_every", "gone"),
    [
        ([1, 2, 3, 4], 4, None, None, []),
        ([1, 2, 3, 4], 4, 2, None, [1, 2]),
        ([1, 2, 3, 4], 4, 9, None, []),
        ([4, 3, 2, 1], 4, 1, None, [1, 2, 3]),
        ([0, 10, 20, 25, 30], 30, 1, 20, [10, 25]),
        ([100, 200, 300], 100, 1, None, []),  # an abandoned branch never costs what is saved below it,
        ([70, 72, 74, 80], 74, 2, None, [70]),  # neither now nor later
        ([80, 90, 91], 91, 2, None, [80]),  # and goes when it is passed
        ([5], 5, 1, 7, []),
        ([], 5, 1, None, []),
    ],
)
def test_where_all_are_verified(steps, newest, keep, keep_every, gone):
    found = {step: {} for step in steps}
    assert Policy(keep, keep_every).surplus(found, steps, newest) == gone


@pytest.mark.parametrize(
    ("verified", "gone"),
    [
        ({50}, []),  # four that nobody has read are as good as none
        ({40, 50}, [10, 20, 30]),
        ({30, 50}, [10, 20]),
        ({10, 50}, []),
        ({10, 20, 30, 40, 50}, [10, 20, 30]),
    ],
)
def test_nothing_goes_on_the_strength_of_an_unverified_one(verified, gone):
    assert Policy(2).surplus(dict.fromkeys((10, 20, 30, 40, 50), {}), verified, 50) == gone


def losses(**values):
    return {int(name[1:]): {} if value is None else {"loss": value} for name, value in values.items()}


@pytest.mark.parametrize(
    ("found", "largest", "ranked"),
    [
        (losses(s1=3.0, s2=1.0, s3=2.0), False, [2, 3, 1]),
        (losses(s1=3.0, s2=1.0, s3=2.0), True, [1, 3, 2]),
        (losses(s1=None, s2=1.0), False, [2]),
        (losses(s1=math.nan, s2=5.0, s3=-math.inf), False, [2]),
        (losses(s1=math.nan, s2=5.0, s3=math.inf), True, [2]),
        (losses(s1=1.0, s2=1.0, s3=2.0), False, [2, 1, 3]),
        (losses(s1=1.0, s2=1.0, s3=0.0), True, [2, 1, 3]),
        (losses(s1=math.nan, s2=None), False, []),
    ],
)
def test_the_best_come_first(found, largest, ranked):
    assert Best("loss", largest).ranked(found) == ranked


def test_the_best_stays_and_so_does_the_best_that_is_verified():
    found = losses(s1=0.1, s2=0.2, s3=0.3, s4=0.9, s5=0.9)
    policy = Policy(1, best=Best("loss", largest=False))
    assert policy.surplus(found, {1, 2, 3, 4, 5}, 5) == [2, 3, 4]
    assert policy.surplus(found, {2, 3, 4, 5}, 5) == [3, 4]  # 1 may be damaged: 2 is the best that is not


def test_what_must_hold_holds_for_random_sets():
    """Brute force: the newest verified ones, the best, multiples and the one just saved always stay."""
    rng = random.Random(0)
    for _ in range(2000):
        steps = rng.sample(range(40), rng.randint(1, 12))
        found = {s: {} if rng.random() < 0.3 else {"acc": rng.choice([0.1, 0.5, math.nan])} for s in steps}
        verified = {step for step in steps if rng.random() < 0.6}
        newest, keep, multiple = rng.choice(steps), rng.randint(1, 4), rng.randint(2, 9)
        gone = Policy(keep, multiple, Best("acc", largest=True)).surplus(found, verified, newest)
        left = set(steps) - set(gone)
        assert newest in left
        assert all(step % multiple for step in gone)
        if gone:
            top = sorted(step for step in verified if step <= newest)[-keep:]
            assert set(top) <= left
            assert len(top) == keep
            assert max(gone) < min(top)
        values = [found[s]["acc"] for s in steps if s in verified and found[s].get("acc", math.nan) > 0]
        assert not values or max(values) in [found[step].get("acc") for step in left & verified]
