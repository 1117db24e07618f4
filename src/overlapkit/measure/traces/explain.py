"""explain(): profiler traces in, the meter's StepReport out."""

import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TypeVar

from overlapkit.measure.report import StepReport
from overlapkit.measure.traces.answers import answer
from overlapkit.measure.traces.arrivals import compare
from overlapkit.measure.traces.columns import Columns
from overlapkit.measure.traces.detail import TraceDetail
from overlapkit.measure.traces.findings import find
from overlapkit.measure.traces.opening import Progress, TraceError, find_files, open_traces
from overlapkit.measure.traces.parsing import EventReader
from overlapkit.measure.traces.picture import drawn
from overlapkit.measure.traces.summary import Summary
from overlapkit.measure.traces.timeline import timelines
from overlapkit.measure.traces.traced import TracedRank, find_peak, trace_rank

_RANK = re.compile(r"(?:rank|worker)[_\-.]?(\d{1,6})", re.IGNORECASE)
_LATEST_NS = 1 << 62
T = TypeVar("T", int, None)


def explain(
    trace: str | PathLike[str] | Sequence[str | PathLike[str]], *, progress: Progress | None = None
) -> StepReport:
    """What each lane of the traced steps exposed: the seven answers, from torch.profiler's traces.

    Reads Kineto's (and other Chrome) traces of NVIDIA and AMD devices, and of ranks without a device that
    communicate through gloo. They are streamed: memory grows by some 50 bytes an event. Lanes are TraceLens'
    (a part that nothing before it hides belongs to it, and the parts add up to the span), overlap is
    HolisticTraceAnalysis's; setting memory counts as copying. Work belongs to the step that launched it.
    Traces of several ranks are compared by when each arrived at a collective.

    Args:
        trace: A .json, .json.gz or .tar.gz, a folder of such files, or a list of them: one trace a rank.
        progress: Called with the bytes read so far and the bytes there are.

    Returns:
        The report; `report.trace` has the lanes of the whole, of each step and of each rank. Means are over
        the steps of all ranks.

    Raises:
        TypeError: `trace` is neither a path nor a list of paths.
        ValueError: It names no trace.
        FileNotFoundError: A path does not exist.
        TraceError: A trace is damaged, cut off, empty, of something else, or of a rank that was given
            already; the message names the file and the place in it.
    """
    ranks: list[TracedRank] = []
    for name, stream in open_traces(find_files(trace), progress):
        found = _read(name, EventReader(name, stream), len({one.file for one in ranks}))
        for one in ranks:
            if one.rank == found[0].rank:
                raise TraceError(f"{name}: rank {one.rank} was read from {one.file}: give one trace a rank")
        ranks += found
    ranks.sort(key=lambda one: one.rank)
    return _report(TraceDetail(tuple(ranks), compare(ranks)))


def _read(name: str, reader: EventReader, turn: int) -> list[TracedRank]:
    columns = Columns()
    for events in reader.chunks():
        columns.take(events, reader)
    if not 0 <= reader.base_ns < _LATEST_NS:
        raise TraceError(f"{name}: baseTimeNanoseconds={reader.base_ns} is no time")
    found = timelines(columns, reader.base_ns)
    if not found:
        raise TraceError(
            f"{name}: {reader.count} events, but no kernel, copy or operator among them: "
            "is it torch.profiler's, with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]?"
        )
    words = _RANK.search(Path(name).name)
    rank = _number(reader, "rank", int(words[1]) if words else turn)
    world = _number(reader, "world_size", None)
    return [
        trace_rank(name, rank, world, timeline, find_peak(columns, reader.base_ns, timeline))
        for timeline in found
    ]


def _number(reader: EventReader, key: str, otherwise: T) -> int | T:
    value = reader.info.get(key)
    return value if type(value) is int and 0 <= value < 1 << 32 else otherwise


def _report(detail: TraceDetail) -> StepReport:
    summary = Summary(detail)
    findings = find(summary)
    first = detail.ranks[0]
    numbers = [step.number for step in detail.steps if step.number is not None]
    peaks = [one.memory_peak[0] for one in detail.ranks if one.memory_peak is not None]
    traces, spans = drawn(first)
    return StepReport(
        steps=len(set(numbers)) or 1,
        first_step=min(numbers, default=None),
        last_step=max(numbers, default=None),
        device="cpu" if first.device is None else f"cuda:{first.device}",
        rank=first.rank,
        world=first.world or len({one.rank for one in detail.ranks}),
        period_ms=summary.period_ms,
        exposed_share=summary.exposed_share(),
        tokens_per_s=None,
        peak_memory=max(peaks, default=None),
        parts=summary.parts,
        answers=answer(summary, findings),
        findings=findings,
        records=summary.records,
        _traces=traces,
        _spans=spans,
        trace=detail,
    )
