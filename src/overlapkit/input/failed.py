"""An error on its way from the reader to the consumer.

A value, not a raise: the consumer can tell it from a Ctrl-C in its own wait, after which it may go on.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Failed:
    """Reading or transforming a batch raised."""

    error: BaseException | None

    def take(self) -> BaseException:
        """The error, once: this object must not keep the frames of its traceback alive afterwards.

        A StopIteration that got this far is none of the source's own; raised as it is, it would end the
        epoch without a word.
        """
        error, self.error = self.error, None
        assert error is not None
        if isinstance(error, StopIteration):
            told = RuntimeError("transform, or what reads a sample, raised StopIteration")
            told.__cause__ = error
            return told
        return error
