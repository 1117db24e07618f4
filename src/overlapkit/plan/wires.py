"""Collectives under way in a simulated step: queues, one a communicator, that share one link."""

import math
from collections import deque
from dataclasses import dataclass

_NOTHING = 1e-12  # seconds: what rounding leaves of a collective that is done


@dataclass(eq=False, slots=True)
class Transfer:
    """One collective.

    Attributes:
        name: As in the spans that the parts publish: "all_gather blocks.0".
        nbytes: Of the whole.
        seconds: That it takes alone.
        launched: When this rank had all it gives.
        start: When it began; nan before.
        end: When it was done; nan before.
        left: Seconds of it that are not done.
        then: The communicator of another that begins when this is done, and that one.
    """

    name: str
    nbytes: int
    seconds: float
    launched: float
    start: float = float("nan")
    end: float = float("nan")
    left: float = 0.0
    then: "tuple[str, Transfer] | None" = None


class Wires:
    """Queues whose first collectives are under way and share the link evenly.

    Invariant:
        * Time never goes back: launch and finish are called in the order of the compute lane's clock.

    Args:
        shared: Whether collectives of different communicators slow each other down: two on one link do.
    """

    def __init__(self, *, shared: bool = True) -> None:
        self.done: list[Transfer] = []
        self._queues: dict[str, deque[Transfer]] = {}
        self._clock = 0.0
        self._shared = shared

    def launch(self, queue: str, name: str, nbytes: int, seconds: float, now: float) -> Transfer:
        """Queue a collective on a communicator."""
        self._advance(now)
        transfer = Transfer(name, nbytes, seconds, now, left=seconds)
        self._queues.setdefault(queue, deque()).append(transfer)
        return transfer

    def finish(self, transfer: Transfer) -> float:
        """Let time pass until a collective is done; returns when."""
        while math.isnan(transfer.end):
            self._step(math.inf)
        return transfer.end

    def drain(self, now: float) -> float:
        """Let time pass until all are done; returns when the last one was, or `now` if that is later."""
        while any(self._queues.values()):
            self._step(math.inf)
        self._clock = max(self._clock, now)
        return self._clock

    def _advance(self, until: float) -> None:
        while any(self._queues.values()) and self._clock < until:
            self._step(until - self._clock)
        self._clock = max(self._clock, until)

    def _step(self, limit: float) -> None:
        """Go on until a collective is done, or for `limit` seconds."""
        under_way = [queue for queue in self._queues.values() if queue]
        slowed = len(under_way) if self._shared else 1
        step = min(limit, min(queue[0].left for queue in under_way) * slowed)
        for queue in under_way:
            if math.isnan(queue[0].start):
                queue[0].start = self._clock
            queue[0].left -= step / slowed
        self._clock += step
        for queue in under_way:
            if queue[0].left <= _NOTHING:
                queue[0].end = self._clock
                self.done.append(queue.popleft())
                if (then := self.done[-1].then) is not None:
                    then[1].launched = self._clock
                    self._queues.setdefault(then[0], deque()).append(then[1])
