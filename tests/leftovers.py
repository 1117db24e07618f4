"""Threads and descriptors of this process, before and after: what is there afterwards and was not before.

Some of what a test ends goes a moment later, by itself and unjoined: a DataLoader tells the thread that feeds
its workers' index queue to quit, and that thread closes the pipe and ends when it comes to it.
"""

import gc
import os
import threading
import time

PATIENCE_S = 10.0
"""How long what ends by itself may take, on however busy a machine."""


class Leftovers:
    """What there is now, to be compared with what there will be."""

    def __init__(self) -> None:
        gc.collect()
        self._threads = set(threading.enumerate())
        self._files = _open_files()

    def check(self, patience_s: float = PATIENCE_S) -> None:
        """Fail, by name, where threads or descriptors are left that were not there: not at once, but soon."""
        gc.collect()
        deadline = time.monotonic() + patience_s
        while (threads := self._new_threads()) and time.monotonic() < deadline:
            threads[0].join(0.05)
        while (files := self._more_files()) and time.monotonic() < deadline:
            time.sleep(0.01)
        left = [f"thread {thread.name!r}" for thread in threads] + files
        assert not left, f"left behind: {', '.join(left)}"

    def _new_threads(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread not in self._threads]

    def _more_files(self) -> list[str]:
        """Those to name, where there are more than before: what was there before may have another number."""
        now = _open_files()
        if len(now) <= len(self._files):
            return []
        return [f"descriptor {at} of {name}" for at, name in now.items() if self._files.get(at) != name]


def _open_files() -> dict[int, str]:
    """Each descriptor and what it is of, but for the one that lists them."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return found
