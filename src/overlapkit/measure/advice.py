"""Findings: what is exposed enough to matter, and the component and setting that would hide it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from overlapkit.measure.across.words import is_late, remedy
from overlapkit.measure.detail import StepDetail
from overlapkit.measure.operators import Product
from overlapkit.measure.summary import Window
from overlapkit.measure.wasted import find_waste

# Shares of a step. A wait below 2 % is what handing over costs; host work between the phases takes several
# percent of any small model's step; an optimizer cannot hide, and 10 % is where a faster one pays.
_NOTABLE = {
    "input": 0.02,
    "transfer": 0.02,
    "communication": 0.02,
    "checkpoint": 0.02,
    "compilation": 0.02,
    "compute": 0.02,
    "garbage": 0.02,
    "other": 0.10,
    "optimizer": 0.10,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to mend.

    Attributes:
        lane: input, transfer, communication, checkpoint, optimizer, compute (shapes and dtypes),
            compilation, garbage or other.
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


def find(
    window: Window, detail: StepDetail | None = None, products: Mapping[Product, int] | None = None
) -> tuple[Finding, ...]:
    """The findings of a window, the costliest first; none where all is well.

    Args:
        window: The steps.
        detail: What lies within their parts.
        products: FLOPs of a step's matrix products, by shape.
    """
    detail = detail or StepDetail()
    late = _late(window)
    found = list(late)
    left = _transfer_ms(window)  # no bucket or prefetch mends what was waited for a late rank
    for lane, fix in _FIXES.items():
        cost = _cost_ms(lane, window, detail)
        if lane == "communication" and left is not None:
            cost = min(cost, left)
            if late and cost < late[0].exposed_ms / 5:  # measured in its shadow: mend that first
                continue
        share = cost / window.period_ms if window.period_ms else 0.0
        if share >= _NOTABLE[lane]:
            found.append(Finding(lane, cost, share, *fix(window, detail), cost))
    found += _compute(window, products or {})
    return tuple(sorted(found, key=lambda finding: -finding.exposed_ms))


def _cost_ms(lane: str, window: Window, detail: StepDetail) -> float:
    """What a lane costs a step, as far as it is known."""
    if lane == "other" and window.parts["forward"].mean_ms is None:
        return 0.0  # it holds the compute as well then
    if lane == "checkpoint" and _slows_down(detail):
        assert detail.checkpoint is not None
        return detail.checkpoint.amortised_ms
    return window.parts[lane].mean_ms or 0.0


def _slows_down(detail: StepDetail) -> bool:
    """Whether a save costs more beside the step than in it; a smaller slowdown may be chance."""
    cost = detail.checkpoint
    return cost is not None and (cost.slowdown_ms or 0.0) > cost.stall_ms


def _compute(window: Window, products: Mapping[Product, int]) -> list[Finding]:
    """Of a GPU only: of which arithmetic a CPU is good at is not known here."""
    device, period = window.coverage.device, window.period_ms
    compute = _compute_ms(window)
    if device.type != "cuda" or not products or not compute or not period:
        return []
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    found = []
    for waste in find_waste(products, name, capability):
        cost = compute * waste.share * waste.saved
        if is_notable("compute", cost / period):
            found.append(Finding("compute", cost, cost / period, waste.component, waste.setting, cost))
    return found


def _compute_ms(window: Window) -> float:
    return sum(window.parts[part].mean_ms or 0.0 for part in ("forward", "backward"))


def _late(window: Window) -> list[Finding]:
    """The rank that others wait for, on every rank alike."""
    ranks = window.ranks
    if isinstance(ranks, str) or not ranks.late or not is_late(ranks):
        return []
    cost, fix = ranks.explained_ms, remedy(ranks, window.coverage.device)
    return [Finding("communication", cost, cost / ranks.period_ms, *fix, cost)]


def _transfer_ms(window: Window) -> float | None:
    return None if isinstance(window.ranks, str) else window.ranks.transfer_ms


def is_notable(lane: str, share: float) -> bool:
    """Whether a share of the step is worth a finding."""
    return share >= _NOTABLE[lane]


def _input(window: Window, detail: StepDetail) -> tuple[str, str]:
    if "loader" not in window.coverage.ours:
        return "overlapkit.DeviceLoader", "put it around the loader (depth=2): it reads ahead of the step"
    work, wait = window.work_ms("input"), window.parts["input"].mean_ms or 0.0
    if work is not None and work > (window.period_ms or 0.0) - wait:
        return (
            "the loader's source",
            f"raise num_workers=: it needs {work:.1f} ms a batch, more than the step",
        )
    return "DeviceLoader", "raise depth=: the source keeps up on average, but not with every batch"


def _transfer(window: Window, detail: StepDetail) -> tuple[str, str]:
    if "loader" not in window.coverage.ours:
        return (
            "overlapkit.DeviceLoader",
            "put it around the loader: it copies from pinned memory, beside the step",
        )
    return "DeviceLoader", "raise depth=, so that copies start earlier"


def _communication(window: Window, detail: StepDetail) -> tuple[str, str]:
    compute, exposed = _compute_ms(window), window.parts["communication"].mean_ms or 0.0
    work, late = window.communicating_ms(), bool(_late(window))
    if work is not None and compute and work > compute and not late:
        grown = (compute + exposed) / compute
        enough = (
            f"{grown:.1f} times as many" if window.tokens is None else f"{window.tokens * grown:,.0f} tokens"
        )
        return (
            "the batch",
            f"too small to hide {work:.1f} ms of communication behind {compute:.1f} ms of compute: it breaks "
            f"even at {enough} a rank between two reductions (a larger batch, accumulate)",
        )
    waits = window.waits("communication")
    gathers = sum(time for name, time in waits.items() if "all_gather" in name)
    buckets = sum(time for name, time in waits.items() if name == "all_reduce tail")
    if buckets > sum(waits.values()) / 2:
        return "replicate", "try a smaller bucket_cap_mb=, so that less is left when backward ends"
    if gathers > sum(waits.values()) / 2:
        return "shard", "raise forward_prefetch= and backward_prefetch=, so that gathers start earlier"
    return "the loop", "reduce less often: a larger batch, or accumulation with one reduction"


def _checkpoint(window: Window, detail: StepDetail) -> tuple[str, str]:
    cost = detail.checkpoint
    if cost is not None and _slows_down(detail):
        return (
            "Checkpointer",
            f"raise every=: the steps beside a save are {cost.slowdown_ms:.1f} ms longer in all, so it takes "
            "cores, or storage, that they need",
        )
    waits = window.waits("checkpoint")
    previous = sum(time for name, time in waits.items() if "previous" in name)
    if previous > max(waits.values(), default=0) / 2:  # it lies inside the wait for the save as a whole
        return "Checkpointer", "saves come faster than they are written: raise every= or in_flight="
    return "Checkpointer", "raise every=, and keep stage='late'"


def _optimizer(window: Window, detail: StepDetail) -> tuple[str, str]:
    if "optimizer" not in window.coverage.ours:
        return "overlapkit.AdamW", "in place of the optimizer: one fused step that clips as well"
    return "the loop", "step less often: a larger batch, or gradient accumulation"


def _compilation(window: Window, detail: StepDetail) -> tuple[str, str]:
    if not detail.compilations:
        return "torch.compile", "something was compiled in these steps: warm up before them"
    worst = detail.compilations[0]
    return (
        "torch.compile",
        f"{worst.name} ({worst.where}) was compiled in step(s) {', '.join(map(str, worst.steps))}"
        f"{'' if worst.reason is None else f': {worst.reason}'}; keep its shapes, or mark_dynamic them",
    )


def _garbage(window: Window, detail: StepDetail) -> tuple[str, str]:
    return "overlapkit.collect_garbage", "every=1000, say: on all ranks in the same step, and rarely"


def _other(window: Window, detail: StepDetail) -> tuple[str, str]:
    outside, other = window.outside_ms or 0.0, window.parts["other"].mean_ms or 0.0
    if outside > other / 2 and window.parts["input"].mean_ms is None:
        return "StepMeter", "loop over meter.steps(loader), so that the wait for input can be told apart"
    if outside > other / 2:
        return "the loop", "work between the steps: make it rarer; evaluation belongs in meter.pause()"
    if detail.syncs:
        worst = detail.syncs[0]
        return (
            "meter.log",
            f"in place of what waits for the device at {worst.where} ({worst.operator}, {worst.a_step:.0f} "
            "times a step)",
        )
    return "the loop", "host work inside the step: look for .item(), print and logging"


_FIXES = {
    "input": _input,
    "transfer": _transfer,
    "communication": _communication,
    "checkpoint": _checkpoint,
    "compilation": _compilation,
    "garbage": _garbage,
    "other": _other,
    "optimizer": _optimizer,
}
