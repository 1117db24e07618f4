"""What goes along with a meter's steps, in the training thread: samplers, watchdogs, outputs."""

from typing import Protocol


class Companion(Protocol):
    """Called at the edges of every step, measured or not. It must be quick, and wait for nothing."""

    def enter(self, step: int) -> None:
        """A step begins."""

    def leave(self, step: int, *, whole: bool) -> None:
        """A step is over; `whole` unless an exception or a `break` left it, and its number comes again."""

    def close(self) -> None:
        """The meter is closed. Called once."""
