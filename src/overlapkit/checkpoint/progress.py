"""How long work says how far it is."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and those there are; now and then, from the calling thread."""


class Count:
    """Bytes done, out of a known total, told to whoever wants to know.

    Attributes:
        done: So far; whoever begins something anew sets it back.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self._total, self._progress = 0, total, progress
        self.add(0)

    def add(self, nbytes: int) -> None:
        """So many more are done."""
        self.done += nbytes
        if self._progress is not None:
            self._progress(self.done, self._total)
