"""The arithmetic of lateness against sums written out."""

import numpy as np
import pytest

from overlapkit.measure.arrival import Meeting, attend, clock_offsets, time_waited


def meeting(starts, ends, places=None):
    starts, ends = np.array(starts), np.array(ends)
    return Meeting(np.arange(starts.shape[1]) if places is None else np.array(places), starts, ends)


def test_the_last_to_start_is_waited_for_and_the_shortest_is_the_transfer():
    seen = attend(meeting([[0, 30, 10], [100, 100, 90]], [[40, 40, 41], [105, 106, 105]]), np.zeros(3, int))
    assert seen.waits.tolist() == [[30, 0, 20], [0, 0, 10]]
    assert seen.last.tolist() == [1, 0]
    assert seen.transfer.tolist() == [10, 5]


def test_each_ranks_clock_is_aligned_on_the_ends():
    ahead = np.array([0, 7_000_000, -3_000_000])
    starts = np.array([[0, 30, 10], [100, 100, 190], [300, 310, 320]]) * 1000
    ends = np.array([[40, 40, 40], [205, 205, 205], [330, 330, 330]]) * 1000
    shifted = meeting(starts + ahead, ends + ahead)
    offsets = clock_offsets(3, [shifted])
    assert (offsets - offsets[0]).tolist() == ahead.tolist()
    true = attend(meeting(starts, ends), np.zeros(3, int))
    assert attend(shifted, offsets).waits.tolist() == true.waits.tolist()


def test_clocks_that_differ_by_no_more_than_ends_scatter_are_one():
    one = meeting([[0, 0], [0, 0]], [[100_000, 104_000], [200_000, 204_000]])
    assert clock_offsets(2, [one]).tolist() == [0, 0]
    assert set(clock_offsets(2, [one], agree=None).tolist()) == {0, -4000}


def test_ranks_that_were_in_no_meeting_have_no_offset():
    parts = [meeting([[0, 0]], [[5, 90_005]], places=[2, 0])]
    assert clock_offsets(3, parts)[1] == 0


@pytest.mark.parametrize("seed", range(5))
def test_time_waited_counts_overlapping_waits_once(seed):
    rng = np.random.default_rng(seed)
    starts, waits = rng.integers(0, 60, (9, 4)), rng.integers(0, 12, (9, 4))
    brute = [
        len({t for s, w in zip(starts[:, r], waits[:, r], strict=True) for t in range(s, s + w)})
        for r in range(4)
    ]
    assert time_waited(starts, waits).tolist() == brute


def test_nothing_was_waited_in_no_collective():
    assert time_waited(np.zeros((0, 3), int), np.zeros((0, 3), int)).tolist() == [0, 0, 0]
