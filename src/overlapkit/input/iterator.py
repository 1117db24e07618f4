"""The consumer's side of a pass: what a `for` loop over a DeviceLoader holds."""

from dataclasses import replace
from typing import Any, Self

import torch

from overlapkit.input.ahead import ReadAhead, wait_for_earlier
from overlapkit.input.failed import Failed
from overlapkit.input.feed import Feed
from overlapkit.input.nesting import map_leaves
from overlapkit.input.position import Position
from overlapkit.input.ranks import Ranks
from overlapkit.input.reader import Ended, Pulled
from overlapkit.input.uneven import Counted, Cut, Filler, Outcome, Plan
from overlapkit.warn import warn


class BatchIterator:
    """One pass over a DeviceLoader's source.

    Invariants:
        * The position moves when a batch is handed over, and at no other time.
        * Other ranks are waited for only before a batch is handed over, and in no thread that closing joins
          without telling it.
        * An error here that other ranks may be waiting behind is told to them at once.

    Args:
        feed: What it shares with the loader's other passes.
        resume: Where to start, or None for the beginning.

    Attributes:
        position: Where the consumer stands in this pass.
    """

    def __init__(self, feed: Feed, resume: Position | None) -> None:
        self._feed = feed
        self._epoch = feed.epoch
        self._resumed = resume is not None
        self._superseded = False
        self._number: int | None = None  # among the passes that all ranks begin
        self._settled = False
        if resume is None:
            feed.repeats.begin(feed.epoch)
        try:
            self._make_way()
            self._start(resume)
        except BaseException as error:
            self._tell(error)
            raise
        feed.live.add(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        self._check_open()
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
        self._ahead.close()

    def supersede(self) -> None:
        """Close, because the source has begun anew."""
        self._superseded = self._superseded or not self._ahead.closed
        self.close()

    def _make_way(self) -> None:
        """End the passes that were begun before, where there is one at a time."""
        if self._feed.exclusive:
            for earlier in list(self._feed.live):
                earlier.supersede()
            wait_for_earlier(self._feed)

    def _start(self, resume: Position | None) -> None:
        self._ahead = ReadAhead(self._feed, resume)
        self._again = resume is not None and resume.again
        self._last: Any = None  # what a filler is
        self.position = self._ahead.cursor.position
        self._stand = self._feed.position = replace(self.position, again=self._again)  # what the state says

    def _check_open(self) -> None:
        if self._superseded:
            raise RuntimeError(
                "this iterator was closed when a newer one was made: there is one at a time where the source "
                "has a state or persistent workers, and with reuse_buffers. Make a second loader for nested "
                "loops"
            )
        if self._ahead.closed:
            raise StopIteration

    def _next_outcome(self) -> Outcome:
        front, outcome = self._ahead.front, self._wait()
        while not self._settled:
            self._settle(outcome)
            if self._ahead.front is not front:
                front, outcome = self._ahead.front, self._wait()
        outcome = self._ahead.plan.decide(outcome)
        self._ahead.take()
        if self._resumed and isinstance(outcome, Ended) and not isinstance(outcome, Filler):
            self._start_afresh()  # nothing was left of the epoch that the state stands in
            return self._next_outcome()
        return outcome

    def _wait(self) -> Outcome:
        outcome = self._ahead.wait()
        self._check_open()  # another thread may have closed it
        return outcome

    def _settle(self, first: Outcome) -> None:
        """Find out which pass this is and how it goes on, before its first batch is handed over."""
        begun_in = self._epoch
        if self._feed.source.kind in ("map", "elastic"):  # set since iter(), it counts, as in a DataLoader
            self._epoch = self._feed.epoch  # other sources move on by themselves, as they read ahead
        left = self.position.epoch if self._resumed else begun_in
        if left != self._epoch and not isinstance(first, Failed):
            if self._resumed and self.position.taken and isinstance(first, Pulled):
                warn(self.position.left_out(self._epoch, "batch"))
            self._start_afresh()
        elif self._again and isinstance(first, Pulled):
            before, self._again = self.position, False
            self._ahead.take()
            self._last = self._accept(first)
            self._stand = replace(before, again=True)
        else:
            self._ahead.follow(self._plan(first))
            if not self._ahead.plan.repeats:
                self._last = None
            self._settled = True

    def _plan(self, first: Outcome) -> Plan:
        left, ranks = self._ahead.cursor.left, self._feed.ranks
        if left is not None:
            left -= self._ahead.handed_out
        if ranks is None:
            return Plan() if left is None else Counted(left, left)
        if isinstance(first, Failed) and first.error is not None:
            self._tell(first.error)
            return Plan()
        return self._plan_among(ranks, left)

    def _plan_among(self, ranks: Ranks, left: float | None) -> Plan:
        if self._number is None:
            self._number = ranks.next_pass()
        spare = self._ahead.handed_out > 0
        try:
            with self._feed.log.host("input", "agree", exposed=True):
                return ranks.settle(self._number, left, resumed=self._resumed, spare=spare)
        except Exception as error:
            self._close_after(error)
            raise

    def _start_afresh(self) -> None:
        self._resumed = self._settled = False
        self._number = None
        try:
            self._ahead.stop().settle()  # the reader must be out of the source
            self._ahead.close()
            self._start(None)
        except BaseException as error:
            self._break_off(error)
            raise

    def _hand_over(self, pulled: Pulled) -> Any:
        batch = self._accept(pulled)
        self._note(filler=False)
        return batch

    def _accept(self, pulled: Pulled) -> Any:
        """Take a batch from the reader, which goes on with another."""
        before, ahead, watch = self.position, self._ahead, self._feed.watch
        watch.begin(look=ahead.ready)
        pull = ahead.submit()
        try:
            batch = pulled.receive()
            ahead.handed_out += 1
            self._stand = self.position = ahead.cursor.after(before, pulled.mark)
            if ahead.plan.repeats:  # the state goes back to where the filler comes from
                self._stand, self._last = replace(before, again=True), _same_again(batch)
        except BaseException as error:
            self._break_off(error)
            raise
        if watch.looking:
            with self._feed.log.host("input", "watch", exposed=True):
                watch.end(pull)
        return batch

    def _fill(self) -> Any:
        self._ahead.submit()
        self._note(filler=True)
        return _same_again(self._last)

    def _note(self, *, filler: bool) -> None:
        self._resumed = False
        finished, cursor = self._ahead.plan.finished, self._ahead.cursor
        self._feed.position = cursor.end(self.position) if finished else self._stand
        self._feed.filler = filler

    def _fail(self, failed: Failed) -> Any:
        error = failed.take()
        try:
            self._close_after(error)
            raise error
        finally:
            del error  # its traceback refers to this frame

    def _end(self, ended: Ended) -> None:
        self.close()
        ranks, ahead = self._feed.ranks, self._ahead
        if isinstance(ended, Cut) and not ahead.handed_out:
            raise ValueError(f"uneven='drop': nothing can be handed over: {ended.why}")
        if isinstance(ended, Cut) and ranks is not None and not ranks.warned:
            ranks.warned = True
            warn(f"uneven='drop': {ended.why}. This is said once")
        if self.position.taken == 0:
            raise ValueError(
                "source is empty: it gave no batch in this epoch. A function given as source must return a "
                "fresh iterator at each call"
            )
        self._feed.repeats.end(self.position.epoch)
        if ahead.cursor.forgets:
            self._feed.position, self._feed.filler = Position(epoch=self.position.epoch), False
        elif ahead.plan.repeats:
            self._stand = self.position
            self._note(filler=False)

    def _tell(self, error: BaseException) -> None:
        """Let the other ranks, who may be waiting for this one, fail with it."""
        ranks = self._feed.ranks
        if self._settled:
            self._ahead.plan.fail(error)
        elif ranks is not None:
            if self._number is None:
                self._number = ranks.next_pass()
            ranks.fail(self._number, error)

    def _break_off(self, error: BaseException) -> None:
        self._tell(error)
        self._close_after(error)

    def _close_after(self, error: BaseException) -> None:
        try:
            self.close()
        except Exception as late:
            error.add_note(f"closing the source also failed: {late!r}")  # the original error comes first


def _same_again(batch: Any) -> Any:
    """The batch in containers of its own, over the same memory: a loop may take a batch apart."""

    def anew(leaf: Any) -> Any:
        return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(batch, anew)
