"""Telling, once, of a source that draws from a global generator beside the training loop."""

import random
import sys
from typing import Any

import torch

from overlapkit.warn import warn

WAITS = 4
"""So many waits are looked at: a source that draws does so for nearly every batch."""


class DrawWatch:
    """Looks whether a global generator moves while the loop's thread stands still, waiting for a batch.

    What moves it then is the reader's thread: the loop is in here. (Another thread of the program could be
    taken for it; what the loop draws cannot.) Worker processes have generators of their own.
    """

    def __init__(self) -> None:
        self._left = WAITS
        self._before: dict[str, Any] | None = None

    def __enter__(self) -> None:
        if self._left:
            self._before = _states()

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        before, self._before = self._before, None
        self._left -= 1
        moved = [name for name, state in _states().items() if before.get(name, state) != state]
        if moved:
            self._left = 0
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
        _, keys, at, *rest = numpy_random.get_state()
        states["numpy.random"] = keys.tobytes(), at, *rest
    return states
