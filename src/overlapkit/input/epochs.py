"""Whom the loop's epoch is told to, and who knows it."""

from typing import Any

from overlapkit.input.checks import is_integer
from overlapkit.input.reach import reachable
from overlapkit.input.skipping import sampler_chain


def epoch_holders(source: Any) -> list[Any]:
    """A source that has epochs; else those of its samplers that do, of its datasets and of what they hold.

    Datasets that wrap others may forward attributes, so they are asked; what else they hold is looked up by
    its class.
    """
    if callable(getattr(source, "set_epoch", None)):
        return [source]
    asked = [*sampler_chain(source), *_dataset_chain(getattr(source, "dataset", None))]
    found = [holder for holder in asked if callable(getattr(holder, "set_epoch", None))]
    held = reachable(*asked, getattr(source, "collate_fn", None))
    found += [holder for holder in held if callable(getattr(type(holder), "set_epoch", None))]
    return list({id(holder): holder for holder in found}.values())


def current_epoch(source: Any) -> int | None:
    """The epoch that the first of them is in, or None where none can say."""
    known = (getattr(holder, "epoch", None) for holder in epoch_holders(source))
    return next((int(epoch) for epoch in known if is_integer(epoch)), None)


def _dataset_chain(dataset: Any) -> list[Any]:
    """A dataset, and those that it wraps."""
    chain: list[Any] = []
    while dataset is not None and not any(dataset is known for known in chain):
        chain.append(dataset)
        dataset = getattr(dataset, "dataset", None)
    return chain
