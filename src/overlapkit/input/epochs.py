"""Whom the loop's epoch is told to, and who knows it."""

from typing import Any

from overlapkit.input.sample_seed import SampleSeed
from overlapkit.input.skipping import sampler_chain


def epoch_holders(source: Any) -> list[Any]:
    """A source that has epochs; else those of its samplers, its dataset and the seeds it holds that do."""
    if callable(getattr(source, "set_epoch", None)):
        return [source]
    candidates = [*sampler_chain(source), *_dataset_chain(getattr(source, "dataset", None))]
    return [holder for holder in candidates if callable(getattr(holder, "set_epoch", None))]


def current_epoch(source: Any) -> int | None:
    """The epoch that the first of them is in, or None where none can say."""
    known = (getattr(holder, "epoch", None) for holder in epoch_holders(source))
    return next((epoch for epoch in known if isinstance(epoch, int)), None)


def _dataset_chain(dataset: Any) -> list[Any]:
    """A dataset, those that it wraps, and the seeds that they hold."""
    chain: list[Any] = []
    while dataset is not None and not any(dataset is known for known in chain):
        held = getattr(dataset, "__dict__", {}).values()
        chain += [dataset, *(value for value in held if isinstance(value, SampleSeed))]
        dataset = getattr(dataset, "dataset", None)
    return chain
