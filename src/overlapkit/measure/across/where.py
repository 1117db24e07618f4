"""Where a rank is in its training, and since when it has made no progress."""

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from overlapkit.measure.across.stacks import StackActivity
from overlapkit.measure.phases import Phases
from overlapkit.measure.sources import Tap


@dataclass(frozen=True, slots=True)
class Where:
    """One rank, as it says itself.

    Attributes:
        step: Index of the step that is on, or of the next one.
        inside: Whether a step is on.
        phase: What is on: a Segment's kind; "unmeasured" where `every` skips the step.
        turns: How many phases this step has been through.
        still_s: Seconds without any progress.
        done: The collective of ours that ended last, or None.
        left: It has closed its meter.
        host: Name of the machine.
        pid: Of the process.
        beat: Counts what was said.
        at: When, in seconds of the host's wall clock.
    """

    step: int
    inside: bool
    phase: str
    turns: int
    still_s: float
    done: str | None
    left: bool
    host: str
    pid: int
    beat: int
    at: float

    @property
    def position(self) -> tuple[int, bool, int]:
        """What is compared between ranks: the least is behind."""
        return self.step, self.inside, self.turns

    @property
    def text(self) -> str:
        """In words."""
        if self.left:
            return f"has closed its meter before step {self.step}"
        if not self.inside:
            return f"before step {self.step}" + (
                " (input, or what stands between steps)" if self.step else ""
            )
        return f"step {self.step}, {'between the phases' if self.phase == 'inside' else self.phase}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


class AwakeClock:
    """Time in which somebody looked, in seconds: between two calls at most `most` of it.

    Who was stopped, starved or asleep with its machine has not seen others stand still meanwhile.
    """

    def __init__(self, most: float, now: Callable[[], float] = time.monotonic) -> None:
        self._most, self._now = most, now
        self._last, self._time = now(), 0.0

    def __call__(self) -> float:
        """The time so far."""
        now = self._now()
        self._time += min(now - self._last, self._most)
        self._last = now
        return self._time


class Progress:
    """Watches the training thread of this process from another one.

    Progress is a step, a phase, a collective or another piece of a lane that ends, or a new place in the code
    (see `StackActivity`); a pause counts as progress all along. Reads only; the training thread notes nothing
    but `step`, `inside` and itself.

    Args:
        phases: Of the meter.
        taps: Of the components that publish spans.
        now: The clock, in seconds.
    """

    def __init__(
        self, phases: Phases, taps: Iterable[Tap], now: Callable[[], float] = time.monotonic
    ) -> None:
        self.step = 0
        self.inside = False
        self.left = False
        self.thread: int | None = None
        self._phases = weakref.ref(phases)  # they keep the meter alive
        self._taps = tuple(taps)
        self._now = now
        self._activity = StackActivity()
        self._seen: tuple[object, ...] | None = None
        self._since = now()
        self._done: str | None = None
        self._beat = 0
        self._host, self._pid = socket.gethostname(), os.getpid()

    def enter(self, step: int) -> None:
        """In the training thread: a step begins."""
        self.step, self.inside, self.thread = step, True, threading.get_ident()

    def leave(self, step: int, *, whole: bool) -> None:
        """In the training thread: it is over."""
        self.inside = False
        self.step = step + whole

    def look(self) -> Where:
        """Where it is now; a meter that was forgotten counts as closed."""
        phases = self._phases()
        if phases is None:
            self.left = True
        timeline, pauses = (None, 0) if phases is None else (phases.timeline, phases.pauses)
        phase, turns = ("unmeasured", 0) if timeline is None else (timeline.kind, timeline.turns)
        seen = (self.step, self.inside, phase, turns, id(timeline))
        if seen != self._seen or pauses or self._spans_came():
            self._seen, self._since = seen, self._now()
            self._activity.reset()
        elif self._activity.moved(self.thread):
            self._since = self._now()
        self._beat += 1
        return Where(
            step=self.step,
            inside=self.inside,
            phase="paused" if pauses else phase,
            turns=turns,
            still_s=self._now() - self._since,
            done=self._done,
            left=self.left,
            host=self._host,
            pid=self._pid,
            beat=self._beat,
            at=time.time(),
        )

    def _spans_came(self) -> bool:
        came = False
        for tap in self._taps:
            for span in tap.peek():
                came = True
                if span.lane == "communication" and span.bytes is not None:
                    self._done = span.name
        return came
