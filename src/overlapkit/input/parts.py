"""What a mixture draws rows from: the protocol of its sources, and the two kinds that there are."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch.utils.data import DataLoader

from overlapkit.input.elastic import elastic_sampler
from overlapkit.input.landing import Empty
from overlapkit.input.order import Order
from overlapkit.input.sampled import SampledRows
from overlapkit.input.sampler import ElasticSampler
from overlapkit.input.tokens import TokenShards

Mix = Callable[[list[Any], np.ndarray, Empty], Any]
"""Makes a batch of the rows at some places of each source: row i is the `home[i]`-th of these, one source's
behind the other's. It may be made in what `empty` lends."""


class Rows(Protocol):
    """Samples that can be read one by one, by number. All in one mixture are of one class, and alike."""

    def alike(self) -> dict[str, Any]:
        """What must be equal, by name, for rows to be in one batch."""

    def check(self) -> None:
        """Refuse to begin a pass where what is read from was changed."""

    def locate(self, samples: np.ndarray, epoch: np.ndarray) -> Any:
        """Find samples, int64 (n,), each read in an epoch of its source, int64 (n,): places, to be sliced."""

    def mixer(self, rows: Sequence[Any], batch_size: int) -> Mix:
        """What makes a pass's batches; `rows` are those of all sources, these among them."""


@dataclass(frozen=True, slots=True)
class Part:
    """A source of a mixture.

    Attributes:
        rows: Its samples.
        order: Who takes which of them when.
        batch_size: Of one rank.
        digest: What a position in it depends on.
    """

    rows: Rows
    order: Order
    batch_size: int
    digest: str


def as_parts(sources: Any) -> list[Part]:
    """The sources of a mixture.

    Raises:
        TypeError: They are no such sources by name.
        ValueError: They are not alike.
    """
    if not isinstance(sources, Mapping) or not sources:
        raise TypeError(f"sources={sources!r}: give {{name: TokenShards or DataLoader, ...}}")
    parts = [_part(name, source) for name, source in sources.items()]
    (first, one), *others = zip(sources, parts, strict=True)
    for name, other in others:
        for (what, here), there in zip(_alike(one).items(), _alike(other).values(), strict=False):
            if here != there:
                raise ValueError(
                    f"sources[{name!r}] has {what} {there}, sources[{first!r}] has {here}: rows of one batch "
                    "are alike"
                )
    return parts


def _part(name: Any, source: Any) -> Part:
    if isinstance(source, TokenShards) and isinstance(name, str):
        return Part(source.windows, source.order, source.batch_size, _digest(source))
    sampler = elastic_sampler(source) if isinstance(source, DataLoader) else None
    if sampler is None or source.batch_size is None or not isinstance(name, str):
        raise TypeError(
            f"sources[{name!r}] is a {type(source).__name__}: give TokenShards by name, or DataLoaders with "
            "a batch_size= over an ElasticSampler; rows of anything else cannot be drawn one by one"
        )
    return Part(SampledRows(name, source), sampler.order, source.batch_size, _digest(sampler))


def _alike(part: Part) -> dict[str, Any]:
    order = part.order
    ranks = {"batch_size": part.batch_size, "rank": order.rank, "world_size": order.world}
    return {**part.rows.alike(), **ranks}


def _digest(source: TokenShards | ElasticSampler) -> str:
    """What a position in a source depends on."""
    state = source.state_dict()
    held = repr([(key, value) for key, value in state.items() if key not in ("epoch", "position")])
    return hashlib.blake2b(held.encode(), digest_size=8).hexdigest()
