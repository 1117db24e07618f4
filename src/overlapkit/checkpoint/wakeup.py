"""Hearing of signals while the training thread is in C code, where Python's handlers do not run."""

import contextlib
import os
import select
import signal
import weakref


class Wakeup:
    """A pipe that the interpreter writes each signal's number to, at once, whatever its threads are doing.

    Made and closed in the main thread. There is one such pipe a process: where somebody has one (asyncio), or
    makes one later, this one stays empty, and the handlers alone tell.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        os.set_blocking(self._reader, False)
        others = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
        self._poll = select.poll()
        self._poll.register(self._reader, select.POLLIN)
        alive = weakref.ref(self)

        def leave_the_parents() -> None:  # a signal to a forked child is not one to this process
            if (wakeup := alive()) is not None:
                wakeup.detach()

        os.register_at_fork(after_in_child=leave_the_parents)

    def wait(self, seconds: float) -> bytes:
        """The numbers of the signals that have come, as soon as there is one; empty where there is none."""
        if not self._poll.poll(seconds * 1000):
            return b""
        return os.read(self._reader, 64)

    def wake(self) -> None:
        """Let `wait` return."""
        with contextlib.suppress(BlockingIOError):  # it is full, and so does not wait
            os.write(self._writer, b"\0")

    def detach(self) -> None:
        """Ask for no more signals. Called in the main thread."""
        others = signal.set_wakeup_fd(-1)
        if others != self._writer:
            signal.set_wakeup_fd(others)

    def close(self) -> None:
        """Close the pipe, after `detach` and the last `wait`."""
        os.close(self._reader)
        os.close(self._writer)
