"""What the passes of one loader share: the source, what moves its batches, and where the loop stands."""

import weakref
from typing import TYPE_CHECKING

import torch

from overlapkit.input.checks import as_integer
from overlapkit.input.draws import DrawWatch
from overlapkit.input.epochs import Repeats, current_epoch, epoch_holders
from overlapkit.input.fixed import FixedMemory
from overlapkit.input.landing import Empty
from overlapkit.input.position import Position
from overlapkit.input.ranks import Ranks
from overlapkit.input.reader import Reader
from overlapkit.input.sources import Cursor, Source
from overlapkit.input.transfer import Mover, Transform
from overlapkit.lane import Ticket
from overlapkit.span import SpanLog

if TYPE_CHECKING:
    from overlapkit.input.iterator import BatchIterator


class Feed:
    """A source on its way to a device, pass after pass.

    Args:
        source: What is read.
        device: Where batches go.
        depth: Batches read ahead.
        pin: Page-lock host memory.
        transform: Applied to each batch.
        reuse_buffers: Hand every batch over at the same addresses.
        ranks: The other ranks, or None where what they do does not matter.

    Attributes:
        log: Takes the spans of lanes "input" and "transfer".
        watch: Looks on during the first waits.
        exclusive: There is one pass at a time.
        live: The passes that the program still refers to.
        left: The ends of exclusive passes that nobody has waited for.
        position: Where the loop stands; None before the first pass.
        filler: Whether the batch handed over last had been handed over before.
        repeats: Tells, once, who goes through one epoch again.
    """

    def __init__(
        self,
        source: Source,
        device: torch.device,
        depth: int,
        pin: bool,
        transform: Transform | None,
        reuse_buffers: bool,
        ranks: Ranks | None,
    ) -> None:
        self.source = source
        self.device = device
        self.depth = depth
        self.ranks = ranks
        self.log = SpanLog()
        self.watch = DrawWatch()
        self.repeats = Repeats(source)
        self.exclusive = source.exclusive or reuse_buffers
        self.live: weakref.WeakSet[BatchIterator] = weakref.WeakSet()
        self.left: list[Ticket[None]] = []
        self.position: Position | None = None
        self.filler = False
        self._pin = pin
        self._transform = transform
        self._fixed = FixedMemory(device, self.log) if reuse_buffers else None
        self._idle: list[Mover] = []
        self._epoch: int | None = None

    def begin(self, resume: Position | None) -> Reader:
        """Start reading, where `resume` stood or at the beginning; called in the consumer's thread."""
        mover = empty = None
        if self.device.type == "cuda":
            mover = self._idle.pop() if self._idle else self._new_mover()
            empty = mover.landing.empty
        epoch = self.epoch
        try:
            if resume is not None and resume.begun and self.source.replays and _differ(resume.epoch, epoch):
                cursor = self._replay(resume, epoch, empty)
            else:
                cursor = self.source.begin(resume, empty)
                cursor.position.epoch = epoch
        except BaseException:
            self._idle += [mover] if mover else []
            raise
        return Reader(cursor, mover, self._fixed, self._transform, self.log)

    def take_back(self, reader: Reader) -> None:
        """Keep what a finished pass moved its batches with: streams and page-locked memory are dear."""
        if reader.mover is not None:
            self._idle.append(reader.mover)
            reader.mover = None

    def free(self) -> None:
        """Free the host buffers of finished passes, and what the source keeps from pass to pass."""
        self._idle.clear()
        if all(end.done() for end in self.left):  # else a reader is in it yet
            self.source.close()

    @property
    def epoch(self) -> int | None:
        """The epoch that the loop is in, or None where it has none."""
        epoch = current_epoch(self.source.original)
        return self._epoch if epoch is None else epoch

    def set_epoch(self, epoch: int) -> None:
        """Tell whatever has epochs which one the next pass is.

        Raises:
            ValueError: It is no integer: a state that has it could not be loaded.
        """
        self._epoch = epoch = as_integer("epoch", epoch)
        for holder in epoch_holders(self.source.original):
            holder.set_epoch(epoch)

    def _replay(self, resume: Position, epoch: int | None, empty: Empty | None) -> Cursor:
        """Take up the state's epoch though another one is set: where it is over, generators go through it."""
        assert resume.epoch is not None
        assert epoch is not None
        self.set_epoch(resume.epoch)
        try:
            cursor = self.source.begin(resume, empty)
        finally:
            self.set_epoch(epoch)
        cursor.position.epoch = resume.epoch
        return cursor

    def _new_mover(self) -> Mover:
        return Mover(self.device, self.depth + 1, self._pin, self._transform, self.log)


def _differ(saved: int | None, now: int | None) -> bool:
    """Whether two epochs are not the same; one that was never set is none of its own."""
    return saved is not None and now is not None and saved != now
