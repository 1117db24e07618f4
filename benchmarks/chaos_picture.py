"""A picture of all runs: the losses as they were taken, with every fault marked."""

from collections.abc import Sequence
from pathlib import Path

from chaos_plan import KINDS
from chaos_run import Outcome
from overlapkit.extras import require

_MARKS = "ovs^DPX*<>hpd8|_"


def draw(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write the picture as a PNG: steps in the order in which they were taken, one run after the other."""
    figure = require("matplotlib.figure", "viz").Figure(figsize=(14, 6), dpi=110, layout="constrained")
    axes = figure.subplots()
    begin = 0
    points: dict[str, list[tuple[int, float]]] = {kind: [] for kind in KINDS}
    for outcome in outcomes:
        taken = [one for life in outcome.lives for one in life.ranks.get(0, ()) if one["kind"] == "step"]
        losses = [float.fromhex(one["loss"]) for one in taken]
        axes.plot(range(begin, begin + len(losses)), losses, color="#9aa5b1", linewidth=0.7)
        times = [one["t"] for one in taken]
        for event in outcome.events:
            at = max(0, sum(t < event.t for t in times) - 1)
            points[event.kind].append((begin + at, losses[at] if losses else 0.0))
        begin += len(losses)
        axes.axvline(begin, color="#e3e7eb", linewidth=0.7, zorder=0)
    for (kind, found), mark in zip(points.items(), _MARKS, strict=True):
        if found:
            label = f"{KINDS[kind]}: {len(found)}"
            axes.scatter(*zip(*found, strict=True), marker=mark, s=30, label=label, zorder=3)
    axes.set_xlabel("steps in the order in which they were taken; a line ends a run")
    axes.set_ylabel("loss of rank 0, nats a byte")
    axes.margins(x=0.01)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path, format="png")
