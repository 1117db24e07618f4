"""What the comparison of ranks says, in words: the verdict on arrival, the split of the tail, the remedy."""

import torch

from overlapkit.counted import counted
from overlapkit.measure.across.ranks import LateRank, Ranks

_REMEDY = {
    "forward": "it computes longer in forward",
    "backward": "it computes longer in backward",
    "optimizer": "its optimizer takes longer",
    "input": "its batches come late: look at its storage and its loader's workers",
    "transfer": "its copies to the device are slow: look at its host memory and PCIe link",
    "checkpoint": "its saves hold it up: look at its storage",
    "compilation": "torch.compile compiles there: report.detail.compilations says what, and why again",
    "garbage": "Python's garbage collector runs there: overlapkit.collect_garbage(every=...) collects on all "
    "ranks at the same step",
    "other": "its host does more between the phases: look for logging, metrics or saving on this rank alone",
}
_NOTABLE = 0.05
_NAMED = 4  # of ranks that are late in turn


def together(ranks: Ranks) -> tuple[float, str, str]:
    """Answer 5: milliseconds a step that lateness costs, the verdict, the evidence."""
    cost, share = ranks.late_ms, _share(ranks, ranks.late_ms)
    seen = counted(ranks.steps, "step")
    seen += f", {counted(ranks.collectives, 'collective')}" if ranks.collectives else ""
    if ranks.mismatches:
        return cost, "no, collectives differ", str(ranks.mismatches[0])
    number = f"{cost:.2f} ms, {share:.1%}"
    if not ranks.late:
        evidence = f"no rank was late in {seen}"
    elif ranks.rotating:
        evidence = f"the latest rank changes from step to step: {_listed(ranks.late)} ({seen})"
    else:
        evidence = f"{_listed(ranks.late)} ({seen})"
    if ranks.missing:
        evidence += f"; nothing came from rank {', '.join(map(str, ranks.missing))}"
    if ranks.unseen:
        evidence += f"; {ranks.unseen}"
    if share < _NOTABLE:
        return cost, f"yes ({number})", evidence
    if not is_late(ranks):
        evidence += "; nothing that these ranks do explains it: the network, or other work on their hosts"
    return cost, f"no, {number}", evidence


def tail_split(ranks: Ranks) -> str | None:
    """For answer 6: exposed communication as transfer and as waiting for a late rank."""
    if ranks.transfer_ms is None or ranks.waiting_ms is None:
        return None
    waiting = f"{ranks.waiting_ms:.2f} ms waiting for a late rank"
    return f"{ranks.transfer_ms:.2f} ms transfer, " + waiting + " (mean of ranks)"


def is_late(ranks: Ranks) -> bool:
    """Whether lateness is worth a finding: from 5 % of a step, for somebody is always the last."""
    return _share(ranks, ranks.explained_ms) >= _NOTABLE


def unexplained(ranks: Ranks) -> str | None:
    """What keeps ranks apart without a finding, in a sentence; None where nothing does."""
    if ranks.mismatches:
        return f"Collectives differ between ranks: {ranks.mismatches[0]}."
    share = _share(ranks, ranks.late_ms)
    if share < _NOTABLE:
        return None
    return (
        f"Ranks wait for each other for {ranks.late_ms:.1f} ms, {share:.0%} of a step of "
        f"{ranks.period_ms:.1f} ms, and nothing that they do explains it: look at the network and the hosts."
    )


def remedy(ranks: Ranks, device: torch.device) -> tuple[str, str]:
    """Who to look at, and for what, where ranks compute on such devices."""
    first = ranks.explained[0]
    phases = [one.phase for one in ranks.explained]
    if not ranks.rotating or len(ranks.explained) == 1:  # one alone is late in no turn
        return f"rank {first.rank}", _remedy(first, device)
    common = max(set(phases), key=phases.count)
    more = len(ranks.explained) - _NAMED
    who = "ranks " + ", ".join(str(one.rank) for one in ranks.explained[:_NAMED])
    who += f" and {more} more" if more > 0 else ""
    if common == "garbage":
        return who, f"in turn: {_REMEDY['garbage']}"
    where = "" if common is None else f", in {common}"
    return (
        who,
        f"late in turn{where}: work is uneven from step to step: balance what a batch holds on each rank",
    )


def _remedy(late: LateRank, device: torch.device) -> str:
    if late.phase is None:
        return f"others wait for it{f' at {late.at}' if late.at else ''}: look at its host and its batch"
    return _REMEDY[late.phase] + (_compare(device) if late.phase in ("forward", "backward") else "")


def _compare(device: torch.device) -> str:
    if device.type == "cpu":
        return ": compare its batch (longer samples) and its host (cores, their clocks, other work)"
    command = "rocm-smi" if torch.version.hip else "nvidia-smi -q -d PERFORMANCE"
    return f": compare its batch (longer samples), its GPU's clocks ({command}) and its host"


def _listed(late: tuple[LateRank, ...]) -> str:
    shown = "; ".join(str(one) for one in late[:3])
    return shown + (f"; and {len(late) - 3} more" if len(late) > 3 else "")


def _share(ranks: Ranks, part_ms: float) -> float:
    return part_ms / ranks.period_ms if ranks.period_ms else 0.0
