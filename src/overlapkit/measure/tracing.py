"""trace_every: a profiler's trace of a step now and then, read in the background, folded into the report.

The step that is traced is not measured: what the profiler costs counts in no mean.
"""

import gc
import os
import shutil
import tempfile
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.profiler
from torch.profiler import ProfilerAction, ProfilerActivity

from overlapkit.lane import Lane, Ticket
from overlapkit.measure.phases import Phases
from overlapkit.measure.sources import Coverage
from overlapkit.measure.written import replacing

if TYPE_CHECKING:
    from overlapkit.measure.report import StepReport

_PATIENCE_S = 60.0  # that close() gives to the reading of the last trace


class StepTracer:
    """Traces every n-th step with torch.profiler.

    Invariants:
        * A trace is read on a thread of its own, after its step; the training thread starts and stops the
          profiler, and that is all.
        * Where somebody else's profiler runs, or may begin to within the step, none is started: two at
          a time crash the process.

    Args:
        every: Steps; the last of each so many is traced.
        folder: Where traces are kept, as step-N/rank-R.json.gz; None keeps none.
        rank: Of this process.
        phases: Of the meter, whose step is then not measured.
        coverage: Knows the device.
    """

    def __init__(
        self,
        every: int,
        folder: str | os.PathLike[str] | None,
        rank: int,
        phases: Phases,
        coverage: Coverage,
    ) -> None:
        self._every = every
        self._folder = None if folder is None else Path(folder)
        self._rank = rank
        self._phases = phases
        self._coverage = coverage
        self._lane = Lane("trace", kind="thread")
        self._profiler: Any = None  # while a step is traced
        self._mark: Any = None
        self._step = 0
        self._reading: Ticket[StepReport] | None = None
        self._read: tuple[int, StepReport] | None = None
        self._note: str | None = None

    def enter(self, step: int) -> None:
        """A step begins, and is traced where it is its turn."""
        if (step + 1) % self._every:
            return
        self._collect()
        if (reason := self._busy()) is not None:
            self._note = f"step {step} was not traced: {reason}"
            return
        self._step = step
        try:
            self._profiler, self._mark = _start(step, self._coverage.device)
            self._phases.timeline = None
        except Exception as error:  # CUPTI in use by a tool outside of torch: no reason to stop training
            self._note = f"step {step} was not traced: {error}"

    def leave(self, step: int, *, whole: bool) -> None:
        """The step is over; where it raised, its trace is thrown away."""
        profiler, mark = self._profiler, self._mark
        if profiler is None:
            return
        self._profiler = self._mark = None
        try:
            mark.__exit__(None, None, None)
            profiler.stop()
        except Exception as error:
            self._note = f"the trace of step {step} failed: {error}"
            return
        if whole:
            self._note = None
            self._reading = self._lane.submit(
                partial(_analyse, profiler, self._folder, f"step-{step}/rank-{self._rank}.json.gz")
            )

    def fold(self, report: "StepReport") -> "StepReport":
        """The report, with what the latest trace tells beside. Never waits."""
        self._collect()
        if self._read is None:
            return replace(report, trace_note=self._note)
        return _fold(report, *self._read, self._note)

    def close(self) -> None:
        """Finish reading; what takes longer than a minute is given up."""
        self.leave(self._step, whole=False)
        if self._reading is not None:
            with suppress(Exception):  # _collect says what it was
                self._reading.wait(_PATIENCE_S)
        self._collect()
        if self._reading is None:
            self._lane.close()
        else:
            self._note = f"the trace of step {self._step} was still being read at close()"

    def _collect(self) -> None:
        """Take what has been read since."""
        if self._reading is None or not self._reading.done():
            return
        reading, self._reading = self._reading, None
        try:
            self._read = self._step, reading.wait()
        except Exception as error:  # a full disk, a trace without work: no reason to stop training
            self._note = f"the trace of step {self._step} could not be read: {error}"

    def _busy(self) -> str | None:
        if self._reading is not None:
            return "the trace before it is still being read"
        return other_profiler()


def _start(step: int, device: torch.device) -> tuple[Any, Any]:
    """A profiler at work, and the mark of the step."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    with warnings.catch_warnings():  # torch 2.11 and 2.12: that it forgets cycles, of which there is one
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        profiler.start()
    mark = torch.profiler.record_function(f"ProfilerStep#{step}")
    mark.__enter__()
    return profiler, mark


def other_profiler() -> str | None:
    """Why no profiler can be started now: another one is at work, or may be before the step is over.

    A profiler with a schedule is prepared steps before it records, which torch tells nobody: starting one of
    ours in between makes theirs crash. So its objects are looked for; that takes tens of milliseconds.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        return "another profiler was running"
    for found in gc.get_objects():
        kind = type(found)
        if kind is torch.autograd.profiler.profile:
            if found.enabled and found.entered and found.kineto_results is None:
                return "another profiler was about to record"
        elif kind is torch.profiler.profile and _begins_next(found):
            return "another profiler was about to begin"
    return None


def _begins_next(profiler: Any) -> bool:
    if profiler.current_action is not ProfilerAction.NONE:
        return False
    return profiler.schedule(profiler.step_num + 1) is not ProfilerAction.NONE


def _analyse(profiler: Any, folder: Path | None, name: str) -> "StepReport":
    from overlapkit.measure.traces.explain import explain

    with tempfile.TemporaryDirectory(prefix="overlapkit-trace-") as temporary:
        path = Path(temporary) / "rank.json"
        profiler.export_chrome_trace(str(path))
        if folder is not None:
            kept = folder / name
            kept.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as plain, replacing(kept) as packed:
                shutil.copyfileobj(plain, packed)
        return explain(path)


def _fold(report: "StepReport", step: int, traced: "StepReport", note: str | None) -> "StepReport":
    """What the meter did not measure, and the gaps between kernels, as the trace has them.

    Times of the trace are of one step, and the profiler slows the host down: what the meter measured stays.
    """
    answers = []
    for ours, theirs in zip(report.answers, traced.answers, strict=True):
        if theirs.value is not None and ours.value is None and report.period_ms is not None:
            ours = replace(theirs, evidence=f"traced step {step}: {theirs.evidence}")
        elif theirs.value is not None and ours.name == "compute fed" and traced.device != "cpu":
            gaps = f"traced step {step}: idle for {theirs.value:.2f} ms, {theirs.evidence}"
            ours = replace(ours, evidence=f"{ours.evidence.partition('; gaps')[0]}; {gaps}")
        answers.append(ours)
    known = {finding.lane for finding in report.findings}
    unseen = {name for name, part in report.parts.items() if part.mean_ms is None}
    if traced.device != "cpu":
        unseen.add("other")  # the meter sees no gaps between kernels
    added = [one for one in traced.findings if one.lane in unseen - known]
    findings = sorted((*report.findings, *added), key=lambda finding: -finding.exposed_ms)
    return replace(
        report,
        answers=tuple(answers),
        findings=tuple(findings),
        trace=traced.trace,
        traced_step=step,
        trace_note=note,
    )
