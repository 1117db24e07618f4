"""Some batches of a mixture, drawn at once: which source each row is of, and which of its windows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from overlapkit.input.documents import count_up
from overlapkit.input.tokens import TokenShards
from overlapkit.input.weights import Plan
from overlapkit.input.windows import Batch, Places, fields, split

_OWN, _ALL = 1 << 13, 1 << 18
"""Samples that are drawn at once, of this rank and of all, unless one batch has more: some milliseconds."""


@dataclass(slots=True)
class Drawn:
    """Consecutive batches of one rank, found but not read.

    Attributes:
        counts: Samples that all ranks have drawn of each source before each batch and after the last,
            int64 (batches + 1, sources).
        taken: Rows of this rank alone, counted in the same way from the first of these batches.
        places: Where this rank's rows of each source are, in the order in which they were drawn.
        home: For each row of a batch, the row it has when the batch is sorted by source, int64 (batches, B).
    """

    counts: np.ndarray
    taken: np.ndarray
    places: list[Places]
    home: np.ndarray

    def read(self, sources: Sequence[TokenShards], number: int, batch: Batch, sorted_: Batch) -> None:
        """Fill a batch; `sorted_` is memory for another."""
        begin, end = self.taken[number], self.taken[number + 1]
        parts = split(sorted_, (end - begin).tolist())
        spans = map(slice, begin.tolist(), end.tolist())
        for source, part, places, span in zip(sources, parts, self.places, spans, strict=True):
            source.windows.fill(part, places[span])
        home = torch.from_numpy(self.home[number])
        for field, by_source in zip(fields(batch), fields(sorted_), strict=True):
            torch.index_select(by_source, 0, home, out=field)


def draw(
    sources: Sequence[TokenShards],
    plan: Plan,
    seed: int,
    epoch: int,
    position: int,
    counts: np.ndarray,
    most: int,
) -> Drawn:
    """Draw the batches that follow a position.

    Args:
        sources: The mixture's.
        plan: Their weights.
        seed: Of the draws.
        epoch: Of the mixture.
        position: Samples of it that all ranks have drawn.
        counts: How many of these were of each source, int64 (sources,).
        most: How many batches to draw; fewer where that is more than some milliseconds' work.
    """
    order, batch_size = sources[0].order, sources[0].batch_size
    whole = batch_size * order.world
    batches = max(1, min(most, _OWN // batch_size, _ALL // whole))
    every = plan.choose(seed, epoch, position, position + batches * whole)
    own = slice(order.rank, None, order.world)
    source, number = every[own], _earlier(every)[own]
    number += counts[source]
    places = [_locate(one, epoch, number[source == index]) for index, one in enumerate(sources)]
    by_source = source.reshape(batches, batch_size).argsort(axis=1, kind="stable")
    return Drawn(
        counts + _running(every, batches, len(sources)),
        _running(source, batches, len(sources)),
        places,
        by_source.argsort(axis=1),
    )


def _locate(source: TokenShards, epoch: int, number: np.ndarray) -> Places:
    """Find a source's samples by how many of it were drawn before, int64 (n,) rising.

    Each time round it has another order, and another one in each epoch of the mixture.
    """
    turn, place = np.divmod(number, source.order.size)
    sample = np.empty_like(place)
    for now in np.unique(turn).tolist():
        sample[turn == now] = source.order.at((epoch << 32) + now, place[turn == now])
    return source.windows.locate(sample)


def _earlier(source: np.ndarray) -> np.ndarray:
    """How many of the samples before each one are of the same source, int64 (n,)."""
    earlier = np.empty(len(source), dtype=np.int64)
    earlier[source.astype(np.uint16).argsort(kind="stable")] = count_up(np.bincount(source))
    return earlier


def _running(source: np.ndarray, batches: int, sources: int) -> np.ndarray:
    """How many samples of each source there are before each batch and in all, (batches + 1, sources)."""
    batch = np.arange(batches).repeat(len(source) // batches)
    table = np.bincount(batch * sources + source, minlength=batches * sources).reshape(batches, sources)
    return np.concatenate((np.zeros((1, sources), dtype=np.int64), table.cumsum(axis=0)))
