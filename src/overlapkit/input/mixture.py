"""Mixture: rows of several sources in one batch, drawn by weights that may change on the way."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Self

import numpy as np
from torch.utils.data import DataLoader

from overlapkit.input.checks import as_seed, is_integer
from overlapkit.input.drawing import Drawn, draw
from overlapkit.input.landing import Empty, host_memory
from overlapkit.input.order import Order
from overlapkit.input.parts import as_parts
from overlapkit.input.progress import Progress
from overlapkit.input.tokens import TokenShards
from overlapkit.input.weights import Place, Plan, Weights
from overlapkit.options import named_options
from overlapkit.warn import warn

_ENDLESS = 2**62


class Mixture:
    """Batches whose rows are drawn from several sources by weight: TokenShards, or map-style datasets.

    ```python
    mixture = Mixture({"web": web, "code": code}, {"web": 0.7, "code": 0.3})
    for inputs, targets in DeviceLoader(mixture, device, transform=inputs_and_targets):
        ...
    ```

    Each row is drawn by itself: which source the n-th sample of all ranks is of, is a function of (seed,
    epoch, n) and of the weights in force at n; it is the next sample of that source in the source's own
    order. So every batch holds each source's share, up to chance, and a position and a count for each source
    resume it exactly, at any number of ranks. A source that runs out begins its next epoch, in a new order.

    A pass has no end: leave it with `break`, or take parts of one iterator with `itertools.islice`. Each
    `iter()` is another epoch of the mixture, in which all sources start anew, unless `load_state_dict` or
    `set_epoch` said where to begin. Passes over the sources themselves are of no account here.

    Args:
        sources: TokenShards by name, alike in window, pack, dtype, batch size, rank and number of ranks (one
            with less than a batch for each rank is opened with drop_last=False). Or DataLoaders over an
            ElasticSampler, alike in the last three: their datasets' samples are loaded one by one in the
            reader's thread, without workers, and put together by the first one's `collate_fn`; a SampleSeed
            in a dataset draws anew each time round. Draws depend on the sequence of the sources: a state
            loads only where it is the same.
        weights: One for each name, in any unit; or a schedule [(samples, weights), ...]: the weights from so
            many samples of all ranks on, in the first epoch, rising from 0. The last of them stay in force.
        seed: Of the draws, the same on every rank. The order within a source is by the source's own seed.

    Attributes:
        batch_size: That of the sources.

    Raises:
        TypeError: A source is neither, or `weights` are none.
        ValueError: Sources are not alike, one has workers, or a weight is missing, of no source, negative or
            no number.
    """

    @named_options
    def __init__(
        self,
        sources: Mapping[str, TokenShards | DataLoader[Any]],
        weights: Weights | Sequence[tuple[int, Weights]],
        *,
        seed: int = 0,
    ) -> None:
        self._parts = as_parts(sources)
        self._names = list(sources)
        self._plan = Plan(self._names, weights)
        self.batch_size = self._parts[0].batch_size
        ranks = self._parts[0].order
        self._order = Order(_ENDLESS, ranks.rank, ranks.world, as_seed(seed), shuffle=True, drop_last=True)
        digests = [part.digest for part in self._parts]
        self._identity = {"sources": [list(one) for one in zip(self._names, digests, strict=True)]}
        self._progress = Progress(self._order, identity=self._identity)
        self._counts = np.zeros(len(sources), dtype=np.int64)
        self._latest: _Pass | None = None
        self._lock = threading.Lock()  # weights are set while a reader's thread draws

    def __iter__(self) -> "_Pass":
        """Begin a pass."""
        return self.iter_into(host_memory)

    def iter_into(self, empty: Empty) -> "_Pass":
        """Begin a pass whose batches are put straight into the memory that `empty` gives for them.

        Args:
            empty: Called with a shape and a dtype, within the `next()` that makes the batch.
        """
        for part in self._parts:
            part.rows.check()
        with self._lock:
            self._progress.begin()
            self._start_anew()
            self._latest = _Pass(self, empty, *self._place(), self._counts)
            return self._latest

    @property
    def batches_left(self) -> int:
        """Batches that the latest pass has not drawn yet: equally many on every rank, and never none."""
        return self._order.share(self._progress.position) // self.batch_size

    @property
    def epoch(self) -> int:
        """The epoch of the latest pass, or of the next one where it was set."""
        return self._progress.epoch

    @property
    def position(self) -> int:
        """Samples of the epoch that all ranks together have drawn, those read ahead of a loop included."""
        return self._progress.position

    @property
    def epochs(self) -> dict[str, int]:
        """How often each source has been gone through to its end, in this epoch of the mixture."""
        sizes = [part.order.size for part in self._parts]
        return dict(zip(self._names, (self._counts // sizes).tolist(), strict=True))

    @property
    def weights(self) -> dict[str, float]:
        """The weights in force for the next batch that is read."""
        return self._plan.at(self._place())

    def set_weights(self, weights: Weights, *, at: int | None = None) -> None:
        """Change the weights, instead of what the schedule has from there on. States carry the change.

        Args:
            weights: One for each name.
            at: From how many samples of all ranks on, in this epoch; None for the next batch that is read.
                Several ranks must all say the same, ahead of `position` on each: their readers are not
                equally far.

        Raises:
            TypeError: `weights` are none.
            ValueError: A weight is missing, of no source, negative or no number; `at` is behind what was
                read; or it is None while several ranks are reading.
        """
        with self._lock:
            epoch, position = self._place()
            if at is None and self._order.world > 1 and self._latest is not None:
                raise ValueError(
                    f"at=None with {self._order.world} ranks, whose readers are not equally far: give at=, a "
                    f"number of samples ahead of mixture.position ({position} here), the same on every rank"
                )
            if at is not None and (not is_integer(at) or at < position):
                raise ValueError(
                    f"at={at!r}: weights can change from sample {position} of this epoch on, where the next "
                    "batch begins"
                )
            self._plan.set((epoch, position if at is None else int(at)), weights, (epoch, position))
            if self._latest is not None:
                self._latest.redraw()

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this epoch: what is left of it where it was resumed, else all of it."""
        with self._lock:
            self._progress.set_epoch(epoch)
            self._start_anew()
            self._latest = None

    def state_dict(self) -> dict[str, Any]:
        """Where the latest pass stands, after the batch that it yielded last; the same on every rank."""
        return self.state_later()()

    def state_later(self) -> Callable[[], dict[str, Any]]:
        """What gives, whenever it is called, the state as it is now, with the weights that were set since.

        A loop that reads ahead asks for it with each batch: weights that it sets do not change batches that
        have been read, but belong to the state behind them.
        """
        with self._lock:
            return partial(self._state, self._progress.state_dict(), self._counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass begin where the state stands, at whatever number of ranks.

        The state's weights take the place of those here, with a warning where they differ. To go on with
        others call `set_weights` afterwards; a DeviceLoader loads the state when its pass begins.

        Raises:
            TypeError: It is no dict.
            ValueError: It is damaged, or was saved over other sources or another seed.
        """
        Progress(self._order, identity=self._identity).load_state_dict(state)
        if missing := sorted({"counts", "weights"} - state.keys()):
            raise ValueError(f"state lacks {', '.join(missing)}: give what state_dict() returned")
        counts, position = state["counts"], state["position"]
        natural = isinstance(counts, list) and all(type(count) is int and count >= 0 for count in counts)
        if not natural or len(counts) != len(self._names) or sum(counts) != position:
            raise ValueError(f"state has counts={counts!r} at position {position}: it is damaged")
        plan = Plan.from_state(self._names, state["weights"])
        with self._lock:
            self._progress.load_state_dict(state)
            ahead = zip_longest(plan.ahead(self._place()), self._plan.ahead(self._place()))
            if differ := [pair for pair in ahead if pair[0] != pair[1]]:
                there, here = differ[0]
                warn(
                    f"the state's weights take the place of this mixture's, first {there} that of {here}. To "
                    "go on with others, call set_weights() after loading (under a DeviceLoader after its "
                    "iter())",
                )
            self._counts = np.array(counts, dtype=np.int64)
            self._plan = plan
            self._latest = None

    def _start_anew(self) -> None:
        if self._progress.position == 0:
            self._counts = np.zeros_like(self._counts)

    def _place(self) -> Place:
        return self._progress.epoch, self._progress.position

    def _state(self, progress: dict[str, Any], counts: np.ndarray) -> dict[str, Any]:
        weights = self._plan.state((progress["epoch"], progress["position"]))
        return {**progress, "counts": counts.tolist(), "weights": weights}

    def _draw(self, epoch: int, position: int, counts: np.ndarray, most: int) -> Drawn:
        return draw(self._parts, self._plan, self._order.seed, epoch, position, counts, most)


class _Pass:
    """One pass over a mixture; it has no end."""

    def __init__(self, mixture: Mixture, empty: Empty, epoch: int, position: int, counts: np.ndarray) -> None:
        self._mixture = mixture
        self._empty = empty
        self._epoch = epoch
        self._position = position
        self._counts = counts
        self._batches = 0
        self._drawn: Drawn | None = None
        self._most = 1  # batches to draw next: few after a change, for another may follow soon
        self._number = 0  # of the next batch among those drawn
        rows = [part.rows for part in mixture._parts]
        self._mix = rows[0].mixer(rows, mixture.batch_size)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        mixture = self._mixture
        with mixture._lock:
            drawn, number = self._take()
            if mixture._latest is self:
                mixture._progress.take(self._batches * mixture.batch_size)
                mixture._counts = self._counts
        return self._mix(*drawn.rows(number), self._empty)

    def redraw(self) -> None:
        """Forget what has been drawn and not taken: weights have changed."""
        self._drawn, self._most = None, 1

    def _take(self) -> tuple[Drawn, int]:
        if self._drawn is None or self._number == len(self._drawn.home):
            self._drawn = self._mixture._draw(self._epoch, self._position, self._counts, self._most)
            self._number, self._most = 0, 8 * len(self._drawn.home)
        number = self._number
        self._number += 1
        self._batches += 1
        self._position += self._mixture.batch_size * self._mixture._order.world
        self._counts = self._drawn.counts[number + 1]
        return self._drawn, number
