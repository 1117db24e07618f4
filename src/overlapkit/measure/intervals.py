"""Sets of time, as sorted lists of disjoint, non-empty (start, end) pairs of integers.

Exposed time is the length of a union: two spans that overlap, or that were recorded twice, count once.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable

Interval = tuple[int, int]
Intervals = list[Interval]


def union(parts: Iterable[Interval]) -> Intervals:
    """The set that `parts` cover together: in any order, overlapping or empty as they may be."""
    whole: Intervals = []
    for start, end in sorted(parts):
        if end <= start:
            continue
        if whole and start <= whole[-1][1]:
            if end > whole[-1][1]:
                whole[-1] = (whole[-1][0], end)
        else:
            whole.append((start, end))
    return whole


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """What lies in both sets."""
    both: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            both.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return both


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """What lies in `a` and not in `b`."""
    left: Intervals = []
    j = 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if start < b[k][0]:
                left.append((start, b[k][0]))
            start = max(start, b[k][1])
            k += 1
        if start < end:
            left.append((start, end))
    return left


def cut(a: Intervals, start: int, end: int) -> tuple[Intervals, Intervals]:
    """What of a set lies within one interval, and what outside of it."""
    inside: Intervals = []
    outside: Intervals = []
    for part in a:
        begin, close = part
        if close <= start or begin >= end:
            outside.append(part)
            continue
        if begin < start:
            outside.append((begin, start))
        inside.append((begin if begin > start else start, close if close < end else end))
        if close > end:
            outside.append((end, close))
    return inside, outside


def length(a: Intervals) -> int:
    """The time covered."""
    return sum(end - start for start, end in a)


def within(whole: Intervals) -> Callable[[int, int], int]:
    """A function that tells how much of the time from a start to an end lies in the set."""
    starts = [start for start, _ in whole]
    before = [0]
    for start, end in whole:
        before.append(before[-1] + end - start)

    def until(moment: int) -> int:
        place = bisect_right(starts, moment)
        return before[place] - max(0, whole[place - 1][1] - moment) if place else 0

    return lambda start, end: max(0, until(end) - until(start))
