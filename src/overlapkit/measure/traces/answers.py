"""The seven answers, from a trace."""

from collections.abc import Sequence

import numpy as np

from overlapkit.measure.advice import Finding
from overlapkit.measure.answers import MIB, Answer, judge, say, unmeasured
from overlapkit.measure.traces.arrivals import Arrivals
from overlapkit.measure.traces.columns import OTHER_COPY
from overlapkit.measure.traces.lanes import COPY
from overlapkit.measure.traces.summary import Summary


def answer(summary: Summary, findings: Sequence[Finding]) -> tuple[Answer, ...]:
    """The seven answers, in order.

    Args:
        summary: Of the trace.
        findings: Whose fixes are named.
    """
    fixes = {finding.lane: finding.fix for finding in findings}
    return (
        _input(summary, fixes.get("input")),
        _copies(summary, fixes.get("transfer")),
        _compute_fed(summary, fixes.get("other")),
        _buckets(summary),
        _together(summary, fixes.get("communication")),
        _left(summary, fixes.get("communication")),
        _peak(summary),
    )


def _input(summary: Summary, fix: str | None) -> Answer:
    part = summary.parts["input"]
    if part.mean_ms is None or part.share is None:
        return unmeasured("batch ready", "ms", part.reason or "")
    evidence = f"worst {part.worst_ms:.2f} ms; idle time while the host was in the DataLoader"
    return say("batch ready", part.mean_ms, "ms", judge("input", part.mean_ms, part.share), evidence, fix)


def _copies(summary: Summary, fix: str | None) -> Answer:
    name, copies = "copy overlapped", summary.copies_ms()
    if copies is None:
        return unmeasured(name, "ms", summary.parts["transfer"].reason or "")
    total, exposed, pageable = copies
    if not total:
        return say(name, 0.0, "ms", "hidden (0.00 ms, 0.0%)", "the trace holds no copy to the device")
    memory = f"{pageable / total:.0%} from pageable memory" if pageable else "none from pageable memory"
    evidence = f"{total:.2f} ms of copies {summary.per}, {memory}, on stream {_streams(summary)}"
    return say(name, exposed, "ms", judge("transfer", exposed, summary.share(exposed)), evidence, fix)


def _streams(summary: Summary) -> str:
    found: set[str] = set()
    for one in summary.detail.ranks:
        work = one.timeline
        numbers = np.unique(work.streams[(work.lanes == COPY) & (work.kinds != OTHER_COPY)])
        found.update(str(work.host.labels[number]) for number in numbers)
    return ", ".join(sorted(found)[:4]) + (", ..." if len(found) > 4 else "")


def _compute_fed(summary: Summary, fix: str | None) -> Answer:
    idle = summary.idle_ms
    evidence = "time in which nothing was at work, the wait for input excluded"
    if any(one.device is not None for one in summary.detail.ranks):
        evidence = f"for {summary.host_wait_ms:.2f} ms of it the host had not launched what came next"
    return say("compute fed", idle, "ms", judge("other", idle, summary.share(idle)), evidence, fix)


def _buckets(summary: Summary) -> Answer:
    name = "buckets ready"
    steps = [step for step in summary.steps if step.buckets]
    if not steps:
        reason = summary.parts["backward"].reason or "no reduction was launched in backward"
        return unmeasured(name, "ms", reason)
    step = max(steps, key=lambda one: one.tail or 0)
    last = step.buckets[-1]
    launches = [f"{bucket.launch / 1e6:.1f}" for bucket in step.buckets]
    if len(launches) > 8:
        launches[4:-3] = ["..."]
    late = sum(bucket.late for bucket in step.buckets)
    where = "the trace" if step.number is None else f"step {step.number}"
    if len(summary.detail.ranks) > 1:
        where += f" of rank {step.rank}"
    evidence = f"{where}: {len(step.buckets)} of them, launched after {', '.join(launches)} ms; "
    evidence += f"{late} too late to end before backward" if late else "all could end before backward"
    return say(name, last.ready / 1e6, "ms", f"after {last.ready / 1e6:.1f} ms", evidence)


def _together(summary: Summary, fix: str | None) -> Answer:
    name, arrivals = "ranks together", summary.detail.arrivals
    waited = summary.waited_ms()
    if not isinstance(arrivals, Arrivals) or waited is None:
        world = summary.detail.ranks[0].world
        return unmeasured(name, "ms", "single process" if world == 1 else str(arrivals))
    first, longest = arrivals.straggler, arrivals.patient
    evidence = (
        f"rank {first.rank} arrives last at {first.last} of {first.shared} collectives and waits "
        f"{first.waited / 1e6:.2f} ms in all; rank {longest.rank} waits {longest.waited / 1e6:.2f} ms"
    )
    share = summary.share(waited)
    notable = waited and judge("communication", waited, share).startswith("exposed")
    verdict = f"no, {waited:.2f} ms, {share:.1%}" if notable else f"yes ({waited:.2f} ms, {share:.1%})"
    return say(name, waited, "ms", verdict, evidence, fix if notable else None)


def _left(summary: Summary, fix: str | None) -> Answer:
    name, part, tail = "communication left", summary.parts["communication"], summary.tail_ms()
    if part.mean_ms is None or part.share is None:
        world = summary.detail.ranks[0].world
        return unmeasured(name, "ms", "single process" if world == 1 else part.reason or "")
    overlap = summary.detail.overlap
    exposed = (
        f"{part.mean_ms:.2f} ms {summary.per} exposed in all, {overlap or 0:.1f}% of communication hidden"
    )
    if tail is None:
        evidence = f"{exposed}; what was left after backward cannot be told"
        return say(name, part.mean_ms, "ms", judge("communication", part.mean_ms, part.share), evidence, fix)
    left, waiting = tail
    if waiting is not None:
        exposed += f"; {waiting:.2f} ms of the tail waiting for a late rank"
    return say(name, left, "ms", judge("communication", left, summary.share(left)), exposed, fix)


def _peak(summary: Summary) -> Answer:
    peaks = [one.memory_peak for one in summary.detail.ranks if one.memory_peak is not None]
    if not peaks:
        return unmeasured("peak memory", "MiB", "memory was not profiled: profile_memory=True")
    nbytes, phase = max(peaks)
    verdict = "optimizer" if phase == "optimizer" else "no"
    return say("peak memory", nbytes / MIB, "MiB", verdict, f"allocated, in {phase}")
