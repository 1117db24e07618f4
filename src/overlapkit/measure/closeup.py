"""What a meter looks at in some steps only: memory by phase, recomputation, storage; the operators of few."""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import nn

from overlapkit.measure.jobio import IOWatch
from overlapkit.measure.memory import PeakWatch, looks_closely
from overlapkit.measure.operators import Operators, Product
from overlapkit.measure.phases import Phases
from overlapkit.measure.recompute import Recomputation
from overlapkit.measure.stops import CompileWatch, GarbageWatch
from overlapkit.span import Span

_FIRST = 10  # the step whose operators are counted first: what happens once is over by then
_RHYTHM = 1009  # and one in so many later: a prime, so that what the loop does every n-th step is met as well
_ANEW = 256  # steps after which all modules are watched for recomputation again


@dataclass
class Seen:
    """What was seen in the steps that were looked at closely.

    Attributes:
        compiled: Whether torch.compile is at work, in whose graphs neither operators nor modules are seen.
        peaks: Of memory; None before the first step.
        io: With storage.
        counted: Number of steps whose operators were counted.
        tokens: Of the last of them, where they were given.
        flops: Of the last of them, by dtype.
        products: Likewise, by shape.
        syncs: Of all of them, by operator and place.
    """

    compiled: bool = False
    peaks: PeakWatch | None = None
    io: IOWatch = field(default_factory=IOWatch)
    counted: int = 0
    tokens: int | None = None
    flops: dict[torch.dtype, int] = field(default_factory=dict)
    products: dict[Product, int] = field(default_factory=dict)
    syncs: dict[tuple[str, str], int] = field(default_factory=dict)


class Closeup:
    """A meter's companion that looks closely at some of its steps.

    Args:
        model: The meter's, or None.
        phases: Which phase is on.
        spans: Where spans of the collector and of compilation go.

    Attributes:
        seen: What came of it.
    """

    def __init__(self, model: nn.Module | None, phases: Phases, spans: deque[Span]) -> None:
        self._model = model
        self._phases = phases
        self._garbage, self._compile = GarbageWatch(spans), CompileWatch(spans)
        self._recompute = Recomputation(model, phases) if model is not None else None
        self._operators: Operators | None = None
        phases.on_turn = self.turn
        self._step = 0
        self._count_at = _FIRST
        self.seen = Seen()

    @property
    def sees_recompute(self) -> bool:
        """Whether recomputation in this step would be seen."""
        return self._phases.close and self._recompute is not None and not self.seen.compiled

    @property
    def counting(self) -> bool:
        """Whether the operators of this step are counted."""
        return self._operators is not None

    def start(self, device: torch.device) -> None:
        """The first step begins."""
        self.seen.peaks = PeakWatch(device)

    def enter(self, step: int) -> None:
        """A step begins."""
        self._step = step
        self._compile.look()
        if self._phases.timeline is None:
            return
        count = step >= self._count_at
        self._phases.close = close = looks_closely(step) or count
        if not close:
            return
        self.seen.compiled = self._compile.seen > 0 or _has_compiled(self._model)
        if self.seen.peaks is not None:
            self.seen.peaks.begin(step)
            self.seen.io.sample(step)
        if count:
            self._count_at = (step // _RHYTHM + 1) * _RHYTHM
        if count and not self.seen.compiled:
            self._operators = Operators(self._phase)
            self._operators.__enter__()  # type: ignore[no-untyped-call]

    def turn(self, ending: str, beginning: str) -> None:
        """A phase ends and another begins, in a step that is looked at closely."""
        if "recompute" in (ending, beginning) or beginning == "loss":
            return  # a part of backward, as often as there are blocks; and of forward
        if self.seen.peaks is not None and ending != "outside":
            self.seen.peaks.look(self._step, ending)
        if beginning == "backward" and self._recompute is not None:
            self._recompute.attach(everywhere=self._step < 8 or self._step % _ANEW == 0)

    def leave(self, step: int, *, whole: bool) -> None:
        """A step is over."""
        if self._recompute is not None:
            self._recompute.detach()

    def peak(self, phase: str | None) -> int | None:
        """Of memory so far, at the end of a step whose last phase this was, in bytes."""
        return None if self.seen.peaks is None else self.seen.peaks.after(self._step, phase)

    def stop_counting(self, tokens: int | None, *, whole: bool) -> None:
        """A step is over: before anything else of it, for what comes later is none of its operators."""
        operators, self._operators = self._operators, None
        if operators is None:
            return
        operators.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if whole:
            self.seen.counted += 1
            self.seen.tokens = tokens
            self.seen.flops, self.seen.products = operators.flops, operators.products
            for key, times in operators.syncs.items():
                self.seen.syncs[key] = self.seen.syncs.get(key, 0) + times

    def close(self) -> None:
        """The meter is closed."""
        self._garbage.close()
        self._compile.close()

    def _phase(self) -> str:
        if self._phases.pauses:
            return "paused"
        return self._phases.timeline.kind if self._phases.timeline is not None else "inside"


def _has_compiled(model: nn.Module | None) -> bool:
    if model is None:
        return False
    return any(
        getattr(part, "_compiled_call_impl", None) is not None or type(part).__name__ == "OptimizedModule"
        for part in model.modules()
    )
