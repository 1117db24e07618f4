"""The random state that a pass begins from: noted with it, and brought back to draw the same again."""

import copy
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from overlapkit.warn import warn

_KINDS = torch.Generator, random.Random, np.random.Generator, np.random.RandomState

_EVERYONES: tuple[Any, ...] = torch.default_generator, random._inst, np.random.mtrand._rand
"""The loop draws from these, too: they are no source's own."""


class Generators:
    """The generators that a source owns: torch's, `random.Random`, numpy's.

    Args:
        values: Among which they are.
        others: Among which they are not.
    """

    def __init__(self, values: Iterable[Any], others: Iterable[Any] = ()) -> None:
        found = {id(value): value for value in values if isinstance(value, _KINDS)}
        for other in (*_EVERYONES, *others):
            found.pop(id(other), None)
        self._generators = [one for one in found.values() if not isinstance(one, random.SystemRandom)]

    def __len__(self) -> int:
        return len(self._generators)

    def states(self) -> list[Any]:
        """Their states, as `put_back` takes them."""
        return [_state(generator) for generator in self._generators]

    def put_back(self, states: list[Any]) -> None:
        """Let them go on from what `states` returned."""
        for generator, state in zip(self._generators, states, strict=True):
            _set_state(generator, state)

    def save(self) -> list[Any]:
        """Their states, plain values or uint8."""
        saved: list[Any] = plain(self.states())
        return saved

    def restore(self, states: list[Any]) -> None:
        """Let them go on from what `save` returned.

        Raises:
            RuntimeError: There are others.
        """
        try:
            self.put_back([_like(state, now) for state, now in zip(states, self.states(), strict=True)])
        except (LookupError, TypeError, ValueError) as error:
            raise RuntimeError(
                f"state holds {len(states)} generator state(s), source has {len(self)} random generator(s), "
                f"or others ({error}): build the source as it was when the state was saved"
            ) from error

    def check(self, order: Any, *, begun: bool) -> None:
        """Refuse what is not the state that a pass began from, or will begin from where none was `begun`.

        Raises:
            ValueError: It is damaged, or of a source with other generators.
        """
        states = order.get("generators") if isinstance(order, dict) and "torch" in order else None
        if not isinstance(states, list | tuple):
            raise ValueError(f"state has order={order!r:.80}: it is damaged, for that holds generator states")
        try:
            Generators(map(_another, self._generators)).restore(list(states))
            if begun or order["torch"] is not None:
                torch.Generator().set_state(_bytes(order["torch"]))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"state holds a generator state that is damaged, or another's: {error}"
            ) from error

    def begin(self, order: dict[str, Any] | None) -> dict[str, Any]:
        """Bring back the state that a pass began from, torch's global one too; or note the one there is."""
        if order is None:
            return {"generators": self.save(), "torch": torch.get_rng_state()}
        self.restore(order["generators"])
        torch.set_rng_state(_bytes(order["torch"]))
        return order


def held_by(holders: Iterable[Any]) -> Iterator[Any]:
    """The values of some objects' attributes."""
    return (value for holder in holders for value in getattr(holder, "__dict__", {}).values())


def tell_lost(owned: Generators, taken: int, why: str) -> None:
    """Warn that what a dataset draws after a resume is not what it would have drawn."""
    warn(
        f"source's dataset owns {len(owned)} random generator(s), and the state does not hold what they had "
        f"come to at batch {taken}: {why}. What is drawn from them does not go on as it would have. Seed "
        "what is drawn for a sample: see overlapkit.input.SampleSeed"
    )


@contextmanager
def random_state() -> Iterator[None]:
    """Let torch's global generator go on afterwards as if nothing had been drawn."""
    now = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(now)


def plain(state: Any) -> Any:
    """A generator's state, or a list of such, as lists, dicts, plain values and uint8 tensors."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [plain(value) for value in state]
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


def _bytes(state: Any) -> torch.Tensor:
    """A state of torch's, which may have become a list on its way through JSON."""
    return torch.as_tensor(state, dtype=torch.uint8, device="cpu")


def _another(generator: Any) -> Any:
    """A generator of the same kind, to try a state on."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device)
    return copy.deepcopy(generator)


def _like(state: Any, now: Any) -> Any:
    """A state that was made plain, in the types of the one that its generator has now."""
    if isinstance(now, torch.Tensor):
        return torch.as_tensor(state, dtype=now.dtype, device="cpu")
    if isinstance(now, dict):
        return {key: _like(state[key], value) for key, value in now.items()}
    if isinstance(now, np.ndarray):
        return np.asarray(state, dtype=now.dtype)
    if isinstance(now, tuple):
        return tuple(_like(part, here) for part, here in zip(state, now, strict=True))
    return state


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
