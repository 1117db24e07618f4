"""Ends background threads before the interpreter goes: it would cut one off within the store's own code."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable

_PATIENCE_S = 10.0
"""For all of them together: a busy machine needs a while, and who is cut off aborts the process."""

_living: "weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]]" = weakref.WeakKeyDictionary()


def end_at_exit(thread: threading.Thread, stop: Callable[[], object]) -> None:
    """End it at the interpreter's exit, where it still runs: nobody closed its owner, or that is just gone.

    Args:
        thread: What is waited for.
        stop: Tells it to end; may be called twice. It must not keep the owner alive.
    """
    _living[thread] = stop


@atexit.register
def end_all() -> None:
    """The interpreter exits."""
    deadline = time.monotonic() + _PATIENCE_S
    running = [(thread, stop) for thread, stop in list(_living.items()) if thread.is_alive()]
    for _, stop in running:
        stop()
    for thread, _ in running:
        thread.join(max(0.0, deadline - time.monotonic()))
