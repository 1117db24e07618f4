"""Finding out what a source is, and refusing what cannot be one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from overlapkit.input.elastic import ElasticLoader, elastic_sampler
from overlapkit.input.skipping import SkippingLoader, why_not_skipping
from overlapkit.input.sources import Listed, Opaque, Source, Stateful, known_length


def open_source(source: Any) -> Source:
    """Find out what `source` is.

    Raises:
        TypeError: It is no re-iterable of batches.
        ValueError: It is empty.
    """
    _refuse(source)
    if isinstance(source, Sequence):
        found: Source = Listed(source)
    elif callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None)):
        found = Stateful(source)
    elif isinstance(source, DataLoader) and why_not_skipping(source) is None:
        elastic = elastic_sampler(source)
        found = SkippingLoader(source) if elastic is None else ElasticLoader(source, elastic)
    elif isinstance(source, DataLoader):
        found = Opaque(source, why_not_skipping(source) or "")
        found.exclusive = source.persistent_workers
    else:
        found = Opaque(source, f"{type(source).__name__} has no state_dict()")
    if known_length(source) == 0:
        raise ValueError(
            "source is empty (len 0): there is nothing to train on. With drop_last=True the data set must "
            "hold at least one whole batch"
        )
    return found


def _refuse(source: Any) -> None:
    """Reject what is often passed by mistake, and would end in an error far from here."""
    if isinstance(source, str | bytes | Mapping | torch.Tensor | torch.nn.Module):
        raise TypeError(
            f"source is a {type(source).__name__}: give a re-iterable of batches, such as a DataLoader, "
            "a list of batches or a function that returns an iterator"
        )
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        raise TypeError(
            f"source={type(source).__name__} is a map-style dataset, which yields samples: wrap it in "
            "torch.utils.data.DataLoader(dataset, batch_size=...) first"
        )
    if isinstance(source, Iterator):
        raise TypeError(
            f"source is a {type(source).__name__}, an iterator that can be used once: give what it came "
            "from, or a function that returns a fresh one for each epoch"
        )
    if not isinstance(source, Iterable) and not callable(source):
        raise TypeError(
            f"source={source!r} is not iterable: give a re-iterable of batches, such as a DataLoader, a list "
            "of batches or a function that returns an iterator"
        )
