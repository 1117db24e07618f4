"""Finding out what a source is, and refusing what cannot be one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from overlapkit.input.elastic import ElasticLoader, elastic_sampler
from overlapkit.input.skipping import SkippingLoader, why_not_skipping
from overlapkit.input.sources import Listed, Source, Stateful, known_length
from overlapkit.input.stateless import Opaque, Resettable
from overlapkit.warn import warn


def open_source(source: Any, drop_through: bool = False) -> Source:
    """Find out what `source` is.

    Args:
        source: Given by the user.
        drop_through: Let one that has no state be taken up by reading and dropping.

    Raises:
        TypeError: It is no re-iterable of batches.
        ValueError: It is empty, or `drop_through` would drop other batches than were taken.
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
        if drop_through and source.num_workers and not source.in_order:
            raise ValueError(
                "drop_through=True: with in_order=False the batches that a source gives first are not those "
                "that were taken: use in_order=True"
            )
        found = Opaque(source, why_not_skipping(source) or "", drop_through)
        found.exclusive = source.persistent_workers
    elif isinstance(source, Iterator):
        return Resettable(source, drop_through)
    else:
        found = Opaque(source, f"{type(source).__name__} has no state_dict()", drop_through)
    if drop_through and not isinstance(found, Opaque):
        warn("drop_through=True has no effect: source can be taken up anywhere")
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
    if isinstance(source, Iterator) and not callable(getattr(source, "reset", None)):
        raise TypeError(
            f"source is a {type(source).__name__}, an iterator that can be used once: give what it came "
            "from, or a function that returns a fresh one for each epoch"
        )
    if isinstance(source, Iterator) and callable(getattr(source, "get_state", None)):
        raise TypeError(
            f"source is a {type(source).__name__}, a node: wrap it in torchdata.nodes.Loader(node), whose "
            "state says where it stands"
        )
    if not isinstance(source, Iterable) and not callable(source):
        raise TypeError(
            f"source={source!r} is not iterable: give a re-iterable of batches, such as a DataLoader, a list "
            "of batches or a function that returns an iterator"
        )
