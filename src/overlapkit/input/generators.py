"""The random state that a pass begins from: noted with it, and brought back to draw the same again."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Generators:
    """The generators that a source owns.

    Args:
        holders: The objects that make it up; their torch.Generators stand in their attributes.
    """

    def __init__(self, holders: Iterable[Any]) -> None:
        values = [value for holder in holders for value in getattr(holder, "__dict__", {}).values()]
        found = {id(value): value for value in values if isinstance(value, torch.Generator)}
        self._generators = list(found.values())

    def save(self) -> list[torch.Tensor]:
        """Their states, uint8."""
        return [generator.get_state() for generator in self._generators]

    def check(self, order: Any, *, begun: bool) -> None:
        """Refuse what is not the state that a pass began from, or will begin from where none was `begun`.

        Raises:
            ValueError: It is damaged, or of a source with other generators.
        """
        states = order.get("generators") if isinstance(order, dict) and "torch" in order else None
        if not isinstance(states, list | tuple):
            raise ValueError(f"state has order={order!r:.80}: it is damaged, for that holds generator states")
        if len(self._generators) != len(states):
            raise ValueError(
                f"state holds {len(states)} generator state(s), source has {len(self._generators)} "
                "torch.Generator(s): build the source as it was when the state was saved"
            )
        for generator, state in zip(self._generators, states, strict=True):
            _refuse_damaged(torch.Generator(generator.device), state)
        if begun or order["torch"] is not None:
            _refuse_damaged(torch.Generator(), order["torch"])

    def restore(self, states: list[Any]) -> None:
        """Let them go on from what `save` returned."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(_bytes(state))

    def begin(self, order: dict[str, Any] | None) -> dict[str, Any]:
        """Bring back the state that a pass began from, torch's global one too; or note the one there is."""
        if order is None:
            return {"generators": self.save(), "torch": torch.get_rng_state()}
        self.restore(order["generators"])
        torch.set_rng_state(_bytes(order["torch"]))
        return order


def _bytes(state: Any) -> torch.Tensor:
    """A generator's state, which may have become a list on its way through JSON."""
    return torch.as_tensor(state, dtype=torch.uint8, device="cpu")


def _refuse_damaged(generator: torch.Generator, state: Any) -> None:
    try:
        generator.set_state(_bytes(state))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"state holds a generator state that is damaged: {error}") from error


@contextmanager
def random_state() -> Iterator[None]:
    """Let torch's global generator go on afterwards as if nothing had been drawn."""
    now = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(now)
