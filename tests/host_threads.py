"""The host's threads under the recorder: each knows what it has waited for itself, and what it was told.

Threads tell each other through what the sources use: work given to a lane, a ticket that is settled, a buffer
given back to its ring, a staging that is over, an Event that is set, a thread's start and end. Where none of
these lies between, one thread's wait does not stand in for another's, however the two happen to run.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from overlapkit.checkpoint.stage import Stager
from overlapkit.lane import Lane, Ticket
from overlapkit.pinned import PinnedBuffer, PinnedRing

Clock = dict[str, int]


def join(clock: Clock, other: Clock) -> None:
    for actor, ticks in list(other.items()):
        clock[actor] = max(clock.get(actor, 0), ticks)


class HostThreads:
    """One vector clock for each thread, made at first sight."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._names = itertools.count()

    @property
    def name(self) -> str:
        """The calling thread, as an actor."""
        if not hasattr(self._own, "name"):
            self._own.name = f"host {next(self._names)}"
            self._own.clock = {self._own.name: 1}
        return self._own.name  # type: ignore[no-any-return]

    @property
    def clock(self) -> Clock:
        """What the calling thread knows to be over."""
        return self._own.clock if self.name else {}

    def tell(self) -> Clock:
        """What another thread learns that hears of this moment."""
        told = dict(self.clock)
        self.clock[self.name] += 1
        return told

    def hear(self, told: Clock | None) -> None:
        join(self.clock, told or {})

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow what threads tell each other, in the body."""
        with contextlib.ExitStack() as stack:
            for owner, ways in (
                (Lane, {"submit": self._submit}),
                (Ticket, {"_settle": self._before, "_result": self._settled, "done": self._if_true}),
                (PinnedBuffer, {"give_back": self._before}),
                (PinnedRing, {"take": self._taken}),
                (Stager, {"release": self._before, "before_step": self._heard_first}),
                (threading.Event, {"set": self._before, "wait": self._if_true, "is_set": self._if_true}),
                (threading.Thread, {"start": self._start, "join": self._ended}),
            ):
                for name, way in ways.items():
                    stack.enter_context(mock.patch.object(owner, name, way(getattr(owner, name))))
            yield

    def _submit(self, plain: Any) -> Any:
        def submit(lane: Lane, fn: Callable[[], Any], **options: Any) -> Any:
            told = self.tell()

            def heard() -> Any:
                self.hear(told)
                return fn()

            return plain(lane, heard, **options)

        return submit

    def _before(self, plain: Any) -> Any:
        """Whoever meets the object after this call knows what this thread knows."""

        def call(it: Any, *args: Any, **options: Any) -> Any:
            it.__dict__["_told"] = self.tell()
            return plain(it, *args, **options)

        return call

    def _if_true(self, plain: Any) -> Any:
        def call(it: Any, *args: Any, **options: Any) -> Any:
            if found := plain(it, *args, **options):
                self.hear(it.__dict__.get("_told"))
            return found

        return call

    def _heard_first(self, plain: Any) -> Any:
        def call(it: Any, *args: Any, **options: Any) -> Any:
            self.hear(it.__dict__.get("_told"))
            return plain(it, *args, **options)

        return call

    def _settled(self, plain: Any) -> Any:
        def call(ticket: Ticket[Any], *args: Any) -> Any:
            try:
                return plain(ticket, *args)
            finally:
                if ticket._settled:
                    self.hear(ticket.__dict__.get("_told"))

        return call

    def _taken(self, plain: Any) -> Any:
        def take(ring: PinnedRing, *args: Any, **options: Any) -> PinnedBuffer:
            buffer: PinnedBuffer = plain(ring, *args, **options)
            self.hear(buffer.__dict__.get("_told"))
            return buffer

        return take

    def _start(self, plain: Any) -> Any:
        def start(thread: threading.Thread) -> None:
            told, run = self.tell(), thread.run

            def heard() -> None:
                self.hear(told)
                try:
                    run()
                finally:
                    thread.__dict__["_told"] = self.tell()

            thread.run = heard  # type: ignore[method-assign]
            plain(thread)

        return start

    def _ended(self, plain: Any) -> Any:
        def ended(thread: threading.Thread, *args: Any, **options: Any) -> None:
            plain(thread, *args, **options)
            if not thread.is_alive():
                self.hear(thread.__dict__.get("_told"))

        return ended
