"""What a trace shows to be worth mending, and how."""

from overlapkit.measure.advice import Finding, is_notable
from overlapkit.measure.traces.arrivals import Arrivals
from overlapkit.measure.traces.summary import Summary

Fix = tuple[str, str]


def find(summary: Summary) -> tuple[Finding, ...]:
    """The findings, the costliest first; none where all is well."""
    copies = summary.copies_ms()
    costs: dict[str, tuple[float | None, Fix]] = {
        "input": (summary.parts["input"].mean_ms, _input()),
        "transfer": (copies and copies[1], _transfer(summary)),
        "communication": (summary.parts["communication"].mean_ms, _communication(summary)),
        "other": (summary.idle_ms, _idle(summary)),
        "optimizer": (summary.parts["optimizer"].mean_ms, _optimizer()),
    }
    found = []
    for lane, (cost_ms, (component, setting)) in costs.items():
        if cost_ms is not None and is_notable(lane, share := summary.share(cost_ms)):
            found.append(Finding(lane, cost_ms, share, component, setting, cost_ms))
    return tuple(sorted(found, key=lambda finding: -finding.exposed_ms))


def _input() -> Fix:
    return "overlapkit.DeviceLoader", "put it around the loader (depth=2): it reads ahead of the step"


def _transfer(summary: Summary) -> Fix:
    copies = summary.copies_ms()
    if copies and copies[2] > copies[0] / 2:
        return (
            "overlapkit.DeviceLoader",
            "put it around the loader: copies from pageable memory hold up the host and hide behind nothing",
        )
    return "overlapkit.DeviceLoader", "put it around the loader: it copies ahead, on a stream of its own"


def _communication(summary: Summary) -> Fix:
    arrivals, exposed = summary.detail.arrivals, summary.parts["communication"].mean_ms or 0.0
    waited = summary.waited_ms()
    if isinstance(arrivals, Arrivals) and waited is not None and waited > exposed / 2:
        late = arrivals.straggler
        return (
            f"rank {late.rank}",
            f"it arrives last at {late.last} of {late.shared} collectives: look at its input and its host",
        )
    tail = summary.tail_ms()
    if tail is not None and tail[0] < exposed / 2 and summary.idle_ms > exposed:
        return "the loop", "feed the device first: most of it was exposed where nothing was there to hide it"
    kinds = [bucket.kind.lower() for step in summary.steps for bucket in step.buckets]
    if any("scatter" in kind for kind in kinds):
        return "shard", "raise forward_prefetch= and backward_prefetch=, so that gathers start earlier"
    if kinds:
        return "replicate", "try a smaller bucket_cap_mb=, so that less is left when backward ends"
    return "the loop", "communicate less often, or launch it where computation follows that needs none of it"


def _idle(summary: Summary) -> Fix:
    if all(one.device is None for one in summary.detail.ranks):
        return "the loop", "host work between the operators: look for print, logging and locks"
    if summary.host_wait_ms > summary.idle_ms / 2:
        return (
            "the loop",
            "the host launches too late: torch.compile, CUDA graphs, larger batches, no .item() in a step",
        )
    return "the loop", "the device waits for its own streams: look for events and synchronisations"


def _optimizer() -> Fix:
    return "overlapkit.AdamW", "in place of the optimizer: one fused step that clips as well"
