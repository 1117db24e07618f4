"""The consumer's side of a pass: what a `for` loop over a DeviceLoader holds."""

import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch

from overlapkit.input.draws import DrawWatch
from overlapkit.input.failed import Failed
from overlapkit.input.position import Position
from overlapkit.input.reader import Ended, Pulled, Reader
from overlapkit.lane import Lane, Ticket
from overlapkit.span import SpanLog

PATIENCE_S = 10.0
"""How long closing waits for a source that is busy; then its thread is left to end by itself."""

_Outcome = Pulled | Ended | Failed | None


class BatchIterator:
    """One pass over a DeviceLoader's source.

    Invariants:
        * `depth` pulls are outstanding until the end: taking a batch submits the next pull.
        * The position moves when a batch is handed over, and at no other time.
        * Only the reader's thread advances the source; it is let go of when that thread has ended.

    Args:
        begin: Starts a pass, where the given position stood.
        resume: Where to start, or None for the beginning.
        epoch: The epoch that the loop is in.
        depth: Pulls outstanding.
        device: Where batches go.
        log: Takes the consumer's waits.
        watch: Looks on during the first of them.
        on_taken: Called with the position at each hand-over.
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
        on_taken: Callable[[Position], None],
        on_closed: Callable[[Reader], None],
    ) -> None:
        self._superseded = False
        self._owner = os.getpid(), threading.get_ident()
        self._begin = begin
        self._resumed = resume is not None
        self._epoch = epoch
        self._depth = depth
        self._device = device
        self._log = log
        self._watch = watch
        self._on_taken = on_taken
        self._on_closed = on_closed
        self._lane = Lane("input", kind="thread")
        self._closed = True  # nothing to close until there is a pass
        self._start(resume)
        self._closed = False

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
        with self._watch, self._log.host("input", "wait", exposed=True):
            outcome = self._tickets[0].wait()
        self._tickets.popleft()
        if self._resumed and not self._handed_out and self._is_over(outcome):
            self._start_afresh()
            return next(self)
        if isinstance(outcome, Pulled):
            return self._hand_over(outcome)
        if isinstance(outcome, Failed):
            return self._fail(outcome)
        assert isinstance(outcome, Ended)
        self._end()
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
        self._handed_out = 0
        self._tickets: deque[Ticket[_Outcome]] = deque()
        for _ in range(self._depth):
            self._submit()

    def _is_over(self, outcome: _Outcome) -> bool:
        """Whether the epoch that a state stands in is over, by its end or because another one was set."""
        if isinstance(outcome, Pulled) and self.position.epoch != self._epoch:
            warnings.warn(self.position.left_out(self._epoch, "batch"), stacklevel=3)
            return True
        return isinstance(outcome, Ended)

    def _start_afresh(self) -> None:
        self._resumed = False
        self._reader.stopped = True
        for ticket in self._tickets:
            ticket.settle()  # the reader must be out of the source before it is let go of
        try:
            self._on_closed(self._reader)
            self._reader.cursor.close(0, self._depth)
            self._start(None)
        except BaseException as error:
            self._close_after(error)
            raise

    def _hand_over(self, pulled: Pulled) -> Any:
        self._submit()
        try:
            batch = pulled.receive()
        except BaseException as error:
            self._close_after(error)
            raise
        self._handed_out += 1
        self.position = self._reader.cursor.after(self.position, pulled.mark)
        self._on_taken(self.position)
        return batch

    def _fail(self, failed: Failed) -> Any:
        error = failed.take()
        try:
            self._close_after(error)
            raise error
        finally:
            del error  # its traceback refers to this frame

    def _end(self) -> None:
        self.close()
        if self.position.taken == 0:
            raise ValueError(
                "source is empty: it gave no batch in this epoch. A function given as source must return a "
                "fresh iterator at each call"
            )
        if self._reader.cursor.forgets:
            self._on_taken(Position(epoch=self.position.epoch))

    def _submit(self) -> None:
        stream = torch.cuda.current_stream(self._device) if self._reader.mover is not None else None
        self._tickets.append(self._lane.submit(partial(self._reader.pull, stream)))

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
        self._on_closed(self._reader)
        self._reader.cursor.close(self._handed_out, self._depth)
