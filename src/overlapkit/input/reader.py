"""The reader's side of a pass: what runs in its thread, and what it hands to the consumer."""

from dataclasses import dataclass
from typing import Any

import torch

from overlapkit.input.failed import Failed
from overlapkit.input.fixed import FixedMemory
from overlapkit.input.sources import Cursor
from overlapkit.input.transfer import Arrival, Mover, Transform
from overlapkit.span import SpanLog


@dataclass(slots=True)
class Pulled:
    """One batch, ready or on its way."""

    batch: Any
    mark: Any
    fixed: FixedMemory | None

    def receive(self) -> Any:
        """The batch, safe to use on the current stream."""
        batch = self.batch.receive() if isinstance(self.batch, Arrival) else self.batch
        return batch if self.fixed is None else self.fixed.place(batch)


class Ended:
    """The epoch is over."""


class Reader:
    """Advances a cursor, one pull at a time, in the reader's thread.

    Invariants:
        * Once `stopped`, or once it has ended or failed, the source is not asked again.
        * It refers to no part of the consumer's side, so a forgotten iterator is collected.

    Args:
        cursor: A pass over the source.
        mover: Sends batches to a GPU; None leaves them where they are.
        fixed: Where they are handed over, or None for wherever they are.
        transform: Applied to each batch.
        log: Takes the spans of lane "input".

    Attributes:
        stopped: Set by the consumer's side, never cleared.
    """

    def __init__(
        self,
        cursor: Cursor,
        mover: Mover | None,
        fixed: FixedMemory | None,
        transform: Transform | None,
        log: SpanLog,
    ) -> None:
        self.cursor = cursor
        self.mover = mover
        self.stopped = False
        self._fixed = fixed
        self._transform = transform if mover is None else None  # the mover applies it on its own stream
        self._log = log

    def pull(self, stream: torch.cuda.Stream | None) -> Pulled | Ended | Failed | None:
        """Read the next batch and start moving it; None where nobody wants one any more.

        Args:
            stream: The consumer's, or None without a GPU.
        """
        if self.stopped:
            return None
        try:
            if stream is None or self.mover is None:
                outcome = self._pull(None)
            else:
                with torch.cuda.stream(stream), self.mover.landing:
                    outcome = self._pull(stream)
        except BaseException as error:
            self.stopped = True
            return Failed(error)  # no local refers to it: its traceback refers to this frame
        self.stopped = self.stopped or isinstance(outcome, Ended)
        return outcome

    def _pull(self, stream: torch.cuda.Stream | None) -> Pulled | Ended | None:
        if self.cursor.to_drop:
            with self._log.host("input", "drop"):
                while self.cursor.to_drop and not self.stopped:
                    self.cursor.drop()
                    if self.mover is not None:
                        self.mover.landing.anew()
        if self.stopped:
            return None
        try:
            with self._log.host("input", "source"):
                batch, mark = self.cursor.next()
        except StopIteration:
            return Ended()
        if self.stopped:  # while the source was busy
            return None
        if self.mover is not None and stream is not None:
            batch = self.mover.send(batch, stream)
        elif self._transform is not None:
            with self._log.host("input", "transform"):
                batch = self._transform(batch)
        return Pulled(batch, mark, self._fixed)
