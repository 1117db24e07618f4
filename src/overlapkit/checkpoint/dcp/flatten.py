"""The keys that torch.distributed.checkpoint gives to what is in a nested state.

A tensor's key is its path, joined by dots. Values without tensors are kept whole, under the key of the
outermost dict or list that holds none: so int keys, empty dicts and Counters stay what they are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Any

import torch

from overlapkit.checkpoint.codec import join, root

Path = tuple[str | int, ...]
"""Keys of dicts as strings, indices of lists as numbers: DCP's own form."""


@dataclass
class Flat:
    """A nested state by keys.

    Attributes:
        values: Key -> tensor, or value that holds no tensor.
        paths: Key -> path.
        places: Key -> the dict or list that holds the value, and where in it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    places: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def put(self, key: str, value: Any) -> None:
        """Replace a value, in the state itself too."""
        self.values[key] = value
        container, place = self.places[key]
        container[place] = value


def flatten(state: Mapping[str, Any], above: Path = ()) -> Flat:
    """Give every tensor, and every value without tensors, its key.

    Args:
        state: Nested dicts and lists.
        above: Its own path.

    Raises:
        ValueError: Two of them have the same key.
    """
    flat = Flat()
    for path, value, container, place in _walk(state, above):
        key = key_of(path)
        if key in flat.values:
            raise ValueError(
                f"state has the key {key!r} twice, at {flat.paths[key]} and {path}: rename one of them"
            )
        flat.values[key], flat.paths[key], flat.places[key] = value, path, (container, place)
    return flat


def key_of(path: Path) -> str:
    """The key of a path."""
    return ".".join(map(str, path))


def name_of(path: Path) -> str:
    """The name that a tensor at this path has in a checkpoint's files."""
    return reduce(join, path[1:], root(path[0]))


def nest(values: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """The nested state of a flat one; a key without a path is a path of its own."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        path = paths.get(key, (key,))
        container: Any = nested
        for place, following in pairwise(path):
            container = _at(container, place, [] if isinstance(following, int) else {})
        _at(container, path[-1], value)
    return nested


def _at(container: Any, place: Any, value: Any) -> Any:
    """What a dict or list has at this place, and that is `value` where it has nothing."""
    if not isinstance(container, list):
        return container.setdefault(place, value)
    container.extend([None] * (place + 1 - len(container)))
    if container[place] is None:
        container[place] = value
    return container[place]


def _walk(container: Any, path: Path) -> Iterator[tuple[Path, Any, Any, Any]]:
    for place, value in _items(container):
        here = (*path, place if isinstance(container, list) else str(place))
        if not isinstance(value, torch.Tensor) and _holds_tensors(value):
            yield from _walk(value, here)
        else:
            yield here, value, container, place


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or any(_holds_tensors(item) for _, item in _items(value))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """Places and values of a dict or list; nothing for anything else."""
    if isinstance(value, Mapping):
        return iter(value.items())
    return enumerate(value) if isinstance(value, list) else iter(())
