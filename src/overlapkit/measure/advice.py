"""Findings: what is exposed enough to matter, and the component and setting that would hide it."""

from dataclasses import dataclass

from overlapkit.measure.across.words import is_late, remedy
from overlapkit.measure.summary import Window

# Shares of a step. A wait below 2 % is what handing over costs; host work between the phases takes several
# percent of any small model's step; an optimizer cannot hide, and 10 % is where a faster one pays.
_NOTABLE = {
    "input": 0.02,
    "transfer": 0.02,
    "communication": 0.02,
    "checkpoint": 0.02,
    "other": 0.10,
    "optimizer": 0.10,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to mend.

    Attributes:
        lane: input, transfer, communication, checkpoint, optimizer or other.
        exposed_ms: Milliseconds a step.
        share: Of the period, 0 to 1.
        component: What to use or to change.
        setting: How.
        gain_ms: What that can save at most, milliseconds a step: the exposed time.
    """

    lane: str
    exposed_ms: float
    share: float
    component: str
    setting: str
    gain_ms: float

    @property
    def fix(self) -> str:
        """Component and setting in one line."""
        return f"{self.component}: {self.setting}"


def find(window: Window) -> tuple[Finding, ...]:
    """The findings of a window, the costliest first; none where all is well."""
    found = _late(window)
    for lane, notable in _NOTABLE.items():
        part = window.parts[lane]
        if part.mean_ms is None or part.share is None or part.share < notable:
            continue
        if lane == "other" and window.parts["forward"].mean_ms is None:
            continue  # it holds the compute as well then
        cost, share = part.mean_ms, part.share
        if lane == "communication" and found:  # a late rank was named: what would be left without it
            cost = max(0.0, cost - _waiting_ms(window))
            share *= cost / part.mean_ms
            if share < notable:
                continue
        found.append(Finding(lane, cost, share, *_FIXES[lane](window), cost))
    return tuple(sorted(found, key=lambda finding: -finding.exposed_ms))


def _late(window: Window) -> list[Finding]:
    """The rank that others wait for, on every rank alike."""
    ranks = window.ranks
    if isinstance(ranks, str) or not ranks.late or not is_late(ranks):
        return []
    cost = ranks.late_ms
    return [Finding("communication", cost, cost / ranks.period_ms, *remedy(ranks), cost)]


def _waiting_ms(window: Window) -> float:
    ranks = window.ranks
    return 0.0 if isinstance(ranks, str) or ranks.waiting_ms is None else ranks.waiting_ms


def is_notable(lane: str, share: float) -> bool:
    """Whether a share of the step is worth a finding."""
    return share >= _NOTABLE[lane]


def _input(window: Window) -> tuple[str, str]:
    if "loader" not in window.coverage.ours:
        return "overlapkit.DeviceLoader", "put it around the loader (depth=2): it reads ahead of the step"
    work, wait = window.work_ms("input"), window.parts["input"].mean_ms or 0.0
    if work is not None and work > (window.period_ms or 0.0) - wait:
        return (
            "the loader's source",
            f"raise num_workers=: it needs {work:.1f} ms a batch, more than the step",
        )
    return "DeviceLoader", "raise depth=: the source keeps up on average, but not with every batch"


def _transfer(window: Window) -> tuple[str, str]:
    if "loader" not in window.coverage.ours:
        return (
            "overlapkit.DeviceLoader",
            "put it around the loader: it copies from pinned memory, beside the step",
        )
    return "DeviceLoader", "raise depth=, so that copies start earlier"


def _communication(window: Window) -> tuple[str, str]:
    waits = window.waits("communication")
    gathers = sum(time for name, time in waits.items() if "all_gather" in name)
    buckets = sum(time for name, time in waits.items() if "all_reduce" in name)
    if buckets > sum(waits.values()) / 2:
        return "replicate", "try a smaller bucket_cap_mb=, so that less is left when backward ends"
    if gathers > sum(waits.values()) / 2:
        return "shard", "raise forward_prefetch= and backward_prefetch=, so that gathers start earlier"
    return "the loop", "reduce less often: a larger batch, or accumulation with one reduction"


def _checkpoint(window: Window) -> tuple[str, str]:
    waits = window.waits("checkpoint")
    previous = sum(time for name, time in waits.items() if "previous" in name)
    if previous > max(waits.values(), default=0) / 2:  # it lies inside the wait for the save as a whole
        return "Checkpointer", "saves come faster than they are written: raise every= or in_flight="
    return "Checkpointer", "raise every=, and keep stage='late'"


def _optimizer(window: Window) -> tuple[str, str]:
    if "optimizer" not in window.coverage.ours:
        return "overlapkit.AdamW", "in place of the optimizer: one fused step that clips as well"
    return "the loop", "step less often: a larger batch, or gradient accumulation"


def _other(window: Window) -> tuple[str, str]:
    outside, other = window.outside_ms or 0.0, window.parts["other"].mean_ms or 0.0
    if outside > other / 2 and window.parts["input"].mean_ms is None:
        return "StepMeter", "loop over meter.steps(loader), so that the wait for input can be told apart"
    if outside > other / 2:
        return "the loop", "work between the steps: make it rarer; evaluation belongs in meter.pause()"
    return "the loop", "host work inside the step: look for .item(), print and logging"


_FIXES = {
    "input": _input,
    "transfer": _transfer,
    "communication": _communication,
    "checkpoint": _checkpoint,
    "other": _other,
    "optimizer": _optimizer,
}
