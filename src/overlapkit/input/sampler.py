"""ElasticSampler: DistributedSampler, with an order that one integer resumes at any number of ranks."""

import operator
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from itertools import chain
from numbers import Number
from typing import Any

from torch.utils.data import DistributedSampler

from overlapkit.device import rank_and_world
from overlapkit.input.checks import as_count, as_epoch, as_seed, check_choice, is_integer
from overlapkit.input.order import BLOCK, Order
from overlapkit.input.progress import Progress
from overlapkit.options import named_options


class ElasticSampler(DistributedSampler[int]):
    """This rank's samples of a shuffled epoch: a drop-in for torch.utils.data.DistributedSampler.

    ```python
    sampler = ElasticSampler(dataset)
    loader = DeviceLoader(DataLoader(dataset, batch_size=32, sampler=sampler), "cuda")
    checkpointer.restore({"loader": loader})
    for epoch in range(loader.next_epoch, epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            ...
    ```

    The order is a function of (seed, epoch, position), not a list: it takes no memory, and a state taken
    in mid-epoch is the same few integers on every rank, from which any number of ranks, with any batch
    size and any number of workers, goes on at once: no sample of the epoch is repeated or left out, but
    for what `drop_last` says. Over a DeviceLoader save the loader's state, which counts what the loop has
    taken; this sampler's own counts what was drawn from its latest iterator, read ahead or not, and is
    what torchdata's StatefulDataLoader keeps.

    As with DistributedSampler each pass over one epoch is the same, so call `set_epoch` before each; and
    every rank has equally many samples. Only the order itself is another one.

    Args:
        dataset: The dataset, or the number of its samples.
        num_replicas: Number of ranks that share an epoch; None for all there are.
        rank: This rank; None for this process's.
        shuffle: False keeps samples in their own order.
        seed: Of the shuffle; the same on every rank.
        drop_last: Where samples do not divide among ranks, leave up to `num_replicas` - 1 out; else the
            epoch's first are taken a second time.

    Raises:
        TypeError: `dataset` has no length.
        ValueError: `dataset` is empty, or an argument is out of range.
        RuntimeError: WORLD_SIZE is set but there is no process group: every rank would take the same.
    """

    @named_options
    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        # not super().__init__(): it asks for a process group, and sets the epoch that is a property here
        own_rank, world = (0, 1) if None not in (num_replicas, rank) else rank_and_world()
        self.dataset = dataset  # type: ignore[assignment]  # a number will do
        self.num_replicas = as_count("num_replicas", world if num_replicas is None else num_replicas)
        self.rank = _rank_among(self.num_replicas, own_rank if rank is None else rank)
        check_choice("shuffle", shuffle)
        check_choice("drop_last", drop_last)
        self.shuffle, self.seed, self.drop_last = shuffle, as_seed(seed), drop_last
        self.order = Order(_size_of(dataset), self.rank, self.num_replicas, self.seed, shuffle, drop_last)
        self.num_samples = self.order.share(0)
        self.total_size = self.num_samples * self.num_replicas
        self._next = _Next(0, 0, False)
        self._latest = Pass(0, 0, 0)

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch of the latest pass, or of the next one where it was set."""
        return self._next.epoch

    def __iter__(self) -> Iterator[int]:
        """This rank's samples of the epoch that is set now, or what a loaded state left of it.

        The pass begins when the first is asked for: a DataLoader makes iterators that it never asks.
        """
        return chain.from_iterable(self._blocks(self._next))

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch, equally many on every rank."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this epoch: what is left of it where a state stands in it, else all of it.

        Where a state stands at its end, nothing is left.
        """
        epoch = as_epoch(epoch)
        start = self._next.start if epoch == self._next.epoch else 0
        self._next = _Next(epoch, start or 0, True)

    def state_dict(self) -> dict[str, Any]:
        """Where the latest iterator stands: plain values, the same on every rank."""
        here, latest = Progress(self.order), self._latest
        here.epoch, here.position = self._next.epoch, self._next.start or 0
        if self._next.start is None:
            here.position = self.order.after(latest.position, latest.taken())
        return here.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass begin where `state` stands, whatever number of ranks it was saved at.

        A state at an epoch's end begins a whole pass, unless that very epoch is set, of which nothing is
        left. Where another epoch is set already, it stays: torchdata loads a sampler's state that late.

        Raises:
            TypeError: It is no dict.
            ValueError: It is damaged, or was saved over another number of samples, seed or shuffle.
        """
        there = Progress(self.order)
        there.load_state_dict(state)
        told, over = self._next, self.order.share(there.position) == 0
        if not (over and told.set and told.epoch != there.epoch):
            self._next = _Next(there.epoch, there.position, told.set)

    def begin(self) -> "Pass":
        """Begin the pass that was told: what `state_dict` describes from now on."""
        return self._begin(self._next)

    def samples(self, one: "Pass") -> Iterator[int]:
        """The samples of a pass, from its beginning; `one` counts those that are given."""
        return chain.from_iterable(self._pass(one))

    def _begin(self, told: "_Next") -> "Pass":
        start = told.start or 0
        if not told.set and self.order.share(start) == 0:
            start = 0
        one = Pass(told.epoch, start, self.order.share(start))
        if self._next is told:  # else another pass has been told since
            self._next, self._latest = _Next(told.epoch, None, False), one
        return one

    def _blocks(self, told: "_Next") -> Iterator[Iterator[int]]:
        yield from self._pass(self._begin(told))

    def _pass(self, one: "Pass") -> Iterator[Iterator[int]]:
        for start in range(0, one.share, BLOCK):
            one.until = min(one.share, start + BLOCK)
            one.block = iter(self.order.samples(one.epoch, one.position, start, one.until).tolist())
            yield one.block


@dataclass(frozen=True)
class _Next:
    """Where the next pass begins.

    Attributes:
        epoch: Its epoch.
        start: Its position there, or None where nothing was told: a whole epoch.
        set: The epoch was set, and not only found in a state or passed through.
    """

    epoch: int
    start: int | None
    set: bool


@dataclass
class Pass:
    """One pass over an epoch's samples, or over what is left of them.

    Attributes:
        epoch: The epoch.
        position: Where in its order the pass begins.
        share: Samples that each rank takes.
        until: Samples of this rank that have been given once `block` is empty.
        block: Samples whose order is known: to count each as it is given would cost more.
    """

    epoch: int
    position: int
    share: int
    until: int = 0
    block: Iterator[int] = field(default_factory=lambda: iter(()))

    def taken(self) -> int:
        """Samples that this rank has been given."""
        return self.until - operator.length_hint(self.block)


def _size_of(dataset: Any) -> int:
    try:
        size = dataset if isinstance(dataset, Number) else len(dataset)
    except TypeError as error:
        what = type(dataset).__name__
        raise TypeError(
            f"dataset is a {what}: give what has a length, or the number of samples ({error})"
        ) from None
    if not is_integer(size) or size < 1:
        raise ValueError(f"dataset={size!r}: an epoch has at least one sample")
    return int(size)


def _rank_among(num_replicas: int, rank: Any) -> int:
    if not is_integer(rank) or not 0 <= rank < num_replicas:
        raise ValueError(f"rank={rank!r}: with num_replicas={num_replicas} it is 0 to {num_replicas - 1}")
    return int(rank)
