"""How many batches a pass hands over, where other ranks may have more or fewer than this one."""

from typing import Literal

from overlapkit.input.failed import Failed
from overlapkit.input.reader import Ended, Pulled
from overlapkit.lane import Ticket

Uneven = Literal["error", "drop", "join"]
Outcome = Pulled | Ended | Failed | None

ALONE = "A loader that not every rank iterates, and equally often, needs uneven=None"
REMEDY = "give each rank equally many (as ElasticSampler does), or use uneven='drop' or uneven='join'"


class Filler(Ended):
    """This rank has no more batches, but others have: its last one is handed over again."""


class Cut(Ended):
    """This rank has more batches, but others have not."""

    def __init__(self, why: str) -> None:
        self.why = why


class Plan:
    """How a pass goes on: here to the source's end, whatever other ranks have.

    Attributes:
        repeats: This rank may have to hand its last batch over again.
        finished: All ranks have handed over what they will, though this source is not just at its end.
    """

    repeats = False
    finished = False

    def follow(self, pull: Ticket[Outcome]) -> Ticket[Outcome]:
        """What the consumer is to wait for instead of a pull."""
        return pull

    def decide(self, outcome: Outcome) -> Outcome:
        """What comes next for the consumer where this came of the ticket in front."""
        return outcome

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits for this rank that a batch came to nothing here after it was agreed on."""

    def close(self, *, wait: bool) -> None:
        """Let go of the pass."""


class Counted(Plan):
    """All ranks know how many batches they have, and hand over equally many: nothing more is exchanged.

    One rank alone is held to its number, too: an epoch that is silently short is lost data.

    Args:
        left: What this rank has.
        limit: What all ranks hand over.
    """

    def __init__(self, left: float, limit: float) -> None:
        self.repeats = left < limit
        self._left = left
        self._limit = limit
        self._given = 0  # by the source
        self._count = 0  # handed over

    def decide(self, outcome: Outcome) -> Outcome:
        """The source's batch, or what stands for it."""
        if self._count == self._limit < self._left:
            return Cut(f"this rank leaves out {self._left - self._limit} of {self._left} batches")
        if isinstance(outcome, Failed):
            return outcome
        if isinstance(outcome, Pulled) != (self._given < self._left):
            return Failed(ValueError(self._broken_promise()))
        self._given += isinstance(outcome, Pulled)
        if self._count == self._limit:
            return Ended()
        self._count += 1
        self.finished = self._count == self._limit != self._left
        return outcome if isinstance(outcome, Pulled) else Filler()

    def _broken_promise(self) -> str:
        number = f"more than {self._left}" if self._given == self._left else str(self._given)
        return (
            f"source gave {number} batches where its len() says {self._left}, and resuming and other ranks "
            "rely on that: correct its __len__, or leave it out"
        )
