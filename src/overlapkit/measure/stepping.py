"""The two ways around a step: a context manager, and a loop over a loader whose waiting is measured."""

import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Protocol, TypeVar

from overlapkit.measure.arguments import check_tokens
from overlapkit.span import Span

T = TypeVar("T")

_GOLDEN = 0.6180339887498949


class Stepper(Protocol):
    """What is told of a step's edges."""

    def _enter(self) -> None: ...

    def _leave(self, tokens: int | None, *, fed: bool, whole: bool) -> None: ...

    def _drew(self, span: Span) -> None: ...


class Step:
    """What `step()` returns. A class, because a generator's context manager costs three times as much."""

    __slots__ = ("_fed", "_stepper", "_tokens")

    def __init__(self, stepper: Stepper, tokens: int | None, *, fed: bool = False) -> None:
        if tokens is not None:
            check_tokens(tokens)
        self._stepper = stepper
        self._tokens = tokens
        self._fed = fed

    def __enter__(self) -> None:
        self._stepper._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stepper._leave(self._tokens, fed=self._fed, whole=kind is None)


def is_measured(step: int, every: int) -> bool:
    """Whether a step is the one of its `every` that is measured, on all ranks alike.

    Its place moves by the golden ratio (Weyl's sequence), which falls in step with no rhythm of the loop.
    """
    turn, place = divmod(step, every)
    return place == int(every * (turn * _GOLDEN % 1.0))


def each_step(stepper: Stepper, loader: Iterable[T], tokens: int | None) -> Iterator[T]:
    """Hand out the loader's batches, each in a step; what the loader takes for one is a wait."""
    start = time.perf_counter_ns()
    batches = iter(loader)  # what beginning and ending an epoch takes is the loader's doing, too
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            stepper._drew(Span("input", "next", start, time.perf_counter_ns(), exposed=True))
        with Step(stepper, tokens, fed=True):
            yield batch
        start = time.perf_counter_ns()
