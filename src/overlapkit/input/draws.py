"""Telling, once, of a source that draws from a global generator beside the training loop."""

import random
import sys
from contextlib import suppress
from typing import Any

import torch

from overlapkit.input.generators import plain
from overlapkit.lane import Ticket
from overlapkit.warn import warn

PULLS = 4
"""So many pulls are looked at: a source that draws does so for nearly every batch."""

PATIENCE_S = 0.05
"""How long the loop is held up for each pull that it would not have waited for."""


class DrawWatch:
    """Looks whether a global generator moves while the loop's thread stands still and a pull is under way.

    The loop stands still where it waits for a batch; and where batches are there before it asks for them, a
    moment after each of the first of these.

    What moves it then is the reader's thread: the loop is in here. (Another thread of the program could be
    taken for it; what the loop draws cannot.) Worker processes have generators of their own.
    """

    def __init__(self) -> None:
        self._left = PULLS
        self._before: dict[str, Any] | None = None
        self._moved: list[str] = []

    def begin(self, look: bool) -> None:
        """The loop stands still from here on: note the states, where it is to `look` and not yet done so."""
        self._before = _states() if look and self._left else None

    @property
    def looking(self) -> bool:
        """Whether it has begun to look, and not ended."""
        return self._before is not None

    def end(self, pull: Ticket[Any] | None = None) -> None:
        """It goes on: see what has moved. A pull that the loop need not wait for is given a moment first."""
        before, self._before = self._before, None  # at once: a pass in another thread may end it, too
        if before is None:
            return
        with suppress(TimeoutError):
            if pull is not None:
                pull.wait(PATIENCE_S)
        self._left -= 1
        self._moved = [name for name, state in _states().items() if before.get(name, state) != state]
        if self._moved:
            self._left = 0

    def tell(self) -> None:
        """Warn, once, of what was seen."""
        moved, self._moved = self._moved, []
        if moved:
            warn(
                f"source (or transform) draws from {' and '.join(moved)} in the reader's thread, beside the "
                "training loop: who of the two draws first is chance, so that no run repeats another "
                "bitwise, nor goes on so when it is resumed. Seed what is drawn for a sample: see "
                "overlapkit.input.SampleSeed"
            )


def _states() -> dict[str, Any]:
    """The state of each global generator that there is, as something that compares."""
    states: dict[str, Any] = {
        "torch's global generator": torch.get_rng_state().numpy().tobytes(),
        "random": random.getstate(),
    }
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        states["numpy.random"] = plain(numpy_random.get_state(legacy=False))  # of any bit generator
    return states
