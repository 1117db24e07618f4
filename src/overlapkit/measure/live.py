"""What a loop hears of its steps while it runs: logged values, reports, the progress line."""

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from overlapkit.measure.logged import Logged, Tell
from overlapkit.measure.progress import ProgressLine
from overlapkit.measure.record import StepRecord
from overlapkit.warn import warn

if TYPE_CHECKING:
    from overlapkit.measure.report import StepReport


class Live:
    """Everything that a meter tells beside `report()`.

    A callable that raises is warned of once and called again the next time: a disk that is full must not end
    a training run.

    Args:
        on_report: Each is called with a StepReport.
        on_log: Each is called with a step's number and its logged values.
        line: Shows the latest of all, or None.
    """

    def __init__(
        self,
        on_report: Sequence[Callable[["StepReport"], object]],
        on_log: Sequence[Tell],
        line: ProgressLine | None,
    ) -> None:
        self._listeners = _Listeners(on_log)
        self._on_report = tuple(on_report)
        self._line = line
        self.logged = Logged(self._listeners)
        self._end = weakref.finalize(self, _finish, os.getpid(), self.logged, line)  # at exit, too

    @property
    def wants_reports(self) -> bool:
        """Whether anybody would be told of a report."""
        return bool(self._on_report)

    def report(self, report: "StepReport") -> None:
        """Hand out a report."""
        for tell in self._on_report:
            self._listeners.call("on_report", tell, report)

    def step(self, done: int, records: Iterable[StepRecord]) -> None:
        """The host has left a step.

        Args:
            done: Steps so far.
            records: Those of the steps that have been timed.
        """
        self.logged.deliver()
        if self._line is not None:
            self._line.step(done, records, self.logged.latest)

    def close(self) -> None:
        """Deliver every logged value, and leave the progress line as it stands."""
        if self._end.alive:
            self._end()


class _Listeners:
    """Tells all; refers to no meter, for it is called at the interpreter's exit as well."""

    def __init__(self, on_log: Sequence[Tell]) -> None:
        self._on_log = tuple(on_log)
        self._failed: set[int] = set()

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        for tell in self._on_log:
            self.call("on_log", tell, step, dict(values))

    def call(self, argument: str, tell: Callable[..., object], *told: Any) -> None:
        try:
            tell(*told)
        except Exception as error:
            if id(tell) not in self._failed:
                self._failed.add(id(tell))
                warn(
                    f"{argument}: {tell!r:.200} raised {type(error).__name__}: {error}; training goes on, "
                    "and this is said once",
                    RuntimeWarning,
                )


def _finish(pid: int, logged: Logged, line: ProgressLine | None) -> None:
    if pid != os.getpid():
        return  # a forked child's exit: the values are its parent's to deliver
    try:
        logged.close()
    finally:
        if line is not None:
            line.close()
