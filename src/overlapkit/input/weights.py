"""The weights of a mixture over its course, and which source each sample is drawn from."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from overlapkit.input import order
from overlapkit.input.checks import is_integer

Weights = Mapping[str, float]
Place = tuple[int, int]
"""An epoch, and how many samples of it all ranks together have taken."""

_LARGEST = 1e300
"""So that the sum of many is finite."""

_KEPT = 1000
"""Changes that are remembered behind a reader: no loop stands more of them back than it reads ahead."""


class Plan:
    """Which weights are in force from which place on.

    Args:
        names: The sources.
        weights: One for each name, or a list of (samples, weights), samples rising from 0: the weights from
            there on, in the first epoch; the last of them stay in force.

    Raises:
        TypeError: They are neither.
        ValueError: A name is unknown or missing, a weight is no number from 0 on, or all are 0.
    """

    def __init__(self, names: Sequence[str], weights: Weights | Sequence[tuple[int, Weights]]) -> None:
        self._names = list(names)
        steps = [(0, weights)] if isinstance(weights, Mapping) else _steps(weights)
        self._places: list[Place] = [(0, samples) for samples, _ in steps]
        self._weights = [self._checked(step) for _, step in steps]

    @classmethod
    def from_state(cls, names: Sequence[str], state: Any) -> "Plan":
        """The plan that `state` described.

        Raises:
            ValueError: It is damaged.
        """
        try:
            places = [(epoch, samples) for epoch, samples, *_ in state]
            if not all(is_integer(number) for place in places for number in place):
                raise ValueError("a place is two integers")
            weights = [dict(zip(names, rest, strict=True)) for _, _, *rest in state]
            plan = cls(names, weights[0])
            plan._weights = [plan._checked(step) for step in weights]
            if places != sorted(set(places)):
                raise ValueError("they do not rise")
        except (IndexError, TypeError, ValueError) as error:
            raise ValueError(f"state has weights {state!r}: it is damaged ({error})") from error
        plan._places = places
        return plan

    def at(self, place: Place) -> dict[str, float]:
        """The weights in force at a place."""
        return dict(zip(self._names, self._weights[self._index(place)], strict=True))

    def set(self, place: Place, weights: Weights, reached: Place) -> None:
        """From a place on let these be in force, not what was to come; `reached` is where a reader is."""
        checked = self._checked(weights)
        kept = bisect_left(self._places, place)
        self._places[kept:], self._weights[kept:] = [place], [checked]
        past = max(0, self._index(reached) - _KEPT)
        del self._places[:past], self._weights[:past]

    def choose(self, seed: int, epoch: int, start: int, stop: int) -> np.ndarray:
        """The number of the source that each sample from `start` to `stop` of an epoch comes from, int64."""
        draws = uniform(seed, epoch, start, stop)
        first, last = self._index((epoch, start)), self._index((epoch, stop - 1))
        parts = []
        for index in range(first, last + 1):
            begin = start if index == first else self._places[index][1]
            end = stop if index == last else self._places[index + 1][1]
            bounds = np.cumsum(self._weights[index])
            bounds /= bounds[-1]  # so that the last is 1, above every draw; weight 0 leaves no room
            parts.append(np.searchsorted(bounds, draws[begin - start : end - start], side="right"))
        return np.concatenate(parts)

    def state(self, place: Place) -> list[list[Any]]:
        """What is in force at a place and what comes after it, each [epoch, samples, weight, weight, ...]."""
        first = self._index(place)
        steps = zip(self._places[first:], self._weights[first:], strict=True)
        return [[*begin, *weights] for begin, weights in steps]

    def ahead(self, place: Place) -> list[tuple[Place, dict[str, float]]]:
        """The weights in force at a place and those to come, each with where they begin from there on."""
        return [
            (max(place, (epoch, samples)), dict(zip(self._names, weights, strict=True)))
            for epoch, samples, *weights in self.state(place)
        ]

    def _index(self, place: Place) -> int:
        return max(0, bisect_right(self._places, place) - 1)

    def _checked(self, weights: Any) -> list[float]:
        if not isinstance(weights, Mapping):
            raise TypeError(f"weights={weights!r}: give one weight for each of {', '.join(self._names)}")
        if weights.keys() != set(self._names):
            raise ValueError(
                f"weights are of {_listed(weights)}, sources are {_listed(self._names)}: give one to each, "
                "0 where nothing is to be drawn"
            )
        for name, weight in weights.items():
            plain = weight.item() if isinstance(weight, np.generic) else weight
            if isinstance(plain, bool) or not isinstance(plain, int | float) or not 0 <= plain < _LARGEST:
                raise ValueError(f"weights[{name!r}]={weight!r}: a weight is a number from 0 to {_LARGEST:g}")
        if not any(weights.values()):
            raise ValueError(f"weights={dict(weights)!r}: at least one weight is above 0")
        return [float(weights[name]) for name in self._names]


def uniform(seed: int, epoch: int, start: int, stop: int) -> np.ndarray:
    """Numbers in [0, 1), float64 (stop - start,), each a function of its place and the seed alone."""
    return order.uniform(np.arange(start, stop, dtype=np.uint64), f"draw/{seed}/{epoch}")


def _steps(weights: Any) -> list[tuple[int, Any]]:
    if not isinstance(weights, Sequence) or isinstance(weights, str) or not weights:
        raise TypeError(f"weights={weights!r}: give one weight for each source, or [(samples, weights), ...]")
    samples = [step[0] for step in weights if isinstance(step, tuple | list) and len(step) == 2]
    rising = all(is_integer(count) for count in samples) and samples == sorted(set(samples))
    if len(samples) < len(weights) or not rising or samples[0] != 0:
        raise ValueError(
            f"weights={weights!r}: a schedule is [(0, weights), (samples, weights), ...], rising"
        )
    return [(int(count), step) for count, step in weights]


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names)) or "nothing"
