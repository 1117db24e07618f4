"""The progress line: step, what was logged, tokens a second and what is exposed.

On a terminal one line that is written over, at most twice a second; elsewhere (a file, a batch system's log)
one plain line every ten seconds. Of several ranks only rank 0 has one.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from overlapkit.device import rank_and_world
from overlapkit.measure.arguments import check_count
from overlapkit.measure.record import StepRecord

_REFRESH_S = 0.5
_PLAIN_S = 10.0
_RECENT = 20  # records that rates are means over
_SHOWN = 4  # of the logged names


class ProgressLine:
    """Shows where the loop stands: `StepMeter(progress=True)`, or `progress=ProgressLine(...)` for more.

    Tokens a second are those of this rank times the ranks of the job.

    Args:
        total: The number of the last step, for the time that is left; or None.
        first_step: Added to the meter's step numbers: the step that a run was restored at.
        console: Where to show it, in place of stderr.
        clock: Seconds.

    Raises:
        TypeError: `total` or `first_step` is no int.
        ValueError: `total` is below 1, or `first_step` below 0.
    """

    def __init__(
        self,
        total: int | None = None,
        *,
        first_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if total is not None:
            check_count("total", total, "give the number of the last step, or None")
        check_count("first_step", first_step, "give an int of at least 0", least=0)
        self._total = total
        self._first_step = first_step
        self._world = rank_and_world()[1]
        self._done = 0
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._began: tuple[int, float] | None = None  # (steps done, when): before it a step may have compiled
        self._next = clock()
        self._text: str | None = None
        self._live: Live | None = None
        self._closed = False

    def step(self, done: int, records: Iterable[StepRecord], latest: Mapping[str, float]) -> None:
        """A step is over; shown where it is time to.

        Args:
            done: Steps of this run so far.
            records: Those that were measured.
            latest: Logged values by name.
        """
        now, done = self._clock(), self._first_step + done
        if self._began is None:
            self._began = done, now
        if self._closed:
            return
        self._done, self._records, self._latest = done, records, latest
        if now >= self._next or done == self._total:
            self._next = now + (_REFRESH_S if self._console.is_terminal else _PLAIN_S)
            self._show(self._say(now))

    def close(self) -> None:
        """Show the last state, and leave it standing."""
        if self._closed:
            return
        self._closed = True
        if self._began is not None and (text := self._say(self._clock())) != self._text:
            self._show(text)
        if self._live is not None:
            self._live.stop()

    def _say(self, now: float) -> str:
        recent = list(self._records)[-_RECENT:]
        words = [f"step {self._done}" + ("" if self._total is None else f"/{self._total}")]
        words += [f"{name} {_number(value)}" for name, value in list(self._latest.items())[:_SHOWN]]
        words += _rates(recent, self._world)
        words += self._left(now)
        return "  ".join(words)

    def _left(self, now: float) -> Iterator[str]:
        assert self._began is not None
        first, began = self._began
        if self._total is not None and first < self._done < self._total:
            left = round((now - began) / (self._done - first) * (self._total - self._done))
            yield f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"

    def _show(self, text: str) -> None:
        self._text = text
        if not self._console.is_terminal:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        line = Text(text, no_wrap=True, overflow="ellipsis")
        if self._live is None:  # what is printed to a terminal meanwhile comes above it; what goes to a file
            # stays there. No thread: steps refresh it.
            self._live = Live(
                line,
                console=self._console,
                auto_refresh=False,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
        self._live.update(line, refresh=True)


def progress_line(progress: bool | ProgressLine, rank: int) -> ProgressLine | None:
    """The line that `StepMeter(progress=)` asks for, on rank 0."""
    if rank or progress is False:
        return None
    return ProgressLine() if progress is True else progress


def _rates(records: Sequence[StepRecord], world: int) -> Iterator[str]:
    counted = [(one.tokens, one.period) for one in records if one.tokens is not None]
    if whole := sum(period for _, period in counted):
        yield f"{world * sum(tokens for tokens, _ in counted) * 1e9 / whole:,.0f} tokens/s"
    known = [(one.exposed, one.period) for one in records if one.exposed is not None]
    if whole := sum(period for _, period in known):
        yield f"exposed {sum(exposed for exposed, _ in known) / whole:.1%}"


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e6 else f"{value:.3e}"
