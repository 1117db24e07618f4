"""A step that was played through becomes a StepReport, by the accounting that measured steps go through."""

import torch

from overlapkit.measure.ledger import Finished, Ledger
from overlapkit.measure.record import Segment
from overlapkit.measure.report import StepReport, make_report
from overlapkit.measure.sources import Coverage
from overlapkit.plan.step import Played
from overlapkit.span import Span

_LANE = "communication"


class _Model:
    """Publishes what a wrapper would have published."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans
        self._taken = True

    def timings(self) -> list[Span]:
        """The spans; a tap's first call is to leave out what was before it."""
        self._taken = not self._taken
        return self._spans if self._taken else []


class _Coverage(Coverage):
    """Only compute, communication and the optimizer are simulated."""

    def missing(self, lane: str, *, fed: bool = False) -> str | None:
        """See Coverage."""
        return "not simulated" if lane in ("input", "transfer", "checkpoint") else None


class _Timeline:
    """The phases of the step, known at once."""

    def __init__(self, segments: list[Segment]) -> None:
        self._segments = segments

    def resolve(self) -> list[Segment]:
        """The segments."""
        return self._segments

    def release(self) -> None:
        """Nothing was borrowed."""


def report_of(
    played: Played, *, world: int, device: str, tokens: int | None, memory: int, optimizer_s: float
) -> StepReport:
    """What a meter would have said of this step.

    Args:
        played: The step.
        world: Number of ranks.
        device: Where it would run.
        tokens: Of one rank in the step.
        memory: Bytes of one rank at the highest point.
        optimizer_s: Seconds of the optimizer's step that follows.
    """
    coverage = _Coverage({"model": _Model(_spans(played)), "optimizer": object()}, world)
    coverage.device = torch.device(device)
    ledger = Ledger(coverage, 1)
    segments = _segments(played, optimizer_s)
    ledger.finish(Finished(1, _Timeline(segments), tokens, False, memory, False))  # type: ignore[arg-type]
    ledger.settle()
    return make_report(ledger, 1, None, 0)


def _spans(played: Played) -> list[Span]:
    moved = [
        Span(_LANE, one.name, _ns(one.start), _ns(one.end), one.nbytes, ready=_ns(one.launched))
        for one in played.transfers
    ]
    waits = [
        Span(_LANE, phase.name, _ns(phase.start), _ns(phase.end), exposed=True)
        for phase in played.phases
        if phase.kind == _LANE
    ]
    return sorted(moved + waits, key=lambda span: span.start)


def _segments(played: Played, optimizer_s: float) -> list[Segment]:
    """Forward and backward in turn, each with the waits in it, then the optimizer."""
    edges: list[tuple[str, float]] = []
    for phase in played.phases:
        if phase.kind != _LANE and (not edges or edges[-1][0] != phase.kind):
            edges.append((phase.kind, phase.start if edges else 0.0))
    edges += [("optimizer", played.end), ("end", played.end + optimizer_s)]
    return [
        Segment(kind, _ns(start), _ns(end), _ns(start), _ns(end))
        for (kind, start), (_, end) in zip(edges, edges[1:], strict=False)
    ]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
