"""A reader at work: its thread, the pulls that are outstanding there, and how it ends."""

import atexit
import os
import sys
import threading
import weakref
from collections import deque
from functools import partial

import torch

from overlapkit.input.feed import Feed
from overlapkit.input.position import Position
from overlapkit.input.reader import Reader
from overlapkit.input.turns import ShortTurns
from overlapkit.input.uneven import Outcome, Plan
from overlapkit.lane import Lane, Ticket
from overlapkit.warn import warn

PATIENCE_S = 10.0
"""How long closing waits for a source that is busy; then its thread is left to end by itself."""

_TURN_S = 1e-3
"""For how long loop and reader keep the interpreter from each other. Where both compute in it, this costs
nothing that could be measured, and a fifth of it a tenth of the work."""

_at_work: "weakref.WeakSet[ReadAhead]" = weakref.WeakSet()

_lanes: set[Lane] = set()
"""Those of readers that must still be told to let go. Else they would be garbage together with a forgotten
pass in a cycle, and end as such before its finalizer could give them their last work."""


@atexit.register  # later than the lanes' own, so it runs before: they finish what they were given
def _stop_at_exit() -> None:
    """Let no reader go on for batches that nobody will take."""
    for ahead in list(_at_work):
        ahead._reader.stopped = True
        ahead.plan.close(wait=False)


class ReadAhead:
    """A pass over the source, read in a thread of its own under the grad mode of whoever began it.

    Invariants:
        * `depth` pulls are outstanding until the end: who takes one submits the next.
        * Only the reader's thread advances the source, and as its last work lets go of it.

    Args:
        feed: What the passes share.
        resume: Where to start, or None for the beginning.

    Attributes:
        cursor: The pass.
        plan: How it goes on.
        handed_out: Batches of it that the consumer took.
        ready: What was waited for last was there already.
        closed: Nothing more comes of it.
    """

    def __init__(self, feed: Feed, resume: Position | None) -> None:
        self._let_go = True  # there is nothing to let go of yet
        self._owner = os.getpid(), threading.get_ident()
        self._feed = feed
        self._reader = feed.begin(resume)
        self._lane = Lane("input", kind="thread")
        self._end: Ticket[None] | None = None
        self._tickets: deque[Ticket[Outcome]] = deque()
        self.cursor = self._reader.cursor
        self.plan = Plan()
        self.handed_out = 0
        self.ready = False
        self._turns = ShortTurns(_TURN_S)
        self.closed = self._let_go = False
        _at_work.add(self)
        _lanes.add(self._lane)
        self._lane.submit(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
        for _ in range(feed.depth):
            self.submit()

    @property
    def front(self) -> Ticket[Outcome]:
        """The pull whose turn it is."""
        return self._tickets[0]

    def submit(self) -> Ticket[Outcome]:
        """Ask for one more batch."""
        device, moves = self._feed.device, self._reader.mover is not None
        stream = torch.cuda.current_stream(device) if moves else None
        pull: Ticket[Outcome] = self._lane.submit(partial(self._reader.pull, stream))
        self._tickets.append(self.plan.follow(pull))
        return pull

    def wait(self) -> Outcome:
        """What came of the pull in front; None where another thread has closed this one."""
        watch, front = self._feed.watch, self.front
        self.ready = front.done()
        watch.begin(look=not self.ready)
        with self._feed.log.host("input", "wait", exposed=True):
            outcome = front.wait()
        watch.end()
        watch.tell()
        return outcome

    def take(self) -> None:
        """Go on to the pull behind it."""
        self._tickets.popleft()

    def follow(self, plan: Plan) -> None:
        """Go on by a plan, with what has been asked for, too."""
        self.plan = plan
        self._tickets = deque(map(plan.follow, self._tickets))

    def stop(self) -> Ticket[None]:
        """Let the thread end, when the source lets it. Returns the ticket of letting go of the source."""
        self.closed = self._reader.stopped = True
        self._tickets.clear()
        self.plan.close(wait=False)
        self._turns.end()
        if self._end is None:
            last = partial(_let_go, self._feed, self._reader, self.plan, self.handed_out)
            self._end = self._lane.submit(last)
        return self._end

    def close(self, *, wait: bool = True) -> None:
        """Stop, and wait for the thread. Safe to call twice, and again where it was interrupted."""
        if self._let_go or os.getpid() != self._owner[0]:
            return
        end = self.stop()
        _lanes.discard(self._lane)
        if wait:
            try:
                end.wait(PATIENCE_S)  # before join(), which, interrupted, takes the thread for ended (3.11)
            except TimeoutError:
                if end.done():
                    raise  # the source's own
                warn(
                    f"source was still busy {PATIENCE_S:g} s after its iterator was closed; its thread is "
                    "left to end by itself",
                    RuntimeWarning,
                )
            finally:
                if end.done():
                    self._lane.close()
                    self._let_go = True
        if self._feed.exclusive and not end.done():
            self._feed.left.append(end)
        self._let_go = True

    def __del__(self) -> None:
        if self._let_go or sys.is_finalizing():
            return
        # the cyclic collector runs in any thread, even the reader's own, which cannot wait for itself
        self.close(wait=threading.get_ident() == self._owner[1])


def wait_for_earlier(feed: Feed) -> None:
    """Wait for passes that were forgotten while their reader was in the source.

    Raises:
        RuntimeError: It still is.
    """
    while feed.left:
        end = feed.left[0]
        try:
            end.wait(PATIENCE_S)
        except TimeoutError as error:
            if end.done():
                raise  # the source's own
            raise RuntimeError(
                f"source is still busy with a batch for an earlier pass, after {PATIENCE_S:g} s, and has one "
                "iterator at a time: see what it waits for, or call iter() again when it is done"
            ) from error
        finally:
            feed.left[:] = [one for one in feed.left if not one.done()]


def _let_go(feed: Feed, reader: Reader, plan: Plan, handed_out: int) -> None:
    """A reader's last work: nobody is in the source any more."""
    plan.close(wait=True)
    feed.take_back(reader)
    reader.cursor.close(handed_out, feed.depth)
