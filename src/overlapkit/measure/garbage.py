"""Python's garbage collector at the same step on all ranks, instead of whenever a rank's counters say so.

A collection holds up its own rank only, and at the next collective all others wait for it: with hundreds of
ranks that collect at different steps, somebody is always late.
"""

import gc
from types import TracebackType
from typing import Self

from overlapkit.measure.arguments import check_count

FROZEN = 10_000
"""Objects from which on somebody has frozen. Python 3.12 keeps some hundred immortal ones there by itself,
and a process that has imported torch holds more than a hundred thousand."""


class collect_garbage:  # noqa: N801  # used like a function: with ok.collect_garbage(every=100) as garbage
    """Runs the collector every n-th step, and at no other time, until it is closed.

    Make it once everything is built: what is alive then is collected once and left out from then on (frozen),
    so that a collection looks only at what came since. `step()` counts calls, so call it at the end of every
    step, on every rank. StepMeter shows the pauses in the part "garbage".

    A context manager; leaving it, by an exception too, puts back what was before.

    Args:
        every: Steps between two collections.

    Raises:
        TypeError: `every` is not an int.
        ValueError: `every` is below 1.
    """

    def __init__(self, every: int = 100) -> None:
        check_count("every", every)
        self._every = every
        self._steps = 0
        self._closed = False
        self._enabled = gc.isenabled()
        gc.disable()
        gc.collect()
        self._frozen = gc.get_freeze_count() < FROZEN  # else somebody has frozen, and will thaw
        if self._frozen:
            gc.freeze()

    def step(self) -> None:
        """The end of a step; collects where it is the n-th.

        Raises:
            RuntimeError: After close().
        """
        if self._closed:
            raise RuntimeError("collect_garbage.step() after close(): make a new one")
        self._steps += 1
        if self._steps % self._every == 0:
            gc.collect()

    def close(self) -> None:
        """Put the collector back to what it was. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._frozen:
            gc.unfreeze()
        if self._enabled:
            gc.enable()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
