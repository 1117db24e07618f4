"""Random augmentation that belongs to the sample, whoever loads it and when.

What is drawn for a sample is a function of (seed, epoch, index): at any number of ranks and workers, in
any order, and after a resume, it is the same.
"""

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from overlapkit.input.checks import as_integer, as_seed
from overlapkit.input.generators import plain


class SampleSeed:
    """Seeds for the samples of a dataset, which holds it as an attribute.

    ```python
    class Photos(Dataset):
        def __init__(self, files):
            self.files, self.seed = files, SampleSeed(17)

        def __getitem__(self, index):
            generator = self.seed.generator(index)
            return flip(load(self.files[index]), torch.rand(1, generator=generator) < 0.5)
    ```

    `DeviceLoader.set_epoch` reaches it there, in datasets within that one (Subset, ConcatDataset) and in what
    they hold at any depth: transforms, lists (of their first 4,096 items), closures. It reaches worker
    processes that are running already, too: the epoch lies in shared memory. Without `set_epoch` each epoch
    draws the same.

    Args:
        seed: Any integer; the same on every rank.

    Raises:
        ValueError: `seed` is no integer.
    """

    def __init__(self, seed: int) -> None:
        self._seed = as_seed(seed)
        self._epoch = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch that is drawn for."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Draw for another epoch from now on, in worker processes too."""
        self._epoch.fill_(as_integer("epoch", epoch))

    def of(self, index: Any) -> int:
        """The sample's seed, in [0, 2**64), for generators of any library.

        Args:
            index: The sample's number (or name) in the whole dataset, not in what one rank has of it.
        """
        key = f"{self._seed}/{self.epoch}/{_plain(index)}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")

    def generator(self, index: Any) -> torch.Generator:
        """A fresh generator on the CPU, seeded for the sample."""
        return torch.Generator().manual_seed(self.of(index))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._epoch.share_memory_()  # a plain copy is not


class SeededDataset(Dataset[Any]):
    """A map-style dataset whose augmentation draws from global generators, seeded for each sample.

    In worker processes those of torch, random and numpy are seeded before each sample. In the main thread,
    which shares them with the training loop, they are put back after it. The reader's thread of a
    DeviceLoader could not do that unnoticed: there it is an error, and takes workers, or a dataset that
    draws from `SampleSeed.generator`.

    Args:
        dataset: Gives a sample for an index.
        seed: Any integer; the same on every rank.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = SampleSeed(seed)

    def __getitem__(self, index: Any) -> Any:
        """The dataset's sample.

        Raises:
            RuntimeError: This is neither a worker process nor the main thread.
        """
        if get_worker_info() is None and threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "SeededDataset seeds global generators, which a thread shares with the training loop: use "
                "num_workers=1 or more, or draw from overlapkit.input.SampleSeed(...).generator(index) in "
                "the dataset itself"
            )
        with nullcontext() if get_worker_info() else _global_states():
            number = self.seed.of(index)
            torch.default_generator.manual_seed(number)
            random.seed(number)
            np.random.seed([number & 0xFFFFFFFF, number >> 32])
            return self.dataset[index]

    def __len__(self) -> int:
        """Samples of the dataset."""
        return len(self.dataset)


@contextmanager
def _global_states() -> Iterator[None]:
    """Let the global generators go on afterwards as if nothing had happened."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _plain(index: Any) -> Any:
    """An index by its value, numpy's numbers as Python's."""
    return tuple(map(_plain, index)) if type(index) is tuple else plain(index)
