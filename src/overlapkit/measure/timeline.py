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
    """The turns of one period; the last one, of kind "end", closes it."""

    def __init__(self, clock: Clock, first: Turn) -> None:
        self._clock = clock
        self._turns = [first]
        self._times: list[int] = []

    @property
    def last(self) -> Turn:
        """The latest turn."""
        return self._turns[-1]

    @property
    def kind(self) -> str:
        """The phase that is on."""
        return self._turns[-1].kind

    @property
    def turns(self) -> int:
        """How many phases there have been."""
        return len(self._turns)

    def turn(self, kind: str) -> Turn:
        """Begin a phase now; nothing happens where it is on already."""
        last = self._turns[-1]
        if last.kind != kind:
            now = self._clock.now()
            last = Turn(kind, now, self._clock.mark(now))
            self._turns.append(last)
        return last

    def resolve(self) -> list[Segment] | None:
        """The segments of the finished period, or None where the device has not passed them all."""
        while len(self._times) < len(self._turns):
            time = self._clock.time(self._turns[len(self._times)].mark)
            if time is None:
                return None
            self._times.append(max(time, self._times[-1]) if self._times else time)
        times, turns = self._times, self._turns
        follows = zip(turns, turns[1:], times, times[1:], strict=False)
        return [Segment(turn.kind, start, end, turn.host, then.host) for turn, then, start, end in follows]

    def release(self) -> None:
        """Give the marks back, but for the last: the next period begins with it."""
        for turn in self._turns[:-1]:
            self._clock.release(turn.mark)
