"""A pass that begins late against one that is drawn from the start, for samplers of every kind."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from overlapkit.input.skipping import begin_after
from tests.input.sources import ByEpoch, generator

N = 11


class Descending(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(N, 0, -1)


class Pairs(BatchSampler):
    """A batch sampler that is not torch's own: its batches are not simply consecutive samples."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield batch * 2


DATA = range(N)
SAMPLERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: SequentialSampler(DATA),
    "random": lambda: RandomSampler(DATA, generator=generator()),
    "random, global generator": lambda: RandomSampler(DATA),
    "with replacement": lambda: RandomSampler(DATA, replacement=True, generator=generator()),
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0] * 5, N, generator=generator()),
    "distributed": lambda: DistributedSampler(DATA, num_replicas=1, rank=0, seed=3),  # type: ignore[arg-type]
    "generator": Descending,
    "list": lambda: [4, 2, 9, 1],
    "range": lambda: range(3, 30, 4),
    "text": lambda: list("abcdefg"),
    "nothing": list,
}
BATCHES: dict[str, Callable[[Any], Any]] = {
    "no batches": lambda samples: samples,
    "one": lambda samples: BatchSampler(samples, 1, False),
    "three": lambda samples: BatchSampler(samples, 3, False),
    "three, whole": lambda samples: BatchSampler(samples, 3, True),
    "a subclass": lambda samples: Pairs(samples, 3, False),
    "other": lambda samples: ByEpoch(N, 2),
}


@pytest.mark.parametrize("batches", sorted(BATCHES))
@pytest.mark.parametrize("samples", sorted(SAMPLERS))
def test_the_rest_the_last_and_the_number(samples: str, batches: str) -> None:
    build = lambda: BATCHES[batches](SAMPLERS[samples]())  # noqa: E731
    torch.manual_seed(4)
    whole = list(build())
    for count in range(len(whole) + 3):
        torch.manual_seed(4)
        rest, last, skipped = begin_after(build(), count)
        taken = list(rest)
        assert skipped == min(count, len(whole))
        assert taken == whole[skipped:]
        if skipped == count:
            assert last == (whole[count - 1] if count else None)
        assert list(rest) == []
