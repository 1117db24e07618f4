"""StepMeter: attaches to a training loop by public hooks and shares every step's time out among the lanes."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from overlapkit.device import rank_and_world
from overlapkit.measure.across.companion import Across
from overlapkit.measure.across.watch import OnHang
from overlapkit.measure.arguments import (
    check_count,
    check_live,
    check_options,
    check_parts,
    check_speed,
    check_tokens,
    check_tracing,
    device_of,
)
from overlapkit.measure.clock import Clock, clock_of
from overlapkit.measure.closeup import Closeup
from overlapkit.measure.companion import Companion
from overlapkit.measure.ledger import Finished, Ledger
from overlapkit.measure.live import Live
from overlapkit.measure.logged import Tell
from overlapkit.measure.phases import Phases
from overlapkit.measure.progress import ProgressLine, progress_line
from overlapkit.measure.record import StepRecord
from overlapkit.measure.report import StepReport, make_report
from overlapkit.measure.sources import Coverage
from overlapkit.measure.stepping import Step, each_step, is_measured
from overlapkit.measure.timeline import Timeline
from overlapkit.measure.tracing import StepTracer
from overlapkit.optimizer_step import with_hooks
from overlapkit.options import named_options
from overlapkit.span import Span

T = TypeVar("T")

_WINDOW = 100  # steps that a report covers


class StepMeter:
    """Measures what each lane of a training step exposes.

    `with meter.step():` stands around one training step, or `for batch in meter.steps(loader):` is the
    loop. Components publish their own spans (`timings()`), the model and the optimizer are watched
    through public hooks, and nothing waits for a device: on CUDA the phases are pooled events that are
    timed later, so records come a few steps behind.

    The period of a step runs from the end of the step before to its own end, so waiting for the next
    batch and saving after the step belong to it. `with meter.pause():` cuts out what is not training.
    A step that is left by an exception or a `break` is not recorded.

    Invariants:
        * One step at a time, from whichever thread.
        * A meter that was closed or collected leaves nothing at work on the model or the optimizer.
        * Each nanosecond of a period is given to exactly one part (see StepRecord).

    Args:
        model: The outermost module, which the loop calls. Without it forward, backward and communication
            are unknown.
        optimizer: A torch.optim.Optimizer. Without it, its step counts as backward.
        loader: Publishes input and transfer, or is any iterable that `steps()` is given.
        checkpointer: Publishes the lane checkpoint.
        every: Measure one step in so many, now this one and now that, so that what the loop does every n-th
            step (a save) is met as often as it happens.
        history: How many records are kept.
        peak_flops: Of the device, a second; None to look it up by the device's name and the model's dtypes.
        flops_per_token: Of the model, forward and backward; None to count the operators of a step, which
            cannot be done where torch.compile is at work.
        trace_every: Trace the last of each so many steps with torch.profiler, read the trace in the
            background, and let `report()` tell what it shows. A traced step is not measured.
        trace_folder: Keep traces there, as step-N/rank-R.json.gz.
        hang_timeout: Seconds without progress of any rank after which the job hangs (docs/meter.md): more
            than anything takes that is not in `pause()`. None watches nothing.
        on_hang: What to do then, once it is said on stderr who is missing: "exit" ends this process with
            `HANG_EXIT_CODE` (87), "wait" goes on waiting, and a callable is given a HangReport, then waits.
        on_report: Callables, given a StepReport after each 100 measured steps.
        on_log: Callables, given a step's number and the values that `log()` was given in it, once these
            have arrived. What a callable raises is warned of once, and training goes on.
        progress: Show a progress line on rank 0; a ProgressLine has options of its own.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: A number is out of range, or `model` has no parameters.
        RuntimeError: WORLD_SIZE is set but there is no process group.
    """

    @named_options
    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        loader: Iterable[Any] | None = None,
        checkpointer: object | None = None,
        *,
        every: int = 1,
        history: int = 1000,
        peak_flops: float | None = None,
        flops_per_token: float | None = None,
        trace_every: int | None = None,
        trace_folder: str | PathLike[str] | None = None,
        hang_timeout: float | None = None,
        on_hang: OnHang = "exit",
        on_report: Sequence[Callable[[StepReport], object]] = (),
        on_log: Sequence[Tell] = (),
        progress: bool | ProgressLine = False,
    ) -> None:
        check_parts(model, optimizer, loader, checkpointer)
        check_options(every, history, hang_timeout, on_hang)
        check_speed(peak_flops=peak_flops, flops_per_token=flops_per_token)
        check_live(on_report, on_log, progress)
        check_tracing(trace_every, trace_folder)
        self._rank, world = rank_and_world()
        optimizer = None if optimizer is None else with_hooks(optimizer)
        parts = {"model": model, "optimizer": optimizer, "loader": loader, "checkpointer": checkpointer}
        self._ledger = Ledger(Coverage(parts, world), history)
        self._model = model
        self._optimizer = optimizer
        self._every = every
        self._speed = {"peak_flops": peak_flops, "flops_per_token": flops_per_token}
        self._live = Live(on_report, on_log, progress_line(progress, self._rank))
        self._clock: Clock | None = None
        self._inside = threading.Lock()  # held inside a step
        self._index = 0  # of the step that is on, or of the next one
        self._settle_at = 1  # step after which the ledger settles
        self._told = 0  # windows that were reported
        self._closed = False
        self._phases = Phases(model, optimizer)
        self._across = Across(self._ledger, self._phases, every, hang_timeout, on_hang)
        self._companions: list[Companion] = [self._across]  # first in, first told
        self._tracer: StepTracer | None = None
        if trace_every is not None:
            coverage = self._ledger.coverage
            self._tracer = StepTracer(trace_every, trace_folder, self._rank, self._phases, coverage)
            self._companions.append(self._tracer)
        self._closeup = Closeup(model, self._phases, self._ledger.own)
        self._companions.append(self._closeup)  # after the tracer: a step that is traced is not measured

    @property
    def last(self) -> StepRecord | None:
        """The latest record, or None; on CUDA it is a few steps behind."""
        self._ledger.settle()
        records = self._ledger.records
        return records[-1] if records else None

    @property
    def logged(self) -> Mapping[str, float]:
        """The latest value of each logged name that has arrived; on a device it is a few steps behind."""
        return MappingProxyType(self._live.logged.latest)

    def log(self, **values: object) -> None:
        """Take values of the step that is on, or was last: the drop-in for `.item()`, without its wait.

        Each is what the tensor holds now, whatever is written into it later. Once it has arrived, some steps
        later on a GPU, it is in `logged`, on the progress line, and with everybody in `on_log`, in order.
        None is lost: `close()`, or the interpreter's exit, waits for the last ones.

        Args:
            values: By name: tensors of one element, with gradient or without, on any device, or numbers.

        Raises:
            TypeError: A value is something else, or a DTensor that no rank holds whole.
            ValueError: A tensor has more elements than one, or none.
            RuntimeError: After close(), or while a CUDA graph is captured.
        """
        if self._closed:
            raise RuntimeError("meter.log() after meter.close(): log before it")
        self._live.logged.log(max(0, self._index - (not self._inside.locked())), values)

    def step(self, tokens: int | None = None) -> Step:
        """A context manager around one training step.

        Args:
            tokens: Tokens (or samples) that this rank trains on in it, for tokens per second.

        Raises:
            TypeError: `tokens` is not an int.
            ValueError: `tokens` is below 1.
            RuntimeError: On entering: inside another step or a pause, or after close().
        """
        return Step(self, tokens)

    def steps(self, loader: Iterable[T], *, tokens: int | None = None) -> Iterator[T]:
        """Iterate over `loader`, each turn of the loop being one step.

        The time that the loader takes to hand out a batch is measured here, whatever it is.

        Args:
            loader: Any iterable.
            tokens: Tokens per step on this rank.

        Raises:
            TypeError: `loader` is not iterable, or `tokens` is not an int.
            ValueError: `tokens` is below 1.
            RuntimeError: As of `step()`, when the first batch is taken.
        """
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise TypeError(f"loader={loader!r}: give an iterable of batches")
        check_tokens(tokens)
        return each_step(self, loader, tokens)

    def pause(self) -> AbstractContextManager[None]:
        """Leave out what the body does (evaluation, sampling), inside a step or between two."""
        return self._phases.pause()

    def report(self, window: int = _WINDOW) -> StepReport:
        """The seven answers over the last `window` records.

        The very first step is left out where there are others: it pays for what happens once. Ranks are
        compared each 20 steps, beside the training; a window that is complete here is waited for, 1 s at
        most, so any rank may call this alone.

        Raises:
            TypeError: `window` is not an int.
            ValueError: `window` is below 1.
        """
        check_count("window", window)
        return self._report(window, patience=1.0)

    def _report(self, window: int, patience: float) -> StepReport:
        self._ledger.settle()
        report = make_report(
            self._ledger, window, self._closeup.seen, self._rank, self._across.ranks(patience), **self._speed
        )
        return report if self._tracer is None else self._tracer.fold(report)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a StepMeter cannot be copied or pickled: it measures the objects that it was given, in this "
            "process. Keep it out of what is copied, and make one where the loop runs"
        )

    def close(self) -> None:
        """Take every hook off and deliver what was logged. Records and report() stay; step() is an error."""
        if self._closed:
            return
        self._closed = True
        self._phases.remove()
        self._ledger.settle()
        for companion in self._companions:
            companion.close()
        self._ledger.coverage.close()
        self._live.close()

    def _turn(self, kind: str) -> None:
        self._phases.turn(kind)

    def _drew(self, span: Span) -> None:
        self._ledger.own.append(span)

    def _enter(self) -> None:
        if self._closed:
            raise RuntimeError("meter.step() after meter.close(): make a new StepMeter")
        if self._phases.pauses:
            raise RuntimeError("meter.step() inside meter.pause(): leave the pause first")
        if not self._inside.acquire(blocking=False):
            raise RuntimeError(
                "meter.step() inside another step of this meter: steps do not nest, and threads that "
                "train at the same time need a StepMeter each"
            )
        if self._clock is None:
            self._start(device_of(self._model, self._optimizer))
        for companion in self._companions:
            companion.enter(self._index)
        self._phases.enter()

    def _start(self, device: torch.device) -> None:
        """The first step begins: only now the model is where it will be trained."""
        self._ledger.coverage.device = device
        self._clock = clock_of(device)
        self._closeup.start(device)
        self._phases.timeline = Timeline.after(None, self._clock, "inside")

    def _leave(self, tokens: int | None, *, fed: bool, whole: bool) -> None:
        assert self._clock is not None
        phases, timeline, closeup = self._phases, self._phases.timeline, self._closeup
        counted = closeup.counting
        closeup.stop_counting(tokens, whole=whole)
        peak = closeup.peak(timeline.kind if timeline else None)
        if whole and timeline is not None:
            timeline.turn("end")
            on_device = self._clock.on_device
            self._ledger.finish(
                Finished(self._index, timeline, tokens, fed, peak, on_device, closeup.sees_recompute, counted)
            )
        for companion in self._companions:
            companion.leave(self._index, whole=whole)
        self._index += whole
        phases.timeline = None
        if is_measured(self._index, self._every):
            kind = "paused" if phases.pauses else "outside"
            phases.timeline = Timeline.after(timeline if whole else None, self._clock, kind)
        phases.inside = False
        self._inside.release()
        self._publish()

    def _publish(self) -> None:
        if self._index >= self._settle_at or self._index % _WINDOW == 0:
            self._ledger.settle()
            self._settle_at = self._index + self._ledger.pace
            if self._live.wants_reports and self._ledger.settled // _WINDOW > self._told:
                self._told = self._ledger.settled // _WINDOW
                self._live.report(self._report(_WINDOW, patience=0.0))
        self._live.step(self._index, self._ledger)
