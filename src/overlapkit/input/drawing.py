"""Some batches of a mixture, drawn at once: which source each row is of, and which of its samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlapkit.input.documents import count_up
from overlapkit.input.parts import Part
from overlapkit.input.weights import Plan

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
    places: list[Any]
    home: np.ndarray

    def rows(self, number: int) -> tuple[list[Any], np.ndarray]:
        """A batch: where its rows of each source are, and its row of `home`."""
        spans = map(slice, self.taken[number].tolist(), self.taken[number + 1].tolist())
        return [where[span] for where, span in zip(self.places, spans, strict=True)], self.home[number]


def draw(
    parts: Sequence[Part],
    plan: Plan,
    seed: int,
    epoch: int,
    position: int,
    counts: np.ndarray,
    most: int,
) -> Drawn:
    """Draw the batches that follow a position.

    Args:
        parts: The mixture's.
        plan: Their weights.
        seed: Of the draws.
        epoch: Of the mixture.
        position: Samples of it that all ranks have drawn.
        counts: How many of these were of each source, int64 (sources,).
        most: How many batches to draw; fewer where that is more than some milliseconds' work.
    """
    order, batch_size = parts[0].order, parts[0].batch_size
    whole = batch_size * order.world
    batches = max(1, min(most, _OWN // batch_size, _ALL // whole))
    every = plan.choose(seed, epoch, position, position + batches * whole)
    own = slice(order.rank, None, order.world)
    source, number = every[own], _earlier(every)[own]
    number += counts[source]
    places = [_locate(one, epoch, number[source == index]) for index, one in enumerate(parts)]
    by_source = source.reshape(batches, batch_size).argsort(axis=1, kind="stable")
    return Drawn(
        counts + _running(every, batches, len(parts)),
        _running(source, batches, len(parts)),
        places,
        by_source.argsort(axis=1),
    )


def _locate(part: Part, epoch: int, number: np.ndarray) -> Any:
    """Find a source's samples by how many of it were drawn before, int64 (n,) rising.

    Each time round it has another order, and another one in each epoch of the mixture.
    """
    turn, place = np.divmod(number, part.order.size)
    turn += epoch << 32
    sample = np.empty_like(place)
    for now in np.unique(turn).tolist():
        sample[turn == now] = part.order.at(now, place[turn == now])
    return part.rows.locate(sample, turn)


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
