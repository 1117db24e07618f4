"""A report as a trace for Perfetto (ui.perfetto.dev) and other viewers of Chrome's trace events.

A process is a rank, a track is a lane. What a lane did beside the step is on its own track (on several, where
it did things at the same time); what the step stood still for is on a track of its own beneath.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from overlapkit.measure.draw import LANES
from overlapkit.measure.intervals import subtract, union
from overlapkit.measure.ledger import Trace
from overlapkit.measure.record import StepRecord
from overlapkit.measure.summary import PARTS
from overlapkit.measure.written import replacing
from overlapkit.span import Span

Event = dict[str, Any]

_PHASES = {"forward": "compute", "loss": "compute", "backward": "compute", "optimizer": "optimizer"}


@dataclass(frozen=True)
class Rank:
    """What is shown of one rank.

    Attributes:
        rank: Its number.
        name: As "rank 0 on cuda:0".
        traces: Its steps in time.
        spans: What ran around them.
        records: The steps' records; of those that are in `traces`, numbers are shown.
        ahead: How far its clock is ahead of the other ranks', in nanoseconds.
    """

    rank: int
    name: str
    traces: Sequence[Trace]
    spans: Iterable[Span]
    records: Sequence[StepRecord]
    ahead: int = 0


def save_perfetto(path: str | PathLike[str], ranks: Sequence[Rank], about: dict[str, Any]) -> None:
    """Write the trace, packed where `path` ends in .gz; whole or not at all.

    Args:
        path: Where to.
        ranks: At least one, with at least one step each.
        about: Written beside the events.
    """
    zero = min(trace.segments[0].start - one.ahead for one in ranks for trace in one.traces)
    with replacing(path) as file:
        head = json.dumps({"displayTimeUnit": "ms", "otherData": about}, allow_nan=False)
        file.write(head[:-1].encode() + b', "traceEvents": [')
        between = b"\n"
        for one in ranks:
            for event in _events(one, zero + one.ahead):
                file.write(between + json.dumps(event, allow_nan=False).encode())
                between = b",\n"
        file.write(b"\n]}\n")


def _events(one: Rank, zero: int) -> Iterator[Event]:
    pid = one.rank + 1  # 0 is the idle process to some viewers

    def name(what: str, tid: int, **args: Any) -> Event:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}

    def timed(event: Event, tid: int) -> Event:
        micros = {"dur": event["dur"] / 1e3} if "dur" in event else {}
        micros["ts"] = (event["ts"] - zero) / 1e3
        return {**event, **micros, "cat": "overlapkit", "pid": pid, "tid": tid}

    yield name("process_name", 0, name=one.name)
    yield name("process_sort_index", 0, sort_index=one.rank)
    for tid, (track, events) in _tracks(one).items():
        yield name("thread_name", tid, name=track)
        yield name("thread_sort_index", tid, sort_index=tid)
        for event in events:
            yield timed(event, tid)
    for event in _counters(one):
        yield timed(event, 0)


def _tracks(one: Rank) -> dict[int, tuple[str, list[Event]]]:
    """Names and events by track number; the numbers are their order."""
    records = {record.index: record for record in one.records}
    first = min(trace.segments[0].start for trace in one.traces)
    last = max(trace.segments[-1].end for trace in one.traces)
    spans = {*one.spans, *(span for trace in one.traces for span in trace.collectives)}
    seen = [span for span in spans if span.end > first and span.start < last]
    named = {"steps": [_step(trace, records.get(trace.index)) for trace in one.traces]}
    for lane in _lanes(one, seen):
        mine = [span for span in seen if span.lane == lane]
        named[lane] = [phase for trace in one.traces for phase in _phases(trace, lane)]
        named[lane] += [_work(span) for span in mine if not span.exposed]
        named[f"{lane}: exposed"] = list(_waits(one, lane, mine))
    rows = [(name, row) for name, slices in named.items() for row in _rows(slices)]
    return dict(enumerate(rows, 1))


def _lanes(one: Rank, spans: Sequence[Span]) -> list[str]:
    """The report's lanes, then what else is waited for (Python's garbage collector) or published."""
    found = {span.lane for span in spans} | {lane for trace in one.traces for lane in trace.waits}
    return [*LANES, *sorted(found - set(LANES))]


def _rows(slices: list[list[Event]]) -> list[list[Event]]:
    """On as few rows as there are at a time: slices of one track must not overlap."""
    rows: list[list[Event]] = []
    ends: list[int] = []
    for events in sorted(slices, key=lambda events: (events[0]["ts"], events[0]["dur"])):
        start, duration = events[0]["ts"], events[0]["dur"]
        row = next((row for row, end in enumerate(ends) if end <= start), len(ends))
        if row == len(ends):
            rows.append([])
            ends.append(0)
        ends[row] = start + duration
        rows[row] += events
    return rows


def _step(trace: Trace, record: StepRecord | None) -> list[Event]:
    """A step, and the pauses in it."""
    segments = trace.segments
    told: dict[str, Any] = {} if record is None else _numbers(record)
    step = _slice(f"step {trace.index}", segments[0].start, segments[-1].end, told)
    pauses = [s for s in segments if s.kind == "paused" and s.end > s.start]
    return [*step, *(event for pause in pauses for event in _slice("paused", pause.start, pause.end))]


def _numbers(record: StepRecord) -> dict[str, Any]:
    times = {part: getattr(record, part) for part in ("period", *PARTS)}
    told: dict[str, Any] = {f"{part}_ms": time / 1e6 for part, time in times.items() if time is not None}
    if record.tokens is not None:
        told["tokens"] = record.tokens
    return told


def _phases(trace: Trace, lane: str) -> Iterator[list[Event]]:
    """Where the lane's phases were on, without what the step stood still for in them."""
    stops = union(wait for waits in trace.waits.values() for wait in waits)
    for kind in (kind for kind, owner in _PHASES.items() if owner == lane):
        on = union((part.start, part.end) for part in trace.segments if part.kind == kind)
        for start, end in subtract(on, stops):
            yield _slice(kind, start, end)


def _work(span: Span) -> list[Event]:
    """What ran beside the step; of a collective also when its data was ready."""
    told: dict[str, Any] = {} if span.bytes is None else {"bytes": span.bytes}
    if span.parameters:
        told["parameters"] = ", ".join(span.parameters)
    events = _slice(span.name, span.start, span.end, told)
    if span.ready is not None:
        events.append({"ph": "i", "s": "t", "name": f"ready: {span.name}", "ts": span.ready})
    return events


def _waits(one: Rank, lane: str, spans: Iterable[Span]) -> Iterator[list[Event]]:
    """What the steps stood still for, by the names of the waits that cover most of each stretch."""
    exposed = deque(sorted((span for span in spans if span.exposed), key=lambda span: span.start))
    near: list[Span] = []  # the stretches come in order, and so do the spans around them
    for start, end in sorted(part for trace in one.traces for part in trace.waits.get(lane, ())):
        while exposed and exposed[0].start < end:
            near.append(exposed.popleft())
        near = [span for span in near if span.end > start]
        covers = [(min(span.end, end) - max(span.start, start), span.name) for span in near]
        (event,) = _slice(max(covers, default=(0, "exposed"))[1], start, end)
        yield [{**event, "cname": "terrible"}]  # red in chrome://tracing


def _slice(name: str, start: int, end: int, told: dict[str, Any] | None = None) -> list[Event]:
    """Times are nanoseconds until they are written."""
    return [{"ph": "X", "name": name, "ts": start, "dur": max(0, end - start), "args": told or {}}]


def _counters(one: Rank) -> Iterator[Event]:
    """Curves over the steps."""
    records = {record.index: record for record in one.records}
    for trace in one.traces:
        if (record := records.get(trace.index)) is None:
            continue
        exposed = None if record.exposed_share is None else 100 * record.exposed_share
        peak = None if record.peak_memory is None else record.peak_memory / 2**20
        found = {"exposed %": exposed, "tokens/s": record.tokens_per_s, "peak memory MiB": peak}
        for name, value in found.items():
            if value is not None:
                yield {"ph": "C", "name": name, "ts": trace.segments[0].start, "args": {"value": value}}
