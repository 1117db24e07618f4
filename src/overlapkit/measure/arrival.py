"""Who came late to a collective: the arithmetic that traces and the meter share.

A collective begins on a rank when that rank arrives and ends on all at once, so the ends align the clocks and
the starts say who was waited for: wait = latest start - own start, transfer = the least duration of any rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[Any]

_AGREE_NS = 10_000  # ends of one collective agree within 7 us where the clock is the same


@dataclass(frozen=True, slots=True)
class Meeting:
    """Collectives in which the same ranks took part, each rank on its own clock.

    Attributes:
        places: Of those ranks among all that are compared, (ranks,).
        starts: When each arrived, (collectives, ranks).
        ends: When it ended there, (collectives, ranks).
    """

    places: Ints
    starts: Ints
    ends: Ints


@dataclass(frozen=True, slots=True)
class Attendance:
    """What became of a meeting, in its unit of time.

    Attributes:
        waits: How long each rank waited for the last one, (collectives, ranks).
        last: Who that was, a place, (collectives,).
        transfer: What was left once all had arrived, (collectives,).
    """

    waits: Ints
    last: Ints
    transfer: Ints


def attend(meeting: Meeting, offsets: Ints) -> Attendance:
    """Who waited how long.

    Args:
        meeting: Of some ranks.
        offsets: How far the clock of each place is ahead.
    """
    starts = meeting.starts - offsets[meeting.places]
    waits = starts.max(axis=1, keepdims=True) - starts
    return Attendance(
        waits=waits,
        last=meeting.places[starts.argmax(axis=1)],
        transfer=(meeting.ends - meeting.starts).min(axis=1),
    )


def clock_offsets(ranks: int, meetings: Sequence[Meeting], *, agree: int | None = _AGREE_NS) -> Ints:
    """How far each clock is ahead: the median over all collectives of how much later they end on it.

    Args:
        ranks: How many are compared.
        meetings: Of them.
        agree: Clocks that differ by less than this, or by less than the ends scatter, are one clock, offset
            0; None where each rank counts from a moment of its own.
    """
    off: list[list[Ints]] = [[] for _ in range(ranks)]
    for meeting in meetings:
        count = len(meeting.places)
        middle = np.partition(meeting.ends, count // 2, axis=1)[:, count // 2]
        for column, place in enumerate(meeting.places):
            off[place].append(meeting.ends[:, column] - middle)
    return np.array([_offset(np.concatenate(of), agree) if of else 0 for of in off], dtype=np.int64)


def _offset(differences: Ints, agree: int | None) -> int:
    middle = round(float(np.median(differences)))
    if agree is None:
        return middle
    spread = float(np.median(np.abs(differences - middle)))
    return middle if abs(middle) > max(agree, 3 * spread) else 0


def time_waited(starts: Ints, waits: Ints) -> Ints:
    """For each rank the time in which it waited; where it waited in two collectives at once, once.

    Args:
        starts: When it arrived, (collectives, ranks).
        waits: For the last one, (collectives, ranks).

    Returns:
        (ranks,).
    """
    if not len(starts):
        return np.zeros(starts.shape[1], dtype=np.int64)
    order = np.argsort(starts, axis=0, kind="stable")
    begins = np.take_along_axis(starts, order, axis=0)
    ends = begins + np.take_along_axis(waits, order, axis=0)
    reached = np.maximum.accumulate(ends, axis=0)
    since = np.vstack([begins[:1], np.maximum(begins[1:], reached[:-1])])
    waited: Ints = np.maximum(ends - since, 0).sum(axis=0)
    return waited
