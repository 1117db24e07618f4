"""The consumer's side of a pass: what a `for` loop over a DeviceLoader holds."""

import atexit
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch

from overlapkit.input.draws import DrawWatch
from overlapkit.input.failed import Failed
from overlapkit.input.nesting import map_leaves
from overlapkit.input.position import Position
from overlapkit.input.ranks import Ranks
from overlapkit.input.reader import Ended, Pulled, Reader
from overlapkit.input.uneven import Cut, Filler, Outcome, Plan
from overlapkit.lane import Lane, Ticket
from overlapkit.span import SpanLog

PATIENCE_S = 10.0
"""How long closing waits for a source that is busy; then its thread is left to end by itself."""


_unfinished: "weakref.WeakSet[BatchIterator]" = weakref.WeakSet()


@atexit.register  # later than the lanes' own, so it runs before: they finish what they were given
def _stop_at_exit() -> None:
    """Let no reader go on for batches that nobody will take."""
    for iterator in list(_unfinished):
        iterator._reader.stopped = True
        iterator._plan.close(wait=False)


class BatchIterator:
    """One pass over a DeviceLoader's source.

    Invariants:
        * `depth` pulls are outstanding until the end: taking a batch submits the next pull.
        * The position moves when a batch is handed over, and at no other time.
        * Other ranks are waited for only before a batch is handed over, and in no thread that closing joins
          without telling it.
        * Only the reader's thread advances the source; it is let go of when that thread has ended.

    Args:
        begin: Starts a pass, where the given position stood.
        resume: Where to start, or None for the beginning.
        epoch: The epoch that the loop is in.
        depth: Pulls outstanding.
        device: Where batches go.
        log: Takes the consumer's waits.
        watch: Looks on during the first pulls.
        ranks: The other ranks, or None where what they do does not matter.
        on_taken: Called at each hand-over with the position, and whether the batch was a filler.
        on_closed: Called once with the reader, when its thread has ended.

    Attributes:
        position: Where the consumer stands in this pass.
    """

    def __init__(
        self,
        begin: Callable[[Position | None], Reader],
        resume: Position | None,
        epoch: int | None,
        depth: int,
        device: torch.device,
        log: SpanLog,
        watch: DrawWatch,
        ranks: Ranks | None,
        on_taken: Callable[[Position, bool], None],
        on_closed: Callable[[Reader], None],
    ) -> None:
        self._superseded = False
        self._ahead = False  # of the loop: the batch was there when it was asked for
        self._owner = os.getpid(), threading.get_ident()
        self._begin = begin
        self._resumed = resume is not None
        self._epoch = epoch
        self._depth = depth
        self._device = device
        self._log = log
        self._watch = watch
        self._ranks = ranks
        self._on_taken = on_taken
        self._on_closed = on_closed
        self._lane = Lane("input", kind="thread")
        self._closed = True  # nothing to close until there is a pass
        self._start(resume)
        self._closed = False
        _unfinished.add(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._superseded:
            raise RuntimeError(
                "this iterator was closed when a newer one was made: there is one at a time where the source "
                "has a state or persistent workers, and with reuse_buffers. Make a second loader for nested "
                "loops"
            )
        if self._closed:
            raise StopIteration
        outcome = self._next_outcome()
        if isinstance(outcome, Pulled):
            return self._hand_over(outcome)
        if isinstance(outcome, Filler):
            return self._fill()
        if isinstance(outcome, Failed):
            return self._fail(outcome)
        assert isinstance(outcome, Ended)
        self._end(outcome)
        raise StopIteration

    def close(self) -> None:
        """End the pass: the reader stops, its thread ends, and the source's iterator is let go of.

        Waits for a source that is busy with a batch, but not for ever. Safe to call twice.
        """
        self._close(wait=True)

    def supersede(self) -> None:
        """Close, because the source has begun anew."""
        self._superseded = not self._closed
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or sys.is_finalizing():
            return
        # the cyclic collector runs in any thread, even the reader's own, which cannot wait for itself
        self._close(wait=threading.get_ident() == self._owner[1])

    def _start(self, resume: Position | None) -> None:
        self._reader = self._begin(resume)
        self.position = self._reader.cursor.position
        self._number: int | None = None  # among the passes that all ranks begin
        self._plan = Plan()
        self._settled = False
        self._again = resume is not None and resume.again
        self._stand = self.position  # what the state says
        self._last: Any = None  # what a filler is
        self._handed_out = 0
        self._tickets: deque[Ticket[Outcome]] = deque()
        for _ in range(self._depth):
            self._submit()

    def _next_outcome(self) -> Outcome:
        front, outcome = self._tickets[0], self._wait()
        while not self._settled:
            self._settle(outcome)
            if self._tickets[0] is not front:
                front, outcome = self._tickets[0], self._wait()
        outcome = self._plan.decide(outcome)
        self._tickets.popleft()
        if self._resumed and isinstance(outcome, Ended) and not isinstance(outcome, Filler):
            self._start_afresh()  # nothing was left of the epoch that the state stands in
            return self._next_outcome()
        return outcome

    def _wait(self) -> Outcome:
        self._ahead = self._tickets[0].done()
        self._watch.begin(look=not self._ahead)
        with self._log.host("input", "wait", exposed=True):
            outcome = self._tickets[0].wait()
        self._watch.end()
        self._watch.tell()
        return outcome

    def _settle(self, first: Outcome) -> None:
        """Find out which pass this is and how it goes on, before its first batch is handed over."""
        if self._resumed and self.position.epoch != self._epoch and not isinstance(first, Failed):
            if isinstance(first, Pulled):
                warnings.warn(self.position.left_out(self._epoch, "batch"), stacklevel=4)
            self._start_afresh()
        elif self._again and isinstance(first, Pulled):
            self._again = False
            self._tickets.popleft()
            self._stand, self._last = replace(self.position, again=True), self._accept(first)
        else:
            if self._ranks is not None:
                self._plan = self._settle_among(self._ranks, first)
                self._tickets = deque(map(self._plan.follow, self._tickets))
            if not self._plan.repeats:
                self._last = None
            self._settled = True

    def _settle_among(self, ranks: Ranks, first: Outcome) -> Plan:
        if self._number is None:
            self._number = ranks.next_pass()
        if isinstance(first, Failed) and first.error is not None:
            ranks.fail(self._number, first.error)
            return Plan()
        left, before = self._reader.cursor.left, self._handed_out
        left = None if left is None else left - before
        try:
            with self._log.host("input", "agree", exposed=True):
                return ranks.settle(self._number, left, resumed=self._resumed, spare=before > 0)
        except Exception as error:
            self._close_after(error)
            raise

    def _start_afresh(self) -> None:
        self._resumed = False
        self._reader.stopped = True
        for ticket in self._tickets:
            ticket.settle()  # the reader must be out of the source before it is let go of
        try:
            self._plan.close(wait=True)
            self._on_closed(self._reader)
            self._reader.cursor.close(self._handed_out, self._depth)
            self._start(None)
        except BaseException as error:
            self._close_after(error)
            raise

    def _hand_over(self, pulled: Pulled) -> Any:
        before = self.position
        batch = self._accept(pulled)
        self._stand = self.position
        if self._plan.repeats:  # the state goes back to where the filler comes from
            self._stand, self._last = replace(before, again=True), _same_again(batch)
        self._note(filler=False)
        return batch

    def _accept(self, pulled: Pulled) -> Any:
        """Take a batch from the reader, which goes on with another."""
        self._watch.begin(look=self._ahead)
        pull = self._submit()
        try:
            batch = pulled.receive()
        except BaseException as error:
            self._close_after(error)
            raise
        self._handed_out += 1
        self.position = self._reader.cursor.after(self.position, pulled.mark)
        if self._watch.looking:
            with self._log.host("input", "watch", exposed=True):
                self._watch.end(pull)
        return batch

    def _fill(self) -> Any:
        self._submit()
        self._note(filler=True)
        return _same_again(self._last)

    def _note(self, *, filler: bool) -> None:
        self._resumed = False
        here = self._reader.cursor.end(self.position) if self._plan.finished else self._stand
        self._on_taken(here, filler)

    def _fail(self, failed: Failed) -> Any:
        error = failed.take()
        try:
            self._close_after(error)
            raise error
        finally:
            del error  # its traceback refers to this frame

    def _end(self, ended: Ended) -> None:
        self.close()
        if isinstance(ended, Cut) and not self._handed_out:
            raise ValueError(f"uneven='drop': nothing can be handed over: {ended.why}")
        if isinstance(ended, Cut) and self._ranks is not None and not self._ranks.warned:
            self._ranks.warned = True
            warnings.warn(f"uneven='drop': {ended.why}. This is said once", stacklevel=3)
        if self.position.taken == 0:
            raise ValueError(
                "source is empty: it gave no batch in this epoch. A function given as source must return a "
                "fresh iterator at each call"
            )
        if self._reader.cursor.forgets:
            self._on_taken(Position(epoch=self.position.epoch), False)
        elif self._plan.repeats:
            self._stand = self.position
            self._note(filler=False)

    def _submit(self) -> Ticket[Outcome]:
        stream = torch.cuda.current_stream(self._device) if self._reader.mover is not None else None
        pull = self._lane.submit(partial(self._reader.pull, stream))
        self._tickets.append(self._plan.follow(pull))
        return pull

    def _close_after(self, error: BaseException) -> None:
        try:
            self.close()
        except Exception as late:
            error.add_note(f"closing the source also failed: {late!r}")  # the original error comes first

    def _close(self, *, wait: bool) -> None:
        if self._closed or os.getpid() != self._owner[0]:
            return
        self._closed = True
        self._reader.stopped = True
        self._tickets.clear()
        self._plan.close(wait=False)
        if not wait:
            return  # the lane ends its thread when it is dropped, and with it goes the reader
        try:
            self._lane.close(PATIENCE_S)
        except TimeoutError:
            warnings.warn(
                f"source was still busy {PATIENCE_S:g} s after its iterator was closed; its thread is left "
                "to end by itself",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        self._plan.close(wait=True)
        self._on_closed(self._reader)
        self._reader.cursor.close(self._handed_out, self._depth)


def _same_again(batch: Any) -> Any:
    """The batch in containers of its own, over the same memory: a loop may take a batch apart."""

    def anew(leaf: Any) -> Any:
        return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(batch, anew)
