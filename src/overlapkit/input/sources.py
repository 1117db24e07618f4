"""What a DeviceLoader can read from, and how each kind of source is taken up again in mid-epoch.

A Source is asked for one Cursor an epoch, in the consumer's thread, so that random numbers drawn by
`iter()` are drawn where they would be without us. The cursor is advanced in the reader's thread.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import wait
from types import GeneratorType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from overlapkit.counted import counted
from overlapkit.input.generators import Generators, random_state, tell_lost
from overlapkit.input.landing import Empty, read
from overlapkit.input.nesting import ATOMS
from overlapkit.input.position import Position
from overlapkit.input.reach import reachable


class Cursor:
    """One pass over a source.

    Attributes:
        position: Where the consumer stands before it has taken a batch of this pass.
        forgets: Once its end was seen the consumer stands nowhere: the next pass needs nothing of this one.
        left: Batches that the pass has, where that is known for certain.
        to_drop: Batches to `drop` before the first one.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        position: Position,
        *,
        forgets: bool = False,
        left: float | None = None,
        to_drop: int = 0,
    ) -> None:
        self._batches: Iterator[Any] | None = batches
        self.position = position
        self.forgets = forgets
        self.left = left
        self.to_drop = to_drop

    def next(self) -> tuple[Any, Any]:
        """The next batch, and the mark that describes having taken it.

        Raises:
            StopIteration: The epoch is over.
        """
        assert self._batches is not None
        try:
            return next(self._batches), None
        except (OSError, EOFError) as error:  # what a worker that dies in mid-sentence looks like
            if dead := _dead_workers(self._batches):
                raise RuntimeError(
                    f"a worker process of source died ({dead}): it crashed, or was killed, often for want of "
                    "memory or of shared memory (/dev/shm)"
                ) from error
            raise

    def drop(self) -> None:
        """Read a batch that was taken in an earlier life, and forget it."""
        try:
            self.next()
        except StopIteration:
            raise RuntimeError(
                f"state stands after batch {self.position.taken} of an epoch, but source ends "
                f"{self.to_drop} before that: it is not the source that the state was saved over"
            ) from None
        self.to_drop -= 1

    def after(self, here: Position, mark: Any) -> Position:
        """Where the consumer stands that stood `here` and has taken the batch with this mark."""
        return Position(here.taken + 1, here.epoch, here.order, mark)

    def end(self, here: Position) -> Position:
        """Where the consumer stands when the pass is over, though it has not taken all of it."""
        if self.left is None:
            return here
        return replace(here, taken=self.position.taken + int(self.left), mark=None)

    def close(self, handed_out: int, depth: int) -> None:
        """Let go of the source's iterator, now, though a traceback may still refer to it.

        Called once, when nobody is in `next`.

        Args:
            handed_out: Batches of this pass that the consumer took.
            depth: Batches that may have been read ahead of that.
        """
        batches, self._batches = self._batches, None
        if isinstance(batches, GeneratorType):
            batches.close()
        elif getattr(batches, "_workers", None) and not getattr(batches, "_persistent_workers", True):
            batches._shutdown_workers()  # type: ignore[union-attr]  # as a DataLoader's iterator at its end


class Source(ABC):
    """A re-iterable of batches.

    Attributes:
        kind: Its name in a state.
        unit: What its positions count.
        exclusive: It has one iterator at a time: a new one makes the old one useless.
        replays: It goes to where a state stands although another epoch was set since, for the sake of
            generators that the epochs share.
    """

    kind: str
    unit = "batch"
    exclusive = False
    replays = True

    def __init__(self, original: Any) -> None:
        self.original = original

    @abstractmethod
    def begin(self, resume: Position | None, empty: Empty | None = None) -> Cursor:
        """Start a pass, at its beginning or where `resume` stood. Called in the consumer's thread.

        Args:
            resume: Where to start, or None.
            empty: Lends host memory to sources that make their batches in it; None without a GPU.
        """

    def over(self, position: Position) -> bool:
        """Whether nothing of the epoch is left after a position of this source, as far as it can tell."""
        return False

    def check(self, resume: Position) -> None:
        """Refuse a position that this source cannot go to: here, one beyond its end.

        Raises:
            ValueError: It cannot; the message says why and what to do.
        """
        length = known_length(self.original)
        if length is not None and resume.taken > length:
            raise ValueError(
                f"state has taken {counted(resume.taken, 'batch')}, source has {length}: it is not "
                "the source that the state was saved over"
            )

    def rest(self) -> Position:
        """Where the consumer stands before the first epoch."""
        return Position()

    def close(self) -> None:  # noqa: B027  # most make nothing
        """End what was made for all passes; the next one makes it anew."""


class Listed(Source):
    """A list or tuple of batches: taken up by index."""

    kind = "list"

    def begin(self, resume: Position | None, empty: Empty | None = None) -> Cursor:
        """Start at the first batch that has not been taken."""
        taken = resume.taken if resume else 0
        batches = (self.original[index] for index in range(taken, len(self.original)))
        return Cursor(batches, Position(taken), left=len(self.original) - taken)

    def over(self, position: Position) -> bool:
        """Whether all batches have been taken."""
        return position.taken == len(self.original)


class Stateful(Source):
    """A source with state_dict and load_state_dict of its own, such as StatefulDataLoader.

    It may know more, and say so by attributes: `batches_left`, those of the pass that was begun last;
    `is_over(state)`, whether the state's epoch has none left; `state_later()`, see `snapshot`.
    """

    kind = "stateful"
    exclusive = True  # its state is that of its latest iterator

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.replays = not callable(getattr(original, "set_epoch", None))
        dataset = getattr(original, "dataset", None)
        stateless = not callable(getattr(dataset, "state_dict", None))
        self._owned = Generators(reachable(dataset) if stateless else ())

    def begin(self, resume: Position | None, empty: Empty | None = None) -> Cursor:
        """Start, after the source has loaded its own state; one with epochs has the last word on them."""
        if resume is not None and resume.mark is not None:
            told = None if self.replays else getattr(self.original, "epoch", None)
            self.original.load_state_dict(copy.deepcopy(resume.mark))
            if told is not None and told != resume.epoch:  # the loop set it after the state was loaded
                self.original.set_epoch(told)
        taken = resume.taken if resume else 0
        begun = resume is not None and resume.begun
        if begun and self._owned:
            tell_lost(self._owned, taken, "source keeps it only of a dataset with state_dict()")
        with random_state() if begun else nullcontext():  # what iter() draws was drawn when the epoch began
            batches = read(self.original, empty)
        left = getattr(self.original, "batches_left", None)
        return _Snapshots(batches, Position(taken, mark=self.snapshot()), self.snapshot, left)

    def over(self, position: Position) -> bool:
        """Whether nothing is left, where the source can tell by a state of its own (`is_over`)."""
        is_over = getattr(self.original, "is_over", None)
        return callable(is_over) and bool(is_over(position.noted))

    def check(self, resume: Position) -> None:
        """Refuse a position without the source's own state."""
        if resume.begun and resume.mark is None:
            raise ValueError(
                f"state has taken {counted(resume.taken, 'batch')} and no state of source: it is damaged"
            )

    def rest(self) -> Position:
        """The source's state."""
        return Position(mark=self.snapshot())

    def snapshot(self) -> Any:
        """The source's state now; a copy, because sources hand out what they go on changing.

        A source with `state_later` returns what works it out, so that what the loop tells the source after
        a batch was read ahead is in the state behind that batch.
        """
        if callable(later := getattr(self.original, "state_later", None)):
            return later()
        return _copied(self.original.state_dict())


class _Snapshots(Cursor):
    """A pass that notes the source's own state right after each batch."""

    def __init__(
        self,
        batches: Iterator[Any],
        position: Position,
        snapshot: Callable[[], Any],
        left: float | None,
    ) -> None:
        super().__init__(batches, position, left=left)
        self._snapshot = snapshot

    def next(self) -> tuple[Any, Any]:
        return super().next()[0], self._snapshot()

    def end(self, here: Position) -> Position:
        """Only the source could tell."""
        return here


def _copied(state: Any) -> Any:
    """A deep copy; of plain values, which is what most states are, at a fifth of `copy.deepcopy`'s price."""
    if type(state) is dict:
        return {key: value if type(value) in ATOMS else _copied(value) for key, value in state.items()}
    if type(state) is list:
        return [value if type(value) in ATOMS else _copied(value) for value in state]
    return copy.deepcopy(state)


def known_length(source: Any) -> int | None:
    """Batches in an epoch, or None where the source does not know.

    An iterable-style DataLoader is not asked: it would take its answer for a promise, and warn later.
    """
    if isinstance(source, DataLoader) and isinstance(source.dataset, IterableDataset):
        return None
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def _dead_workers(batches: Any) -> str:
    """The worker processes of a DataLoader's iterator that have died, or are just dying."""
    workers = getattr(batches, "_workers", None)
    if not workers:
        return ""
    ended = wait([worker.sentinel for worker in workers], timeout=1.0)
    for worker in workers:
        if worker.sentinel in ended:
            worker.join(1.0)  # its end of the pipe is closed a moment before it has ended
    dead = [worker for worker in workers if worker.exitcode]
    return ", ".join(f"pid {worker.pid}, exit code {worker.exitcode}" for worker in dead)
