"""Sources of every kind over the same numbers, for tests of order and resuming."""

import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from overlapkit.input import ElasticSampler, SampleSeed


class Numbers(Dataset[int]):
    """0, 1, ... n - 1; counts what is loaded."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Failing(Dataset[int]):
    """Raises at one index; dies there where `deadly`."""

    def __init__(self, at: int, deadly: bool = False) -> None:
        self.at, self.deadly = at, deadly

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            if self.deadly and get_worker_info() is not None:
                os.kill(os.getpid(), signal.SIGKILL)
            raise LookupError(f"sample {index}")
        return index


class Stream(IterableDataset[int]):
    """0, 1, ... n - 1, without a state."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class StatefulStream(Stream):
    """The same, with a state that it goes on changing after handing it out."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.live = {"at": 0}
        self.resumed = False

    def __iter__(self) -> Iterator[int]:
        if not self.resumed:
            self.live["at"] = 0
        self.resumed = False
        return self._rest()

    def _rest(self) -> Iterator[int]:
        while self.live["at"] < self.n:
            self.live["at"] += 1
            yield self.live["at"] - 1

    def state_dict(self) -> dict[str, int]:
        return self.live

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.live = state
        self.resumed = True


class ByEpoch(Sampler[list[int]]):
    """A batch sampler with a set_epoch and no length."""

    def __init__(self, n: int, size: int) -> None:
        self.n, self.size, self.epoch = n, size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = [(i * 7 + self.epoch) % self.n for i in range(self.n)]
        for start in range(0, self.n, self.size):
            yield order[start : start + self.size]


class Augmented(Dataset[Any]):
    """Each sample with a number drawn for it from its own generator."""

    def __init__(self, n: int, seed: int = 17) -> None:
        self.n, self.seed = n, SampleSeed(seed)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand((), generator=self.seed.generator(index)).item()


class Careless(Augmented):
    """Each sample with numbers drawn for it from the global generators."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), random.random(), np.random.rand()


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _sampled(sampler: Callable[[Dataset[int]], Any]) -> Callable[..., DataLoader[int]]:
    def build(n: int, size: int, **options: Any) -> DataLoader[int]:
        data = Numbers(n)
        return DataLoader(data, batch_size=size, sampler=sampler(data), **options)

    return build


def in_order(n: int, size: int, **options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(n), batch_size=size, **options)


def shuffled(n: int, size: int, **options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(n), batch_size=size, shuffle=True, **options)


def own_generator(n: int, size: int, **options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(n), batch_size=size, shuffle=True, generator=generator(), **options)


def batch_sampled(n: int, size: int, **options: Any) -> DataLoader[int]:
    data = Numbers(n)
    batches = BatchSampler(RandomSampler(data, generator=generator()), size, drop_last=True)
    return DataLoader(data, batch_sampler=batches, **options)


def unbatched(n: int, size: int, **options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(n), batch_size=None, shuffle=True, **options)


def by_epoch(n: int, size: int, **options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(n), batch_sampler=ByEpoch(n, size), **options)


MAP_STYLE: dict[str, Callable[..., DataLoader[int]]] = {
    "in order": in_order,
    "shuffled": shuffled,
    "own generator": own_generator,
    "batch sampler": batch_sampled,
    "unbatched": unbatched,
    "by epoch": by_epoch,
    "distributed": _sampled(lambda data: DistributedSampler(data, num_replicas=2, rank=1, seed=3)),
    "elastic": _sampled(lambda data: ElasticSampler(data, num_replicas=2, rank=1, seed=3)),
    "with replacement": _sampled(lambda data: RandomSampler(data, replacement=True, generator=generator())),
    "weighted": _sampled(lambda data: WeightedRandomSampler([1.0] * len(data), len(data))),
    "subset": _sampled(lambda data: SubsetRandomSampler(range(len(data)), generator=generator())),
}


def stateful(data: Any, size: int, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():  # it calls torch.set_vital, which newer versions of torch deprecate
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        return StatefulDataLoader(data, batch_size=size, **options)


def stateful_loader(n: int, size: int, **options: Any) -> Any:
    """A sampler that torchdata can resume, and no generator=, whose draws it forgets."""
    from torchdata.stateful_dataloader.sampler import RandomSampler

    data = Numbers(n)
    return stateful(data, size, sampler=RandomSampler(data, generator=generator()), **options)


def stateful_elastic(n: int, size: int, **options: Any) -> Any:
    data = Numbers(n)
    return stateful(data, size, sampler=ElasticSampler(data, num_replicas=2, rank=1, seed=3), **options)


def stateful_stream(n: int, size: int, **options: Any) -> Any:
    return stateful(StatefulStream(n), size, **options)


def node(n: int, size: int) -> Any:
    from torchdata import nodes

    sampler = DistributedSampler(Numbers(n), num_replicas=1, rank=0, seed=3)
    return nodes.Loader(nodes.Batcher(nodes.SamplerWrapper(sampler), size))


def listed(n: int, size: int) -> list[list[int]]:
    return [list(range(n))[start : start + size] for start in range(0, n, size)]


RESUMABLE: dict[str, Callable[[int, int], Any]] = {
    **MAP_STYLE,
    "stateful loader": stateful_loader,
    "stateful elastic": stateful_elastic,
    "stateful stream": stateful_stream,
    "list": listed,
}


def plain(batch: Any) -> Any:
    """A batch as something that compares."""
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch
