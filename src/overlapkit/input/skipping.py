"""Taking up a plain DataLoader in mid-epoch, without loading what had been taken before.

The epoch's order is drawn again from the random state that it was drawn from, and the sampler's first
batches of indices are skipped; no sample of theirs is loaded.
"""

import operator
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from overlapkit.input.checks import is_integer
from overlapkit.input.digest import digest
from overlapkit.input.generators import Generators, held_by, random_state
from overlapkit.input.landing import Empty
from overlapkit.input.position import Position
from overlapkit.input.sources import Cursor, known_length
from overlapkit.input.twins import TwinCursor, TwinLoader

_SEEKABLE: tuple[type, ...] = type(iter([])), type(iter(range(0)))
"""Iterators that can begin anywhere, as those of SequentialSampler and DistributedSampler can."""

_AT_ONCE = 1 << 16
"""Items skipped at once: a list of so many, counted by its length, takes less time than counting each."""


def why_not_skipping(loader: DataLoader[Any]) -> str | None:
    """Why a DataLoader's position is not a number of index batches; None where it is."""
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset is an IterableDataset, which only its own state_dict() could take up"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{type(loader).__name__} iterates in its own way"
    if loader.num_workers and not loader.in_order:
        return "with in_order=False its batches come in an order of chance"
    return None


class SkippingLoader(TwinLoader["_IndexBatches"]):
    """A plain map-style DataLoader. Its twin's sampler can begin late."""

    kind = "map"

    def __init__(self, original: DataLoader[Any]) -> None:
        held = list(held_by([original, *sampler_chain(original)]))
        super().__init__(original, held)
        self._random = Generators(held)

    def begin(self, resume: Position | None, empty: Empty | None = None) -> Cursor:
        """Start an epoch in a new order, or in that of `resume` after the batches taken there.

        Raises:
            RuntimeError: The source does not give the order that the state was saved in.
        """
        order = resume.order if resume else None
        if resume is None or order is None:
            return self._start(None)
        if order["torch"] is not None:
            with random_state():  # what iter() draws was drawn when the epoch began
                return self._start(order, resume)
        self._random.restore(order["generators"])  # saved before the first epoch
        self._restore_drawn(resume)
        return self._start(None)

    def check(self, resume: Position) -> None:
        """Refuse a position beyond the end, and what is no order of this source's.

        Raises:
            ValueError: It is damaged, or of another source.
        """
        super().check(resume)
        if resume.begun or resume.order is not None:
            self._random.check(resume.order, begun=resume.begun)
        if resume.mark is not None and not is_integer(resume.mark):
            raise ValueError(f"state has mark={resume.mark!r:.80}: it is damaged, for that is a checksum")

    def rest(self) -> Position:
        """The generators as they are; torch's global one moves on until the first epoch."""
        return self._rest(Position(order={"generators": self._random.save(), "torch": None}))

    def over(self, position: Position) -> bool:
        """Whether all batches of the epoch have been taken, where their number is known."""
        return position.taken > 0 and position.taken == known_length(self.original)

    def _start(self, order: dict[str, Any] | None, resume: Position | None = None) -> "_IndexCursor":
        loader, indices = self._twin()
        indices.order = order
        indices.skip = resume.taken if resume else 0
        batches = iter(loader)
        draws = indices.latest
        assert draws is not None
        draws.prime()
        if resume is not None:
            draws.check(resume)
            self._restore_drawn(resume)
        taken, mark = (resume.taken, resume.mark) if resume else (0, None)
        length = known_length(self.original)
        left = None if length is None else length - taken
        return _IndexCursor(batches, Position(taken, order=draws.order, mark=mark), self, draws, left)

    def _index_batches(self) -> "_IndexBatches":
        original = self.original
        sampler = original.sampler if original.batch_sampler is None else original.batch_sampler
        return _IndexBatches(sampler, self._random)


def sampler_chain(loader: Any) -> list[Any]:
    """A loader's samplers and, in turn, those they draw from."""
    chain: list[Any] = []
    waiting = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    while waiting:
        sampler = waiting.pop(0)
        if hasattr(sampler, "__dict__") and not any(sampler is known for known in chain):
            chain.append(sampler)
            waiting += [held for name, held in vars(sampler).items() if _is_sampler(name, held)]
    return chain


class _IndexBatches:
    """Stands in for a loader's (batch) sampler: its passes start in a given order, after `skip` batches."""

    def __init__(self, sampler: Iterable[Any], random: Generators) -> None:
        self._sampler = sampler
        self._random = random
        self.order: dict[str, Any] | None = None
        self.skip = 0
        self.latest: _Draws | None = None

    def __iter__(self) -> "_Draws":
        # a DataLoader with workers begins twice, and draws from the first pass never
        self.latest = _Draws(self._sampler, self._random, self.order, self.skip)
        return self.latest

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # fails as the sampler itself would


class _Draws:
    """One pass over index batches, which remembers those whose data has not been handed over.

    Args:
        sampler: Gives index batches.
        random: Its generators.
        replay: The random state to draw the order from, or None for the state there is.
        skip: Index batches to leave out.

    Attributes:
        order: The random state that the order was drawn from.
        given: Index batches given to the DataLoader.
        under_way: Those of them whose data has not been handed over.
    """

    def __init__(
        self, sampler: Iterable[Any], random: Generators, replay: dict[str, Any] | None, skip: int
    ) -> None:
        self._sampler = sampler
        self._random = random
        self._skip = skip
        self._batches: Iterator[Any] | None = None
        self._first: list[Any] = []
        self._mark: int | None = None  # of the last batch skipped
        self._skipped = 0
        self.order = replay
        self.given = 0
        self.under_way: deque[Any] = deque()

    def __iter__(self) -> "_Draws":
        return self

    def __next__(self) -> Any:
        self.prime()
        assert self._batches is not None
        index = self._first.pop() if self._first else next(self._batches)
        self.given += 1
        self.under_way.append(index)
        return index

    def prime(self) -> None:
        """Skip, and draw the first batch: samplers that shuffle do it here, in the consumer's thread."""
        if self._batches is not None:
            return
        self.order = self._random.begin(self.order)
        self._batches, last, self._skipped = begin_after(self._sampler, self._skip)
        self._mark = digest(last)  # before the sampler goes on
        self._first.extend(islice(self._batches, 1))

    def advance(self, given: int) -> None:
        """Draw on until `given` batches were given, so that generators stand where they should.

        Nobody asked for these: a sampler that fails here has failed nobody.
        """
        missing = given - self.given - len(self._first)
        assert self._batches is not None
        with suppress(Exception):
            deque(islice(self._batches, max(0, missing)), maxlen=0)

    def check(self, resume: Position) -> None:
        """Refuse to go on in another order than the one that was left."""
        marks = self._mark, resume.mark
        if self._skipped == resume.taken and (None in marks or marks[0] == marks[1]):
            return
        what = f"ends after {self._skipped}" if self._skipped < resume.taken else "has other samples there"
        raise RuntimeError(
            f"state stands after batch {resume.taken} of an epoch, but source {what}: resume with the same "
            "dataset, batch_size, shuffle, world size and seed as when it was saved, and with a sampler that "
            "draws from torch's global generator, its own torch.Generator, or (seed, epoch)"
        )


def begin_after(sampler: Iterable[Any], count: int) -> tuple[Iterator[Any], Any, int]:
    """Begin a pass over index batches behind the first `count` of them, at the speed of C.

    Where torch's own BatchSampler makes them, the samples that it would take are skipped instead, before
    any batch is made of them.

    Returns:
        The rest of the pass, the last batch skipped (None where there is none), and how many were skipped.
    """
    before = max(0, count - 1)
    if count and type(sampler) is BatchSampler:
        samples, size = iter(sampler.sampler), sampler.batch_size
        skipped = _advance(samples, before * size)
        last = list(islice(samples, size))
        whole, part = divmod(skipped + len(last), size)
        skipped = whole + bool(part and not sampler.drop_last)
        return iter(BatchSampler(samples, size, sampler.drop_last)), last, skipped
    batches = iter(sampler)
    skipped = _advance(batches, before)
    last = list(islice(batches, count - before))
    return batches, last[0] if last else None, skipped + len(last)


def _advance(iterator: Iterator[Any], count: int) -> int:
    """Leave out the next `count` items; return how many there were."""
    if type(iterator) in _SEEKABLE:
        count = min(count, operator.length_hint(iterator))
        iterator.__setstate__(count)  # type: ignore[attr-defined]  # what copy and pickle move it with
        return count
    skipped = 0
    while found := len(list(islice(iterator, min(count - skipped, _AT_ONCE)))):
        skipped += found
    return skipped


class _IndexCursor(TwinCursor):
    """A pass that notes with each batch which samples it was made of."""

    def __init__(
        self,
        batches: Iterator[Any],
        position: Position,
        twin: SkippingLoader,
        draws: _Draws,
        left: int | None,
    ) -> None:
        super().__init__(batches, position, twin, left)
        self._draws = draws
        self._ahead = draws.given

    def next(self) -> tuple[Any, Any]:
        batch, (_, states) = super().next()
        index = self._draws.under_way.popleft()
        # at once where a sampler may go on changing what it gave: arrays, often views of the epoch's order
        mark = partial(digest, index.copy()) if type(index) is list else digest(index)
        return batch, (mark, states)

    def close(self, handed_out: int, depth: int) -> None:
        # how far the reader came is chance; where a shared generator is left must not be
        self._draws.advance(self._ahead + handed_out + depth)
        super().close(handed_out, depth)


def _is_sampler(name: str, value: Any) -> bool:
    return isinstance(value, Sampler) or name in ("sampler", "batch_sampler")
