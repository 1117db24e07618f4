from hypothesis import given
from hypothesis import strategies as st

from overlapkit.measure.intervals import intersect, length, subtract, union

parts = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def points(intervals):
    return {t for start, end in intervals for t in range(start, end)}


def is_canonical(intervals):
    """Sorted, disjoint, not even touching, none empty."""
    return all(a < b for a, b in intervals) and all(
        first[1] < second[0] for first, second in zip(intervals, intervals[1:], strict=False)
    )


@given(parts)
def test_union_covers_what_its_parts_cover(raw):
    whole = union(raw)
    assert points(whole) == points(raw)
    assert is_canonical(whole)
    assert length(whole) == len(points(raw))


@given(parts, parts)
def test_intersect(raw_a, raw_b):
    a, b = union(raw_a), union(raw_b)
    assert points(intersect(a, b)) == points(a) & points(b)
    assert is_canonical(intersect(a, b))


@given(parts, parts)
def test_subtract(raw_a, raw_b):
    a, b = union(raw_a), union(raw_b)
    assert points(subtract(a, b)) == points(a) - points(b)
    assert is_canonical(subtract(a, b))


@given(parts, parts)
def test_a_set_is_what_it_shares_and_what_it_does_not(raw_a, raw_b):
    a, b = union(raw_a), union(raw_b)
    assert length(intersect(a, b)) + length(subtract(a, b)) == length(a)


def test_known_sets():
    assert union([(5, 7), (1, 3), (2, 4), (4, 4), (9, 8)]) == [(1, 4), (5, 7)]
    assert union([(1, 3), (3, 5)]) == [(1, 5)]
    assert union([]) == []
    assert subtract([(0, 10)], [(2, 3), (8, 12)]) == [(0, 2), (3, 8)]
    assert length([]) == 0
