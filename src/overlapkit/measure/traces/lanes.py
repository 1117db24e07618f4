"""Lane accounting: every nanosecond of a span belongs to one lane, or to none and is idle.

TraceLens' definitions: what is covered by no lane before it in the order is a lane's own (exposed), so the
parts and the idle time add up to the span.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from overlapkit.measure.traces.columns import Ints

FORWARD, BACKWARD, OPTIMIZER, COMMUNICATION, COPY = range(5)
"""Lanes, in the order in which they hide each other. The first three together are compute."""

_LANES = 5


class Sweep:
    """The borders of all work, in order, and which lanes are at work between each two of them.

    Args:
        starts: When each piece of work begins, in nanoseconds.
        ends: When it ends, not before.
        lanes: Which lane each is of.
        since: Begin the span here, if that is before the first start.
    """

    def __init__(self, starts: Ints, ends: Ints, lanes: Ints, since: int | None = None) -> None:
        first = [] if since is None else [since]
        times = np.concatenate([np.array(first, dtype=np.int64), starts, ends])
        order = np.argsort(times, kind="stable")
        self.times = times[order]
        self.lengths = np.diff(self.times)
        self.active: list[NDArray[np.bool_]] = []
        for lane in range(_LANES):
            step = (lanes == lane).astype(np.int64)
            change = np.concatenate([np.zeros(len(first), dtype=np.int64), step, -step])
            self.active.append((np.cumsum(change[order]) > 0)[:-1])
        busy = np.logical_or.reduce(self.active)
        self._idle = ~busy & (self.lengths > 0)

    def total(self, lane: int) -> int:
        """The time that a lane is at work."""
        return int(self.lengths[self.active[lane]].sum())

    def exposed(self) -> list[int]:
        """The time of each lane that none before it hides."""
        parts, hidden = [], np.zeros(len(self.lengths), dtype=bool)
        for active in self.active:
            parts.append(int(self.lengths[active & ~hidden].sum()))
            hidden = hidden | active
        return parts

    def idle(self) -> int:
        """The time in which no lane is at work."""
        return int(self.lengths[self._idle].sum())

    def gaps(self) -> tuple[Ints, Ints]:
        """Each stretch of idle time: where it begins and ends."""
        return self.times[:-1][self._idle], self.times[1:][self._idle]


@dataclass(frozen=True, slots=True)
class Lanes:
    """How a span of time was used. Nanoseconds.

    Invariant:
        * compute + exposed_communication + exposed_copy + idle = span.

    Attributes:
        compute: Kernels that compute were at work.
        exposed_communication: Collectives were, and no compute.
        exposed_copy: Copies or settings of memory were, and neither of them.
        idle: Nothing was.
        span: From the first start to the last end.
        communication: Collectives were at work, hidden or not.
        copy: Copies or settings of memory were.
    """

    compute: int
    exposed_communication: int
    exposed_copy: int
    idle: int
    span: int
    communication: int
    copy: int

    @property
    def overlap(self) -> float | None:
        """Percent of communication that compute hides; None where there is none (HTA's definition)."""
        if not self.communication:
            return None
        return 100 * (1 - self.exposed_communication / self.communication)

    def to_dict(self) -> dict[str, float]:
        """In microseconds."""
        return {name: getattr(self, name) / 1e3 for name in self.__slots__}


def account(sweep: Sweep) -> Lanes:
    """The lanes of a sweep over all work."""
    forward, backward, optimizer, communication, copy = sweep.exposed()
    span = int(sweep.times[-1] - sweep.times[0]) if len(sweep.times) else 0
    lanes = Lanes(
        compute=forward + backward + optimizer,
        exposed_communication=communication,
        exposed_copy=copy,
        idle=sweep.idle(),
        span=span,
        communication=sweep.total(COMMUNICATION),
        copy=sweep.total(COPY),
    )
    assert lanes.compute + communication + copy + lanes.idle == span, lanes
    return lanes
