"""A DataLoader that is read through a twin: equal in all settings, but with a sampler of ours."""

import copy
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader

from overlapkit.device import rank_and_world
from overlapkit.input.generators import Generators, plain, tell_lost
from overlapkit.input.position import Position
from overlapkit.input.reach import reachable
from overlapkit.input.sources import Cursor, Source

Indices = TypeVar("Indices", bound=Iterable[Any])


class TwinLoader(Source, Generic[Indices]):
    """A plain map-style DataLoader, itself never iterated.

    Invariant:
        * Persistent workers have one twin for all passes: they belong to it.

    Args:
        original: The loader.
        held: What its samplers hold: generators among it are theirs, though the dataset may have them too.
    """

    def __init__(self, original: DataLoader[Any], held: Iterable[Any] = ()) -> None:
        super().__init__(original)
        self.exclusive = original.persistent_workers
        self._owned = Generators(reachable(original.dataset, original.collate_fn), others=held)
        self._kept: tuple[DataLoader[Any], Indices] | None = None
        self._pid = os.getpid()

    @abstractmethod
    def _index_batches(self) -> Indices:
        """What gives the twin its batches of indices (or its indices, where it makes no batches)."""

    def _twin(self) -> tuple[DataLoader[Any], Indices]:
        if self._kept is not None:
            return self._kept
        indices = self._index_batches()
        made = copy.copy(self.original)
        # setattr is refused once a DataLoader is made
        made.__dict__["sampler" if made.batch_sampler is None else "batch_sampler"] = indices
        if made.persistent_workers:
            made._iterator = None  # the original's workers are not ours
            self._kept, self._pid = (made, indices), os.getpid()
        return made, indices

    def close(self) -> None:
        """End the persistent workers: they are the twin's, and nobody else can."""
        kept, self._kept = self._kept, None
        if kept is None or self._pid != os.getpid():  # a forked child's they are not
            return
        if (batches := kept[0]._iterator) is not None:
            batches._shutdown_workers()  # type: ignore[attr-defined]  # as at its end

    def _rest(self, position: Position) -> Position:
        """The position before the first epoch, with the generators as they are."""
        if drawn := self._drawn():
            position.drawn = [self._who(), drawn.save()]
        return position

    def _drawn(self) -> Generators:
        """The dataset's own generators, as far as the reader's thread draws from them."""
        return Generators(()) if self.original.num_workers else self._owned

    def _who(self) -> list[int]:
        """Whose the generators are: the rank, and how many there are."""
        return list(rank_and_world())

    def _restore_drawn(self, resume: Position) -> None:
        """Let the dataset's own generators go on behind the batches taken, or tell that they do not."""
        who, states = resume.states or ([], [])
        if states and who == self._who() and not self.original.num_workers:
            self._owned.restore(states)
        elif resume.begun and self._owned:
            why = "it has none of them"
            if self.original.num_workers:
                why = "each worker has its own copies"
            elif states:
                why = f"it has those of rank {who[0]} of {who[1]}"
            tell_lost(self._owned, resume.taken, why)


class TwinCursor(Cursor):
    """A pass over a twin, which notes with each batch how the dataset's own generators were left.

    It leaves them behind the last batch that the consumer took.

    Args:
        batches: The twin's.
        position: As of a Cursor.
        twin: Knows the dataset's generators.
        left: As of a Cursor.
    """

    def __init__(
        self, batches: Iterator[Any], position: Position, twin: TwinLoader[Any], left: int | None
    ) -> None:
        super().__init__(batches, position, left=left)
        self._generators, self._who = twin._drawn(), twin._who()
        self._behind = self._generators.states()
        self._note(position)

    def next(self) -> tuple[Any, Any]:
        """The next batch, and its mark with the generators' states."""
        batch, mark = super().next()
        return batch, (mark, self._generators.states())

    def after(self, here: Position, mark: Any) -> Position:
        """Where the consumer stands that has taken one more batch."""
        mark, self._behind = mark
        return self._note(self._step(here, mark))

    def close(self, handed_out: int, depth: int) -> None:
        """Let go of the iterator: how far the reader came is chance, and nothing depends on it."""
        super().close(handed_out, depth)
        self._generators.put_back(self._behind)

    def _note(self, position: Position) -> Position:
        if self._behind:
            position.drawn = partial(plain, [self._who, self._behind])
        return position

    def _step(self, here: Position, mark: Any) -> Position:
        return super().after(here, mark)
