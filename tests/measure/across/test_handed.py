"""What a rank hands in: small, whole where it must be, and the same after its journey."""

import numpy as np
import pytest

from overlapkit.measure.across import handed as module
from overlapkit.measure.across.handed import COLUMNS, LIMIT_BYTES, decode, hand_in
from overlapkit.measure.across.sequence import Issues
from tests.measure.across.steps import record, trace


def steps(count, collectives, first=20):
    spans = [(f"all_gather unit.{at}", 10 * at, 10 * at + 7) for at in range(collectives)]
    return [(record(at, forward=5, backward=7), trace(at, spans)) for at in range(first, first + count)]


def same(one, other):
    assert one.steps.tolist() == other.steps.tolist()
    assert one.parts.tolist() == other.parts.tolist()
    for mine, theirs in zip(one.details, other.details, strict=True):
        assert (mine.step, mine.keys) == (theirs.step, theirs.keys)
        for column in ("starts", "durations", "exposed", "phases"):
            assert getattr(mine, column).tolist() == getattr(theirs, column).tolist()


def test_what_is_handed_in_arrives():
    one = hand_in(steps(3, 4), issued=Issues(("a", "b"), {"": (7, np.array([0, 1, 0]))}))
    other = decode(one.encode())
    same(one, other)
    assert [other.issued.text("", at) for at in range(6, 11)] == ["nothing", "a", "b", "a", "nothing"]
    same(hand_in([]), decode(hand_in([]).encode()))


def test_parts_are_microseconds_and_unknown_ones_are_below_zero():
    parts = dict(zip(COLUMNS, hand_in(steps(1, 0)).parts[0].tolist(), strict=True))
    assert (parts["forward"], parts["backward"], parts["input"], parts["garbage"]) == (5, 7, -1, -1)
    assert parts["period"] == 12


def test_times_count_from_the_steps_own_start_in_the_order_of_starts():
    spans = [("reduce b", 40, 90), ("reduce a", 20, 95), ("reduce b", 130, 150)]
    (detail,) = hand_in([(record(1), trace(1, spans, zero=5_000))]).details
    assert detail.keys == (("reduce a", 0, ""), ("reduce b", 0, ""), ("reduce b", 1, ""))
    assert detail.starts.tolist() == [20, 40, 130]
    assert detail.durations.tolist() == [75, 50, 20]
    assert [module.PHASES[place] for place in detail.phases] == ["forward", "forward", "backward"]


def test_exposed_time_goes_to_the_collective_that_ended_next():
    spans = [("a", 0, 50), ("b", 10, 70), ("c", 60, 65)]
    (detail,) = hand_in([(record(1), trace(1, spans, waits=[(40, 52), (60, 68), (90, 95)]))]).details
    assert dict(zip("abc", detail.exposed.tolist(), strict=True)) == {"a": 10, "c": 7, "b": 3}


def test_mere_waits_are_no_collectives():
    one = trace(1, [("all_reduce a", 0, 50)])
    tail = one.collectives[0]._replace(name="all_reduce tail", bytes=None, exposed=True)
    two = type(one)(1, one.segments, one.waits, (*one.collectives, tail))
    (detail,) = hand_in([(record(1), two)]).details
    assert [key[0] for key in detail.keys] == ["all_reduce a"]


@pytest.mark.parametrize(("collectives", "kept"), [(50, 20), (51, 10), (300, 2), (2000, 1)])
def test_too_many_collectives_leave_steps_out_the_same_ones_on_every_rank(collectives, kept):
    details = hand_in(steps(20, collectives)).details
    assert len(details) == kept
    assert all(len(detail.keys) == collectives for detail in details)
    if kept < 10:
        other = hand_in(steps(19, collectives, first=21)).details  # a rank that lost a step
        assert {detail.step for detail in other} <= {detail.step for detail in details}


def test_no_window_is_larger_than_the_limit():
    rng = np.random.default_rng(0)
    names = [rng.bytes(30).hex() for _ in range(2000)]  # that nothing compresses
    starts, lengths = rng.integers(9**6, size=2000).tolist(), rng.integers(9999, size=2000).tolist()
    spans = [(name, at, at + more) for name, at, more in zip(names, starts, lengths, strict=True)]
    wild = [(record(at), trace(at, spans)) for at in range(20)]
    issued = Issues(tuple(names[:400]), {"": (0, rng.integers(0, 400, 1000))})
    assert len(hand_in(wild, issued=issued).encode()) <= LIMIT_BYTES
    plain = hand_in(steps(20, 300)).encode()
    assert len(decode(plain).details) == 2
    assert len(plain) < LIMIT_BYTES / 2
