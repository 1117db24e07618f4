"""Rows of a map-style dataset for a mixture: loaded one by one, and put together as its DataLoader would."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from overlapkit.input.generators import Generators
from overlapkit.input.landing import Empty
from overlapkit.input.reach import reachable
from overlapkit.input.sample_seed import SampleSeed
from overlapkit.warn import warn


class SampledRows:
    """The samples of a DataLoader's dataset, loaded by whoever takes the batch.

    Each SampleSeed of the dataset is set to the epoch in which a sample is drawn: augmentation is another one
    each time round.

    Args:
        name: Of the source, for errors.
        loader: Its dataset is map-style.

    Raises:
        ValueError: It has workers.
    """

    def __init__(self, name: str, loader: DataLoader[Any]) -> None:
        if loader.num_workers:
            raise ValueError(
                f"sources[{name!r}] has num_workers={loader.num_workers}: a mixture loads rows itself, in "
                "the reader's thread of a DeviceLoader: use num_workers=0"
            )
        self._dataset: Any = loader.dataset
        self._collate: Callable[[list[Any]], Any] = loader.collate_fn
        held = list(reachable(loader.dataset, loader.collate_fn))
        self._seeds = [one for one in held if isinstance(one, SampleSeed)]
        if Generators(held):
            warn(
                f"sources[{name!r}]: its dataset owns random generators, whose states are not in a mixture's "
                "state: seed what is drawn for a sample, see overlapkit.input.SampleSeed",
            )

    def alike(self) -> dict[str, Any]:
        """What is equal in all sources of one mixture, as far as it can be seen."""
        return {"kind": "samples"}

    def check(self) -> None:
        """Nothing that could be seen."""

    def locate(self, samples: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        """Each sample with its epoch, int64 (n, 2)."""
        return np.stack((samples, epoch), axis=1)

    def mixer(self, rows: "Sequence[SampledRows]", batch_size: int) -> Callable[..., Any]:
        """Puts batches together by this loader's `collate_fn`."""

        def mix(places: list[np.ndarray], home: np.ndarray, empty: Empty) -> Any:
            loaded = [row for one, where in zip(rows, places, strict=True) for row in one._load(where)]
            return self._collate([loaded[at] for at in home.tolist()])

        return mix

    def _load(self, places: np.ndarray) -> list[Any]:
        loaded: list[Any] = []
        samples, epochs = places.T
        for epoch in np.unique(epochs).tolist():
            for seed in self._seeds:
                seed.set_epoch(epoch)
            loaded += self._fetch(samples[epochs == epoch].tolist())
        return loaded

    def _fetch(self, samples: list[int]) -> list[Any]:
        """As a DataLoader does it."""
        at_once = getattr(self._dataset, "__getitems__", None)
        return list(at_once(samples)) if callable(at_once) else [self._dataset[one] for one in samples]
