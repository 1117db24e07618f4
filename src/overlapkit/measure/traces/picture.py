"""The steps of a trace in the form that StepReport.plot() draws and StepReport.to_perfetto() writes."""

import numpy as np

from overlapkit.measure.intervals import Intervals, intersect
from overlapkit.measure.ledger import Trace
from overlapkit.measure.record import Segment
from overlapkit.measure.traces.columns import TO_DEVICE, TO_DEVICE_PAGEABLE, Ints
from overlapkit.measure.traces.lanes import BACKWARD, COMMUNICATION, COPY, FORWARD, OPTIMIZER
from overlapkit.measure.traces.timeline import Mask, Windows
from overlapkit.measure.traces.traced import TracedRank, TracedStep
from overlapkit.span import Span

Drawn = tuple[tuple[Trace, ...], tuple[Span, ...]]

_STEPS = 8
_DOTS = 2000  # what is closer together than the picture can show is drawn as one
_CLOSE_NS = 1000  # and so is, where one can zoom in, what leaves no time to launch anything between
_PHASES = {FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "optimizer"}
_LANES = {COMMUNICATION: "communication", COPY: "transfer"}
_COPIES = {TO_DEVICE: "host to device", TO_DEVICE_PAGEABLE: "host to device, pageable"}


def drawn(rank: TracedRank) -> Drawn:
    """The last steps of a rank, and what ran beside them, as finely as a picture can show it."""
    traces, spans = [], []
    for step in _last(rank):
        blur, mine = step.record.period // _DOTS, _rows(rank, step)
        traces.append(_trace(rank, step, blur))
        for lane, name in _LANES.items():
            rows = mine & (rank.timeline.lanes == lane)
            parts = _merged(rank.timeline.starts[rows], rank.timeline.ends[rows], blur)
            spans += [Span(name, name, start, end) for start, end in parts]
        spans += _buckets(rank, step).values()
    return tuple(traces), tuple(spans)


def detailed(rank: TracedRank) -> Drawn:
    """The same with each collective and each copy by its own."""
    traces, spans = [], []
    timeline = rank.timeline
    for step in _last(rank):
        mine, buckets = _rows(rank, step), _buckets(rank, step)
        traces.append(_trace(rank, step, _CLOSE_NS))
        for row in np.flatnonzero(mine & np.isin(timeline.lanes, tuple(_LANES))).tolist():
            start, end = int(timeline.starts[row]), int(timeline.ends[row])
            if timeline.lanes[row] == COPY:
                name = _COPIES.get(int(timeline.kinds[row]), "copy on the device, or memset")
                spans.append(Span("transfer", name, start, end))
            else:
                says = timeline.host.collectives[timeline.places[row]]
                alone = Span("communication", says.kind, start, end, says.bytes)
                spans.append(buckets.get((start, end), alone))
    return tuple(traces), tuple(spans)


def _last(rank: TracedRank) -> list[TracedStep]:
    return [step for step in rank.steps if step.record.period][-_STEPS:]


def _rows(rank: TracedRank, step: TracedStep) -> Mask:
    places = np.flatnonzero(rank.timeline.host.windows.numbers == step.number)
    everything = np.ones(len(rank.timeline.starts), dtype=bool)
    return np.isin(rank.timeline.steps, places) if len(places) else everything


def _buckets(rank: TracedRank, step: TracedStep) -> dict[tuple[int, int], Span]:
    """The step's reductions on the trace's clock, by start and end."""
    windows = rank.timeline.host.windows
    places = np.flatnonzero(windows.numbers == step.number)
    zero = int(windows.starts[places[0]] if len(places) else rank.timeline.starts[0])
    found = {}
    for one in step.buckets:
        start, end, ready = (zero + time for time in (one.start, one.end, one.ready))
        found[start, end] = Span("communication", one.kind, start, end, one.bytes, ready=ready)
    return found


def _trace(rank: TracedRank, step: TracedStep, blur: int) -> Trace:
    timeline = rank.timeline
    begin = step.end - step.record.period
    beside = timeline.during(begin, step.end)
    segments = [Segment("outside", begin, begin, begin, begin), Segment("inside", step.end, step.end, 0, 0)]
    for lane, kind in _PHASES.items():
        rows = beside[timeline.lanes[beside] == lane]
        starts, ends = np.maximum(timeline.starts[rows], begin), np.minimum(timeline.ends[rows], step.end)
        for start, end in _merged(starts, ends, blur):
            segments.append(Segment(kind, start, end, start, end))
    sweep = timeline.sweep(beside, begin, step.end)
    hidden = np.logical_or.reduce(sweep.active[:COMMUNICATION])
    waits: dict[str, Intervals] = {}
    for lane, name in _LANES.items():
        alone = sweep.active[lane] & ~hidden
        waits[name] = _merged(sweep.times[:-1][alone], sweep.times[1:][alone], blur)
        hidden = hidden | sweep.active[lane]
    fed, gaps = timeline.host.input, zip(*(of.tolist() for of in sweep.gaps()), strict=True)
    waits["input"] = intersect(list(zip(fed.starts.tolist(), fed.ends.tolist(), strict=True)), list(gaps))
    segments.sort(key=lambda segment: segment.start)
    return Trace(step.number or 0, segments, waits)


def _merged(starts: Ints, ends: Ints, blur: int) -> Intervals:
    order = np.argsort(starts, kind="stable")
    parts = Windows(starts[order], ends[order] + blur, starts[order]).union()
    return [
        (start, end - blur) for start, end in zip(parts.starts.tolist(), parts.ends.tolist(), strict=True)
    ]
