"""Where one step's phases turn, written down as they happen and timed once the device has passed them."""

from typing import Any, NamedTuple

from overlapkit.measure.clock import Clock
from overlapkit.measure.record import Segment


class Turn(NamedTuple):
    """The moment at which a phase begins (and the one before it ends)."""

    kind: str
    host: int
    mark: Any


class Timeline:
    """The turns of one period; the last one, of kind "end", closes it.

    Args:
        clock: Marks and times them.
        first: The turn that the period begins with.

    Attributes:
        kind: The phase that is on.
    """

    __slots__ = ("_clock", "_hosts", "_kinds", "_marks", "_times", "kind")

    def __init__(self, clock: Clock, first: Turn) -> None:
        self._clock = clock
        self.kind = first.kind
        self._kinds = [first.kind]  # three lists, not one of Turns: seven of them in each step
        self._hosts = [first.host]
        self._marks = [first.mark]
        self._times: list[int] = []

    @classmethod
    def after(cls, ended: "Timeline | None", clock: Clock, kind: str) -> "Timeline":
        """The next period: it begins where the one before it ended, if that was measured, else now."""
        if ended is not None:
            return cls(clock, ended.last._replace(kind=kind))
        now = clock.now()
        return cls(clock, Turn(kind, now, clock.mark(now)))

    @property
    def last(self) -> Turn:
        """The latest turn."""
        return Turn(self.kind, self._hosts[-1], self._marks[-1])

    @property
    def turns(self) -> int:
        """How many phases there have been."""
        return len(self._kinds)

    def turn(self, kind: str) -> None:
        """Begin a phase now; nothing happens where it is on already."""
        if self.kind != kind:
            now = self._clock.now()
            self._marks.append(self._clock.mark(now))
            self._hosts.append(now)
            self._kinds.append(kind)
            self.kind = kind

    def resolve(self) -> list[Segment] | None:
        """The segments of the finished period, or None where the device has not passed them all."""
        times, hosts, clock = self._times, self._hosts, self._clock
        if not clock.on_device:
            return list(map(Segment, self._kinds, hosts, hosts[1:], hosts, hosts[1:]))
        latest = times[-1] if times else 0
        for mark in self._marks[len(times) :]:
            time = clock.time(mark)
            if time is None:
                return None
            if time > latest:
                latest = time
            times.append(latest)
        return list(map(Segment, self._kinds, times, times[1:], hosts, hosts[1:]))

    def release(self) -> None:
        """Give the marks back, but for the last: the next period begins with it."""
        if self._clock.on_device:
            for mark in self._marks[:-1]:
                self._clock.release(mark)
