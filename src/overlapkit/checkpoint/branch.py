"""Saving below a checkpoint that is there already: "latest" would go on taking that one."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from overlapkit.checkpoint.manifest import step_folders, step_name, step_of


class Branch:
    """Warns, once, who goes back to an earlier step, or begins anew, and saves below what is there.

    Args:
        places: Where checkpoints are.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = places
        self._highest = 0  # without looking into the folders: in a store each costs a request

    def open(self) -> None:
        """Look at what is there now."""
        there = (path for place in self._places if place.is_dir() for path in place.iterdir())
        self._highest = max((step_of(path.name) or 0 for path in there), default=0)

    def restored(self, step: int) -> None:
        """This step is the newest sound one: what is above it is damaged, as a warning has said."""
        self._highest = min(self._highest, step)

    def saves(self, step: int) -> None:
        """A save has begun."""
        if step < self._highest:
            above = max((found for place in self._places for found in step_folders(place)), default=0)
            if above > step:
                warnings.warn(
                    f"save(step={step}): {step_name(above)} is above it, and 'latest' goes on taking that "
                    "one: delete what must not come back, or save to another directory",
                    stacklevel=3,
                )
        self._highest = step
