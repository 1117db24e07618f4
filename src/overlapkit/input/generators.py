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

    def restore(self, states: list[Any]) -> None:
        """Let them go on from what `save` returned.

        Raises:
            RuntimeError: There are others.
        """
        if len(self._generators) != len(states):
            raise RuntimeError(
                f"state holds {len(states)} generator state(s), source has {len(self._generators)} "
                "torch.Generator(s): build the source as it was when the state was saved"
            )
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(torch.as_tensor(state, dtype=torch.uint8, device="cpu"))

    def begin(self, order: dict[str, Any] | None) -> dict[str, Any]:
        """Bring back the state that a pass began from, torch's global one too; or note the one there is."""
        if order is None:
            return {"generators": self.save(), "torch": torch.get_rng_state()}
        self.restore(order["generators"])
        torch.set_rng_state(torch.as_tensor(order["torch"], dtype=torch.uint8, device="cpu"))
        return order


@contextmanager
def random_state() -> Iterator[None]:
    """Let torch's global generator go on afterwards as if nothing had been drawn."""
    now = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(now)
