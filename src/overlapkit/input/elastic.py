"""A DataLoader over an ElasticSampler: one integer takes it up, at any number of ranks and workers."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from overlapkit.input.generators import random_state
from overlapkit.input.landing import Empty
from overlapkit.input.position import Position
from overlapkit.input.progress import FORMAT, Progress
from overlapkit.input.sampler import ElasticSampler, Pass
from overlapkit.input.sources import Cursor
from overlapkit.input.twins import TwinCursor, TwinLoader
from overlapkit.warn import warn


def elastic_sampler(loader: DataLoader[Any]) -> ElasticSampler | None:
    """The ElasticSampler that alone decides on a loader's batches; None where there is none.

    A batch sampler of another class than torch's own may do with its samples what it likes.
    """
    batches: Any = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return None
    sampler: Any = loader.sampler if batches is None else batches.sampler
    elastic = isinstance(sampler, ElasticSampler) and type(sampler).__iter__ is ElasticSampler.__iter__
    return sampler if elastic else None


class ElasticLoader(TwinLoader["_IndexBatches"]):
    """A plain map-style DataLoader whose batches are consecutive samples of an ElasticSampler.

    Its twin's sampler begins where it should. In its positions `taken` counts the samples of all ranks
    together.
    """

    kind = "elastic"
    unit = "sample"
    replays = False

    def __init__(self, original: DataLoader[Any], sampler: ElasticSampler) -> None:
        super().__init__(original)
        self._sampler = sampler
        self._order = sampler.order

    def begin(self, resume: Position | None, empty: Empty | None = None) -> Cursor:
        """Start the epoch that the sampler was set to, or what `resume` left of it."""
        resumed = resume is not None and resume.taken > 0 and not self.over(resume)
        if resume is not None and resumed:
            resumed = resume.epoch == self._sampler.epoch
            if resumed:
                self._sampler.load_state_dict(self._state(resume))
            else:
                warn(resume.left_out(self._sampler.epoch, self.unit))
        one = self._sampler.begin()
        if not self._batches(one.share):  # fewer samples are left than a batch
            self._sampler.set_epoch(one.epoch)
            one = self._sampler.begin()
        loader, indices = self._twin()
        indices.one = one
        with random_state() if resumed else nullcontext():  # what iter() draws was drawn when the epoch began
            batches = iter(loader)
        if resume is not None:
            self._restore_drawn(resume)
        position, left = Position(one.position, one.epoch, self._identity()), self._batches(one.share)
        return _ElasticCursor(batches, position, self, one, indices.size, left)

    def over(self, position: Position) -> bool:
        """Whether no batch of the epoch is left."""
        return self._batches(self._order.share(position.taken)) == 0

    def check(self, resume: Position) -> None:
        """Refuse a position in another order."""
        Progress(self._order).load_state_dict(self._state(resume))

    def rest(self) -> Position:
        """Where the sampler stands."""
        state = self._sampler.state_dict()
        return self._rest(Position(state["position"], state["epoch"], self._identity()))

    def _who(self) -> list[int]:
        return [self._order.rank, self._order.world]

    def _identity(self) -> dict[str, Any]:
        return {"size": self._order.size, "seed": self._order.seed, "shuffle": self._order.shuffle}

    def _state(self, position: Position) -> dict[str, Any]:
        """A position as the sampler's own state."""
        identity = position.order if isinstance(position.order, dict) else {}
        return {"format": FORMAT, **identity, "epoch": position.epoch, "position": position.taken}

    def _batches(self, share: int) -> int:
        """Batches that each rank makes of its share of samples."""
        size, drop_last = _batching(self.original)
        return share // size if drop_last else -(-share // size)

    def _index_batches(self) -> "_IndexBatches":
        return _IndexBatches(self.original, self._sampler)


class _IndexBatches:
    """Stands in for a loader's (batch) sampler: each of its passes is `one`."""

    one: Pass

    def __init__(self, loader: DataLoader[Any], sampler: ElasticSampler) -> None:
        self.size, self._drop_last = _batching(loader)
        self._whole = loader.batch_sampler is not None
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        samples = self._sampler.samples(replace(self.one))  # a copy: `one` counts what the consumer takes
        return iter(BatchSampler(samples, self.size, self._drop_last)) if self._whole else samples


class _ElasticCursor(TwinCursor):
    """A pass whose position is how many samples all ranks together have taken."""

    def __init__(
        self,
        batches: Iterator[Any],
        position: Position,
        twin: ElasticLoader,
        one: Pass,
        size: int,
        left: int,
    ) -> None:
        super().__init__(batches, position, twin, left)
        self._order = twin._order
        self._one = one
        self._size = size
        self._taken = 0

    def _step(self, here: Position, mark: Any) -> Position:
        """One batch further; after the last one nothing is left, whatever has been dropped."""
        self._taken += 1
        one, last = self._one, self._taken == self.left
        one.until = one.share if last else self._taken * self._size
        end = self._order.size if last else self._order.after(one.position, one.until)
        return replace(here, taken=end)

    def end(self, here: Position) -> Position:
        """Behind all samples."""
        return replace(here, taken=self._order.size)


def _batching(loader: DataLoader[Any]) -> tuple[int, bool]:
    """Samples in a batch, and whether a last smaller one is left out."""
    batches: Any = loader.batch_sampler
    return (1, False) if batches is None else (batches.batch_size, batches.drop_last)
