"""Ends background threads before the interpreter goes: it would cut one off within the store's own code."""

import atexit
import time
import weakref
from typing import Protocol

_PATIENCE_S = 10.0
"""For all of them together: a busy machine needs a while, and who is cut off aborts the process."""


class Ending(Protocol):
    """What has threads that are no longer wanted."""

    def end(self, timeout: float) -> None:
        """End them; whoever is not done within `timeout` seconds is left."""


_living: "weakref.WeakSet[Ending]" = weakref.WeakSet()


def end_at_exit(one: Ending) -> None:
    """End it at the interpreter's exit, where it is still there: a meter that nobody closed."""
    _living.add(one)


@atexit.register
def end_all() -> None:
    """The interpreter exits."""
    deadline = time.monotonic() + _PATIENCE_S
    for one in list(_living):
        one.end(max(0.0, deadline - time.monotonic()))
