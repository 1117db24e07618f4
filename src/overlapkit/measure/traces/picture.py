"""The steps of a trace in the form that StepReport.plot() draws."""

import numpy as np

from overlapkit.measure.intervals import Intervals
from overlapkit.measure.ledger import Trace
from overlapkit.measure.record import Segment
from overlapkit.measure.traces.lanes import BACKWARD, COMMUNICATION, COPY, FORWARD, OPTIMIZER, Sweep
from overlapkit.measure.traces.timeline import Mask, Windows
from overlapkit.measure.traces.traced import TracedRank, TracedStep
from overlapkit.span import Span

_STEPS = 8
_DOTS = 2000  # what is closer together than the picture can show is drawn as one
_PHASES = {FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "optimizer"}
_LANES = {COMMUNICATION: "communication", COPY: "transfer"}


def drawn(rank: TracedRank) -> tuple[tuple[Trace, ...], tuple[Span, ...]]:
    """The last steps of a rank, and what ran beside them."""
    timeline = rank.timeline
    traces, spans = [], []
    for step in [step for step in rank.steps if step.record.period][-_STEPS:]:
        places = np.flatnonzero(timeline.host.windows.numbers == step.number)
        mine = np.isin(timeline.steps, places) if len(places) else np.ones(len(timeline.starts), dtype=bool)
        traces.append(_trace(rank, step, mine))
        for lane, name in _LANES.items():
            parts = _merged(
                timeline.starts[mine & (timeline.lanes == lane)],
                timeline.ends[mine & (timeline.lanes == lane)],
                step.record.period,
            )
            spans += [Span(name, name, start, end) for start, end in parts]
    return tuple(traces), tuple(spans)


def _trace(rank: TracedRank, step: TracedStep, mine: Mask) -> Trace:
    timeline, period = rank.timeline, step.record.period
    begin = step.end - period
    segments = [Segment("outside", begin, begin, begin, begin), Segment("inside", step.end, step.end, 0, 0)]
    for lane, kind in _PHASES.items():
        rows = mine & (timeline.lanes == lane)
        for start, end in _merged(timeline.starts[rows], timeline.ends[rows], period):
            segments.append(Segment(kind, start, end, start, end))
    sweep = Sweep(timeline.starts[mine], timeline.ends[mine], timeline.lanes[mine])
    hidden = np.logical_or.reduce(sweep.active[:COMMUNICATION])
    waits: dict[str, Intervals] = {}
    for lane, name in _LANES.items():
        alone = sweep.active[lane] & ~hidden
        waits[name] = _merged(sweep.times[:-1][alone], sweep.times[1:][alone], period)
        hidden = hidden | sweep.active[lane]
    fed = timeline.host.input
    waits["input"] = [
        (max(s, begin), min(e, step.end)) for s, e in zip(fed.starts.tolist(), fed.ends.tolist(), strict=True)
    ]
    segments.sort(key=lambda segment: segment.start)
    return Trace(step.number or 0, segments, waits)


def _merged(starts: np.ndarray, ends: np.ndarray, period: int) -> Intervals:
    order = np.argsort(starts, kind="stable")
    blur = period // _DOTS
    parts = Windows(starts[order], ends[order] + blur, starts[order]).union()
    return [
        (start, end - blur) for start, end in zip(parts.starts.tolist(), parts.ends.tolist(), strict=True)
    ]
