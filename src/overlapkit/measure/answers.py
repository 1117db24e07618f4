"""The seven questions about a step, each answered with a number, or with the reason why there is none."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from overlapkit.measure.across.words import is_late, remedy, tail_split, together
from overlapkit.measure.advice import Finding, is_notable
from overlapkit.measure.detail import StepDetail
from overlapkit.measure.memory import Peak
from overlapkit.measure.record import backwards
from overlapkit.measure.summary import Window

MIB = 2**20
_SAME = 0.01  # of the exposed communication: less is no part of its own

_QUESTIONS = {
    "batch ready": "Was the next batch ready?",
    "copy overlapped": "Did the host-to-device copy overlap?",
    "compute fed": "Were forward and backward continuously available?",
    "buckets ready": "When did each gradient bucket become ready?",
    "ranks together": "Did all ranks arrive together?",
    "communication left": "How much communication remained after backward?",
    "peak memory": "Did the optimizer or a checkpoint create the peak?",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One question's answer.

    Attributes:
        name: The question in two words.
        question: The question.
        value: The number, or None where it was not measured.
        unit: Of the number.
        verdict: "hidden (x ms, y%)" or "exposed x ms, y%", another short judgement, or "not measured".
        evidence: What supports it; or the reason why there is no number.
        fix: Component and setting, where there is a finding.
    """

    name: str
    question: str
    value: float | None
    unit: str
    verdict: str
    evidence: str
    fix: str | None


def answer(
    window: Window, peak: Peak | None, findings: Sequence[Finding], detail: StepDetail
) -> tuple[Answer, ...]:
    """The seven answers, in order."""
    fixes = {finding.lane: finding.fix for finding in reversed(findings)}  # of a lane's two, the costlier
    return (
        _exposure("batch ready", window, "input", fixes),
        _exposure("copy overlapped", window, "transfer", fixes),
        _compute_fed(window, fixes),
        _buckets(window, next((one.fix for one in findings if one.component == "replicate"), None)),
        _arrival(window),
        _left(window, fixes),
        _peak(window, peak, detail),
    )


def say(name: str, value: float, unit: str, verdict: str, evidence: str, fix: str | None = None) -> Answer:
    """An answer with a number."""
    return Answer(name, _QUESTIONS[name], value, unit, verdict, evidence, fix)


def unmeasured(name: str, unit: str, reason: str) -> Answer:
    """An answer without one."""
    return Answer(name, _QUESTIONS[name], None, unit, "not measured", reason, None)


def judge(lane: str, mean_ms: float, share: float) -> str:
    """The verdict on the time that a lane costs a step."""
    number = f"{mean_ms:.2f} ms, {share:.1%}"
    if is_notable(lane, share):
        return f"exposed {number}"
    return f"yes ({number} idle)" if lane == "other" else f"hidden ({number})"


def _exposure(name: str, window: Window, lane: str, fixes: dict[str, str]) -> Answer:
    part = window.parts[lane]
    if part.mean_ms is None or part.share is None or part.worst_ms is None:
        return unmeasured(name, "ms", part.reason or "")
    evidence = f"worst {part.worst_ms:.2f} ms"
    work = window.work_ms(lane)
    if work is not None:
        evidence += f"; {work:.2f} ms a step beside it"
    return say(name, part.mean_ms, "ms", judge(lane, part.mean_ms, part.share), evidence, fixes.get(lane))


def _compute_fed(window: Window, fixes: dict[str, str]) -> Answer:
    name, other = "compute fed", window.parts["other"]
    if window.parts["forward"].mean_ms is None or other.mean_ms is None or other.share is None:
        return unmeasured(name, "ms", window.parts["forward"].reason or "")
    evidence = f"host work beside phases and waits, {window.outside_ms:.2f} ms of it between steps"
    for part, cause in (("garbage", "Python's collector"), ("compilation", "torch.compile")):
        if (window.parts[part].mean_ms or 0.0) >= 0.01:
            evidence += f"; beside it {window.parts[part].mean_ms:.2f} ms of {cause}"
    if window.coverage.device.type != "cpu":
        evidence += "; gaps between kernels within a phase need a trace"
    verdict = judge("other", other.mean_ms, other.share)
    return say(name, other.mean_ms, "ms", verdict, evidence, fixes.get("other"))


def _buckets(window: Window, fix: str | None) -> Answer:
    name = "buckets ready"
    if "model" not in window.coverage.taps:
        return unmeasured(name, "ms", window.coverage.missing("communication") or "")
    for trace in reversed(window.traces):
        for begin, end in reversed(backwards(trace.segments)):
            ready = sorted(
                ((span.start if span.ready is None else span.ready) - begin, span.name)
                for span in trace.collectives
                if span.bytes and span.name.startswith(("all_reduce", "reduce_scatter"))
                if begin <= (span.start if span.ready is None else span.ready) < end
            )
            if not ready:
                continue
            evidence = (
                f"step {trace.index}: {len(ready)} of them, the first after {ready[0][0] / 1e6:.1f} ms; "
                f"last {ready[-1][1]}"
            )
            last = ready[-1][0] / 1e6
            return say(name, last, "ms", f"after {last:.1f} of {(end - begin) / 1e6:.1f} ms", evidence, fix)
    return unmeasured(name, "ms", "no reduction was published within backward")


def _arrival(window: Window) -> Answer:
    if isinstance(window.ranks, str):
        return unmeasured("ranks together", "ms", window.ranks)
    value, verdict, evidence = together(window.ranks)
    if not value and not window.ranks.collectives and window.ranks.unseen:
        return unmeasured("ranks together", "ms", window.ranks.unseen)
    fix = ": ".join(remedy(window.ranks, window.coverage.device)) if is_late(window.ranks) else None
    return say("ranks together", value, "ms", verdict, evidence, fix)


def _left(window: Window, fixes: dict[str, str]) -> Answer:
    whole = _exposure("communication left", window, "communication", fixes)
    if whole.value is None:
        return whole
    split = None if isinstance(window.ranks, str) else tail_split(window.ranks)
    evidence = f"{split}; {whole.evidence}" if split is not None else whole.evidence
    tail, period = window.tail_ms(), window.period_ms
    if tail is None or not period or whole.value - tail < _SAME * whole.value:
        return replace(whole, evidence=evidence)
    evidence = f"{whole.value:.2f} ms exposed in all; {evidence}"
    return replace(whole, value=tail, verdict=judge("communication", tail, tail / period), evidence=evidence)


def _peak(window: Window, peak: Peak | None, detail: StepDetail) -> Answer:
    name, highest = "peak memory", window.records[-1].peak_memory if window.records else None
    if not window.records:
        return unmeasured(name, "MiB", "no step has been measured yet")
    if highest is None:
        return unmeasured(name, "MiB", "this system keeps no record of it")
    if peak is None:
        return say(name, highest / MIB, "MiB", "no", "reached before the first step")
    evidence = f"{_by_phase(detail)}{peak.growth / MIB:+.1f} MiB {_place(peak)}"
    verdict = {None: "unknown", "optimizer": "optimizer"}.get(peak.phase, "no")
    if peak.phase == "outside" and any(span.lane == "checkpoint" for span in window.spans):
        verdict = "checkpoint, perhaps"
    return say(name, highest / MIB, "MiB", verdict, evidence, _LESS.get(verdict))


_LESS = {
    "optimizer": 'overlapkit.AdamW: moments="bf16" or "int8" take a half or a quarter of the memory of fp32',
    "checkpoint, perhaps": "Checkpointer: a save copies the state; in_flight=1 holds one copy at a time",
}


def _by_phase(detail: StepDetail) -> str:
    peaks = {phase: value for phase, value in (detail.peaks or {}).items() if not phase.startswith("between")}
    return "".join(f"{phase} {value / MIB:.0f}, " for phase, value in peaks.items())


def _place(peak: Peak) -> str:
    if peak.phase is None:
        return f"somewhere in steps {max(0, peak.step - 15)}..{peak.step}"
    if peak.phase == "outside":
        return f"before step {peak.step} began"
    phase = {"inside": "between the phases", "paused": "in a pause"}.get(peak.phase, f"in the {peak.phase}")
    return f"{phase} of step {peak.step}"
