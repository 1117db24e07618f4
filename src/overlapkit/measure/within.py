"""From a window of steps to a report's detail: buckets, units, microbatches, saves, compilations, FLOPs."""

import statistics
import sys
from collections.abc import Callable
from typing import Any

from overlapkit.measure.closeup import Seen
from overlapkit.measure.detail import (
    Bucket,
    CheckpointCost,
    Compilation,
    Gather,
    JobIO,
    Pass,
    StepDetail,
    Sync,
)
from overlapkit.measure.intervals import within
from overlapkit.measure.ledger import Trace
from overlapkit.measure.record import backwards
from overlapkit.measure.speed import Speed
from overlapkit.measure.summary import Window
from overlapkit.span import Span

_REDUCTIONS = ("all_reduce", "reduce_scatter")
_GATHER = "all_gather "
_CLEAN = 3  # steps without a save that a slowdown is compared with, at least


def look_within(window: Window, seen: Seen, speed: Speed) -> StepDetail:
    """The detail of a window; what cannot be told gets its reason."""
    values: dict[str, Any] = {}
    missing: dict[str, str] = {}
    looks: dict[str, Callable[[], Any]] = {
        "recompute_ms": lambda: _recompute_ms(window, seen),
        "passes": lambda: _passes(window),
        "buckets": lambda: _buckets(window),
        "gathers": lambda: _gathers(window),
        "compilations": lambda: _compilations(window),
        "syncs": lambda: _syncs(window, seen),
        "io": lambda: _io(window, seen),
        "checkpoint": lambda: _checkpoint(window),
        "peaks": lambda: _peaks(seen),
        "flops": lambda: speed.flops,
        "mfu": lambda: speed.mfu(window.period_ms),
    }
    for name, look in looks.items():
        value = look() if window.records else "no step has been measured yet"
        if isinstance(value, str):
            missing[name] = value
        else:
            values[name] = value
    return StepDetail(**values, missing=missing)


def _recompute_ms(window: Window, seen: Seen) -> float | str:
    known = [record.recompute for record in window.records if record.recompute is not None]
    if known:
        return sum(known) / len(known) / 1e6
    if seen.compiled:
        return "the model is compiled: what its graphs compute again is not told"
    return window.parts["backward"].reason or "no step of this window was looked at closely"


def _passes(window: Window) -> tuple[Pass, ...] | str:
    """Of the usual number of microbatches; steps with another one are left out."""
    counts = [len(record.microbatches) for record in window.records]
    usual = statistics.mode(counts)
    if not usual:
        return window.parts["forward"].reason or "no forward was seen"
    alike = [record.microbatches for record in window.records if len(record.microbatches) == usual]
    return tuple(
        Pass(*(sum(times) / len(alike) / 1e6 for times in zip(*nth, strict=True)))
        for nth in zip(*alike, strict=True)
    )


def _buckets(window: Window) -> tuple[Bucket, ...] | str:
    if reason := window.coverage.missing("communication"):
        return reason
    seen: dict[str, list[tuple[Span, int]]] = {}
    for trace in window.usual:
        for span in trace.collectives:
            begun = _begun(trace, span)
            if span.bytes and span.name.startswith(_REDUCTIONS) and begun is not None:
                seen.setdefault(span.name, []).append((span, begun))
    if not seen:
        return "no reduction was published within backward"
    return tuple(sorted((_bucket(pairs) for pairs in seen.values()), key=lambda one: one.start_ms))


def _begun(trace: Trace, span: Span) -> int | None:
    """When the backward began in which a reduction was ready."""
    ready = span.start if span.ready is None else span.ready
    return next((start for start, end in backwards(trace.segments) if start <= ready < end), None)


def _bucket(pairs: list[tuple[Span, int]]) -> Bucket:
    latest = pairs[-1][0]
    ready = [span.ready - begun for span, begun in pairs if span.ready is not None]
    return Bucket(
        name=latest.name,
        parameters=latest.parameters,
        bytes=latest.bytes,
        ready_ms=statistics.fmean(ready) / 1e6 if ready else None,
        start_ms=statistics.fmean(span.start - begun for span, begun in pairs) / 1e6,
        end_ms=statistics.fmean(span.end - begun for span, begun in pairs) / 1e6,
        steps=len(pairs),
    )


def _gathers(window: Window) -> tuple[Gather, ...] | str:
    if reason := window.coverage.missing("communication"):
        return reason
    exposed: dict[str, int] = {}
    moved: dict[str, int] = {}
    for trace in window.usual:
        felt = within(trace.waits.get("communication", []))
        for span in (span for span in trace.collectives if _GATHER in span.name):
            unit = span.name.split(_GATHER, 1)[1]
            exposed[unit] = exposed.get(unit, 0) + (felt(span.start, span.end) if span.exposed else 0)
            moved[unit] = moved.get(unit, 0) + (span.bytes or 0)
    steps = len(window.usual)
    found = [
        Gather(unit, time / steps / 1e6, (moved[unit] / steps) or None) for unit, time in exposed.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.exposed_ms)) or "no unit is gathered"


def _compilations(window: Window) -> tuple[Compilation, ...] | str:
    """Dynamo's own account of a compilation has the function's name; its spans have the time."""
    if not window.compilations:
        return ()
    utils = sys.modules.get("torch._dynamo.utils")
    metrics = {str(one.compile_id): one for one in utils.get_compilation_metrics()} if utils else {}
    found = []
    for number, seen in window.compilations.items():
        about = metrics.get(number)
        where = f"{about.co_filename}:{about.co_firstlineno}" if about is not None else "unknown"
        name = about.co_name if about is not None and about.co_name else number
        steps = tuple(sorted({step for step, _ in seen}))
        time = sum(span.end - span.start for _, span in seen)
        again = number.partition("/")[2] not in ("", "0")
        reason = getattr(about, "recompile_reason", None) or ("compiled again" if again else None)
        found.append(Compilation(name, where, steps, time / 1e6, reason))
    return tuple(sorted(found, key=lambda one: -one.ms))


def _syncs(window: Window, seen: Seen) -> tuple[Sync, ...] | str:
    if window.coverage.device.type == "cpu":
        return "tensors are on the CPU: there is no device to wait for"
    if not seen.counted:
        return _uncounted(seen) + '; torch.cuda.set_sync_debug_mode("warn") shows them'
    found = [Sync(*key, times / seen.counted) for key, times in seen.syncs.items()]
    return tuple(sorted(found, key=lambda one: -one.a_step))


def _uncounted(seen: Seen) -> str:
    if seen.compiled:
        return "torch.compile is at work: operators inside its graphs are not seen"
    return "the operators of no step were counted yet"


def _io(window: Window, seen: Seen) -> JobIO | str:
    return seen.io.rates(window.records[0].index)


def _checkpoint(window: Window) -> CheckpointCost | str:
    if reason := window.coverage.missing("checkpoint"):
        return reason
    saves, steps = sum(record.saves for record in window.records), len(window.records)
    if not saves:
        return "no save began in this window"
    stall = sum(record.checkpoint or 0 for record in window.records)
    slowdown = _slowdown(window)
    return CheckpointCost(
        saves=saves,
        interval=steps / saves,
        stall_ms=stall / saves / 1e6,
        slowdown_ms=None if slowdown is None else slowdown * steps / saves / 1e6,
        amortised_ms=(stall + (slowdown or 0) * steps) / steps / 1e6,
    )


def _slowdown(window: Window) -> float | None:
    """Nanoseconds a step that those beside a save were longer, over the steps whose times are kept."""
    traced = {trace.index: trace for trace in window.usual}
    steps = [(record, traced[record.index]) for record in window.records if record.index in traced]
    clean: list[int] = []
    beside: list[int] = []
    for record, trace in steps:
        start, end = trace.segments[0].start, trace.segments[-1].end
        at_work = any(span.start < end and span.end > start for span in window.saving)
        (beside if at_work or record.saves else clean).append(record.period - (record.checkpoint or 0))
    if len(clean) < _CLEAN or not beside:
        return None
    usual = statistics.median(clean)
    spread = statistics.quantiles(clean, n=4)[2]
    slower = statistics.fmean(beside) > spread  # otherwise it is no more than steps differ anyway
    return sum(time - usual for time in beside) / len(steps) if slower else 0.0


def _peaks(seen: Seen) -> dict[str, int] | str:
    if seen.peaks is not None and seen.peaks.phases:
        return dict(seen.peaks.phases)
    return "this system keeps no record of the peak that can be set back (/proc/self/clear_refs)"
