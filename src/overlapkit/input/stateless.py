"""Sources without a state: taken up between epochs, or by reading and dropping what had been taken."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

from overlapkit.counted import counted
from overlapkit.input.generators import Generators, held_by, random_state
from overlapkit.input.landing import Empty, read
from overlapkit.input.position import Position
from overlapkit.input.skipping import sampler_chain
from overlapkit.input.sources import Cursor, Source
from overlapkit.warn import warn


class Opaque(Source):
    """An iterable, or a function that returns one.

    Args:
        original: The iterable or function.
        why: Why its position cannot be restored.
        drop_through: Go to a position by reading all that comes before it.
    """

    kind = "iterable"

    def __init__(self, original: Any, why: str, drop_through: bool) -> None:
        super().__init__(original)
        self._why = why
        self._drop_through = drop_through
        holders = [original, getattr(original, "dataset", None), *sampler_chain(original)]
        self._random = Generators(held_by(holders))

    def begin(self, resume: Position | None, empty: Empty | None = None) -> Cursor:
        """Start at the beginning, with the generators as they were when the epoch of `resume` began."""
        taken, order = (resume.taken, resume.order) if resume else (0, None)
        self._warn(taken)
        with random_state() if order else nullcontext():  # what iter() draws was drawn when the epoch began
            order = self._random.begin(order)
            batches = read(self._fresh(), empty)
        return Cursor(batches, Position(taken, order=order), forgets=True, to_drop=taken)

    def check(self, resume: Position) -> None:
        """Refuse any position within an epoch, unless what comes before it may be dropped."""
        if resume.order is not None:
            self._random.check(resume.order, begun=True)
        if resume.begun and not self._drop_through:
            raise ValueError(
                f"state stands after batch {resume.taken} of an epoch, and source cannot be taken up there: "
                f"{self._why}. Use a map-style dataset with DataLoader, torchdata's StatefulDataLoader, or "
                "give the source state_dict() and load_state_dict(); or save between epochs; or let those "
                "batches be read again and dropped: drop_through=True"
            )

    def _fresh(self) -> Iterable[Any]:
        batches = self.original if isinstance(self.original, Iterable) else self.original()
        if not isinstance(batches, Iterable):
            raise TypeError(
                f"source={self.original!r} returned a {type(batches).__name__}: it must return an iterable"
            )
        return batches

    def _warn(self, count: int) -> None:
        if count:
            were = "was taken before is" if count == 1 else "were taken before are"
            warn(f"drop_through=True: {counted(count, 'batch')} that {were} read again and dropped")


class Resettable(Opaque):
    """An iterator that begins anew by its own `reset()`, and only where its epoch is over: DALI's are such.

    A pass that was left early is gone on with by the next, without what had been read ahead.
    """

    exclusive = True

    def __init__(self, original: Any, drop_through: bool) -> None:
        super().__init__(original, f"{type(original).__name__} begins at an epoch's beginning", drop_through)
        self.read = 0
        """Batches of the epoch under way that were read."""

    def begin(self, resume: Position | None, empty: Empty | None = None) -> Cursor:
        """Start where the iterator stands, which is at an epoch's beginning unless a pass was left early."""
        if self.read == _length(self.original):
            self.read = 0
        taken = resume.taken if resume else self.read
        if taken < self.read:
            raise RuntimeError(
                f"state stands after batch {taken} of an epoch, and {type(self.original).__name__} is after "
                f"batch {self.read}: it does not go back within an epoch. Build a new one"
            )
        if resume is None and self.read:
            warn(
                f"{type(self.original).__name__} cannot begin anew before its epoch is over: this pass goes "
                f"on after the {counted(self.read, 'batch')} that the last one read, some of them ahead of "
                "the loop"
            )
        self._warn(taken - self.read)
        return Cursor(_Epoch(self), Position(taken), forgets=True, to_drop=taken - self.read)


class _Epoch(Iterator[Any]):
    """One epoch, or the rest of one, of an iterator that is reset at its end: by itself, or here."""

    def __init__(self, source: Resettable) -> None:
        self._source = source
        self._begun = False

    def __next__(self) -> Any:
        source, begun, self._begun = self._source, self._begun, True
        try:
            batch = next(source.original)
        except StopIteration:
            source.read = 0
            if begun:
                raise
            source.original.reset()  # it stood at its epoch's end
            batch = next(source.original)
        source.read += 1
        return batch


def _length(iterator: Any) -> int | None:
    """Batches in an epoch; None where that is unknown, of which DALI makes 0."""
    try:
        return len(iterator) or None
    except (TypeError, ValueError, NotImplementedError):
        return None
