"""What a DeviceLoader can read from, and how each kind of source is taken up again in mid-epoch.

A Source is asked for one Cursor an epoch, in the consumer's thread, so that random numbers drawn by
`iter()` are drawn where they would be without us. The cursor is advanced in the reader's thread.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from multiprocessing.connection import wait
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from overlapkit.input.position import Position


class Cursor:
    """One pass over a source.

    Attributes:
        position: Where the consumer stands before it has taken a batch of this pass.
        forgets: Once its end was seen the consumer stands nowhere: the next pass needs nothing of this one.
        left: Batches that the pass has, where that is known for certain.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        position: Position,
        *,
        forgets: bool = False,
        left: float | None = None,
    ) -> None:
        self._batches: Iterator[Any] | None = batches
        self.position = position
        self.forgets = forgets
        self.left = left

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

    def after(self, here: Position, mark: Any) -> Position:
        """Where the consumer stands that stood `here` and has taken the batch with this mark."""
        return Position(here.taken + 1, here.epoch, here.order, mark)

    def end(self, here: Position) -> Position:
        """Where the consumer stands when the pass is over, though it has not taken all of it."""
        if self.left is None:
            return here
        return replace(here, taken=self.position.taken + int(self.left), mark=None)

    def close(self, handed_out: int, depth: int) -> None:
        """Let go of the source's iterator. Called once, when nobody is in `next`.

        Args:
            handed_out: Batches of this pass that the consumer took.
            depth: Batches that may have been read ahead of that.
        """
        batches, self._batches = self._batches, None
        if isinstance(batches, GeneratorType):
            batches.close()  # now, and with its own errors, though a traceback may still refer to it


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
    def begin(self, resume: Position | None) -> Cursor:
        """Start a pass, at its beginning or where `resume` stood. Called in the consumer's thread."""

    def over(self, position: Position) -> bool:
        """Whether nothing of the epoch is left after a position of this source, as far as it can tell."""
        return False

    def check(self, resume: Position) -> None:
        """Refuse a position that this source cannot go to.

        Raises:
            ValueError: It cannot; the message says why and what to do.
        """
        if resume.taken < 0:
            raise ValueError(f"state has taken {resume.taken} batches: it is damaged")

    def rest(self) -> Position:
        """Where the consumer stands before the first epoch."""
        return Position()


class Listed(Source):
    """A list or tuple of batches: taken up by index."""

    kind = "list"

    def begin(self, resume: Position | None) -> Cursor:
        """Start at the first batch that has not been taken."""
        taken = resume.taken if resume else 0
        batches = (self.original[index] for index in range(taken, len(self.original)))
        return Cursor(batches, Position(taken), left=len(self.original) - taken)

    def over(self, position: Position) -> bool:
        """Whether all batches have been taken."""
        return position.taken == len(self.original)

    def check(self, resume: Position) -> None:
        """Refuse a position beyond the end."""
        super().check(resume)
        if resume.taken > len(self.original):
            raise ValueError(
                f"state has taken {resume.taken} batches, source has {len(self.original)}: "
                "it is not the source that the state was saved over"
            )


class Opaque(Source):
    """An iterable, or a function that returns one, without state: taken up between epochs only.

    Args:
        original: The iterable or function.
        why: Why its position cannot be restored.
    """

    kind = "iterable"

    def __init__(self, original: Any, why: str) -> None:
        super().__init__(original)
        self._why = why

    def begin(self, resume: Position | None) -> Cursor:
        """Start at the beginning."""
        batches = self.original if isinstance(self.original, Iterable) else self.original()
        if not isinstance(batches, Iterable):
            raise TypeError(
                f"source={self.original!r} returned a {type(batches).__name__}: it must return an iterable"
            )
        return Cursor(iter(batches), Position(), forgets=True)

    def check(self, resume: Position) -> None:
        """Refuse any position within an epoch."""
        super().check(resume)
        if resume.begun:
            raise ValueError(
                f"state stands after batch {resume.taken} of an epoch, and source cannot be taken up there: "
                f"{self._why}. Use a map-style dataset with DataLoader, torchdata's StatefulDataLoader, or "
                "give the source state_dict() and load_state_dict(); or save between epochs"
            )


class Stateful(Source):
    """A source with state_dict and load_state_dict of its own, such as StatefulDataLoader."""

    kind = "stateful"
    exclusive = True  # its state is that of its latest iterator

    def begin(self, resume: Position | None) -> Cursor:
        """Start, after the source has loaded its own state."""
        if resume is not None and resume.mark is not None:
            self.original.load_state_dict(copy.deepcopy(resume.mark))
        taken = resume.taken if resume else 0
        begun = resume is not None and resume.begun
        with random_state() if begun else nullcontext():  # what iter() draws was drawn when the epoch began
            batches = iter(self.original)
        left = getattr(self.original, "batches_left", None)
        return _Snapshots(batches, Position(taken, mark=self.snapshot()), self.snapshot, left)

    def rest(self) -> Position:
        """The source's state."""
        return Position(mark=self.snapshot())

    def snapshot(self) -> Any:
        """The source's state now; a copy, because sources hand out what they go on changing."""
        return copy.deepcopy(self.original.state_dict())


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


@contextmanager
def random_state() -> Iterator[None]:
    """Let torch's global generator go on afterwards as if nothing had been drawn."""
    now = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(now)
