"""Whom the loop's epoch is told to, and who knows it."""

from typing import Any

from overlapkit.input.checks import is_integer
from overlapkit.input.reach import reachable
from overlapkit.input.skipping import sampler_chain
from overlapkit.warn import warn


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


class Repeats:
    """Warns, once, of a second pass over one epoch: whoever forgets set_epoch trains on one order for ever.

    Samplers that do not shuffle may be gone through again, and sources that count their passes do so.
    """

    def __init__(self, source: Any) -> None:
        chain = sampler_chain(source.original) if source.kind in ("map", "elastic") else []
        told = [one for one in chain if callable(getattr(one, "set_epoch", None))]
        self._possible = any(getattr(one, "shuffle", False) is True for one in told)
        self._ended: int | None = None

    def end(self, epoch: int | None) -> None:
        """A pass over this epoch has come to its end."""
        self._ended = epoch

    def begin(self, epoch: int | None) -> None:
        """A pass over this epoch begins."""
        if self._possible and epoch is not None and epoch == self._ended:
            self._possible = False
            warn(
                f"epoch {epoch} begins again, in the same order as before: call loader.set_epoch(epoch) "
                "before each pass, as in `for epoch in range(loader.next_epoch, epochs)`. This is said once"
            )


def _dataset_chain(dataset: Any) -> list[Any]:
    """A dataset, and those that it wraps."""
    chain: list[Any] = []
    while dataset is not None and not any(dataset is known for known in chain):
        chain.append(dataset)
        dataset = getattr(dataset, "dataset", None)
    return chain
