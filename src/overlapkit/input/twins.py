"""A DataLoader that is read through a twin: equal in all settings, but with a sampler of ours."""

import copy
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader

from overlapkit.input.sources import Source

Indices = TypeVar("Indices", bound=Iterable[Any])


class TwinLoader(Source, Generic[Indices]):
    """A plain map-style DataLoader, itself never iterated.

    Invariant:
        * Persistent workers have one twin for all passes: they belong to it.
    """

    def __init__(self, original: DataLoader[Any]) -> None:
        super().__init__(original)
        self.exclusive = original.persistent_workers
        self._kept: tuple[DataLoader[Any], Indices] | None = None

    @abstractmethod
    def _index_batches(self) -> Indices:
        """What gives the twin its batches of indices (or its indices, where it makes no batches)."""

    def _twin(self) -> tuple[DataLoader[Any], Indices]:
        if self._kept is not None:
            return self._kept
        indices = self._index_batches()
        made = copy.copy(self.original)
        # setattr is refused once a DataLoader is made
        made.__dict__["sampler" if made.batch_sampler is None else "batch_sampler"] = indices
        if made.persistent_workers:
            made._iterator = None  # the original's workers are not ours
            self._kept = made, indices
        return made, indices
