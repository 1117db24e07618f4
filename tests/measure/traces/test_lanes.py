"""Lane accounting against a bitmap: each nanosecond is looked at by itself."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlapkit.measure.traces.lanes import COMMUNICATION, COPY, OPTIMIZER, Sweep, account
from overlapkit.measure.traces.timeline import Windows

pieces = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 4)), min_size=1, max_size=12
)
ZERO = 1_700_000_000_000_000_000  # nanoseconds since 1970, far beyond what a float holds exactly


def sweep_of(raw):
    starts, lengths, lanes = (np.array(column, dtype=np.int64) for column in zip(*raw, strict=True))
    return Sweep(starts + ZERO, starts + lengths + ZERO, lanes)


def moments(raw, *lanes):
    return {t for start, size, lane in raw if lane in lanes for t in range(start, start + size)}


@given(pieces)
def test_every_moment_belongs_to_one_lane(raw):
    compute, comm, copy = (moments(raw, *of) for of in (range(OPTIMIZER + 1), [COMMUNICATION], [COPY]))
    first = min(start for start, _, _ in raw)
    last = max(start + size for start, size, _ in raw)
    lanes = account(sweep_of(raw))
    assert lanes.compute == len(compute)
    assert lanes.exposed_communication == len(comm - compute)
    assert lanes.exposed_copy == len(copy - compute - comm)
    assert lanes.communication == len(comm)
    assert lanes.copy == len(copy)
    assert lanes.span == last - first
    assert lanes.idle == lanes.span - len(compute | comm | copy)
    assert (lanes.overlap is None) == (not comm)
    if lanes.overlap is not None:
        assert abs(lanes.overlap - 100 * len(comm & compute) / len(comm)) < 1e-9


@given(pieces)
def test_phases_hide_each_other_in_their_order(raw):
    hidden: set[int] = set()
    for lane, time in enumerate(sweep_of(raw).exposed()):
        assert time == len(moments(raw, lane) - hidden)
        hidden |= moments(raw, lane)


@given(pieces)
def test_gaps_are_what_no_work_covers(raw):
    begins, ends = sweep_of(raw).gaps()
    found = [t for begin, end in zip(begins - ZERO, ends - ZERO, strict=True) for t in range(begin, end)]
    busy = moments(raw, *range(5))
    first, last = min(start for start, _, _ in raw), max(start + size for start, size, _ in raw)
    assert found == [t for t in range(first, last) if t not in busy]


stretches = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=6)


@given(stretches, stretches)
def test_cover(raw_windows, raw_stretches):
    windows = sorted((start, start + size) for start, size in raw_windows)
    starts, ends = (np.array([w[i] for w in windows], dtype=np.int64) for i in (0, 1))
    union = Windows(starts, ends, starts).union()
    inside = {t for start, end in windows for t in range(start, end)}
    begins, sizes = (np.array([s[i] for s in raw_stretches], dtype=np.int64) for i in (0, 1))
    expected = [len(inside & set(range(start, start + size))) for start, size in raw_stretches]
    assert union.cover(begins, begins + sizes).tolist() == expected


def test_one_moment_has_no_span():
    lanes = account(sweep_of([(3, 0, 0)]))
    assert (lanes.span, lanes.idle, lanes.overlap) == (0, 0, None)
