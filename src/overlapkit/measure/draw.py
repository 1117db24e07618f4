"""The picture of the last few steps: one row a lane, what was hidden pale, what was exposed strong."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from overlapkit.extras import require
from overlapkit.measure.intervals import Interval, intersect, subtract, union
from overlapkit.measure.ledger import Trace
from overlapkit.span import Span

LANES = ("input", "transfer", "compute", "communication", "optimizer", "checkpoint")

_COLORS = {
    "forward": "#4477aa",
    "loss": "#4477aa",
    "backward": "#66a5cc",
    "optimizer": "#228833",
    "beside the step": "#cfd4da",
    "exposed": "#d62728",
}
_NOTE = {"ha": "center", "va": "center", "fontsize": 8, "color": "#777777", "style": "italic"}
_READY = "bucket ready"
_MARK = {"linestyle": "none", "marker": 7, "markersize": 5, "color": "#111111"}  # 7: a caret that points down
_LABELLED = 0.09  # share of the width below which a step's name would run into the next one's
_LEGEND = ("forward", "backward", "optimizer", "beside the step", "exposed")


def save_drawing(
    path: str | PathLike[str], traces: Sequence[Trace], spans: Sequence[Span], notes: Mapping[str, str]
) -> None:
    """Write the PNG, on a figure of its own: the user's pyplot and backend are left alone.

    Args:
        path: Where to.
        traces: Steps, at least one.
        spans: What components published around them.
        notes: What to write into the row of a lane that was not measured.
    """
    figure = require("matplotlib.figure", "viz").Figure(figsize=(11, 3.8), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    traces = _consecutive(traces)
    start, end = traces[0].segments[0].start, traces[-1].segments[-1].end
    view = [(start, end)]
    lanes = [*LANES, *(["garbage"] if any(trace.waits.get("garbage") for trace in traces) else [])]
    rows = [(lane, kind, parts) for lane in lanes for kind, parts in _row(lane, traces, spans)]
    for lane, kind, parts in rows:
        _bars(axes, lanes.index(lane), intersect(union(parts), view), start, kind)
    ready = [
        (span.ready - start) / 1e6 for span in spans if span.ready is not None and start <= span.ready <= end
    ]
    axes.plot(ready, [LANES.index("communication") - 0.42] * len(ready), label=_READY, **_MARK)
    _frame(axes, lanes, traces, start, end)
    for lane, note in notes.items():
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text((end - start) / 2e6, LANES.index(lane), note, bbox=box, **_NOTE)
    _legend(axes, marks=bool(ready))
    figure.savefig(path, format="png")


def _consecutive(traces: Sequence[Trace]) -> Sequence[Trace]:
    """The latest steps with none missing between them (`every` skips some, so do exceptions)."""
    first = len(traces) - 1
    while first > 0 and traces[first - 1].segments[-1].end == traces[first].segments[0].start:
        first -= 1
    return traces[first:]


def _row(lane: str, traces: Sequence[Trace], spans: Sequence[Span]) -> list[tuple[str, list[Interval]]]:
    """What a lane's row shows, the lowest layer first."""
    beside = [(span.start, span.end) for span in spans if span.lane == lane]
    layers: list[tuple[str, list[Interval]]] = [("beside the step", beside)]
    waits = union(wait for trace in traces for lane_waits in trace.waits.values() for wait in lane_waits)
    kinds = {"compute": ("forward", "loss", "backward"), "optimizer": ("optimizer",)}.get(lane, ())
    for kind in kinds:
        phases = union((s.start, s.end) for trace in traces for s in trace.segments if s.kind == kind)
        layers.append((kind, subtract(phases, waits)))
    layers.append(("exposed", [wait for trace in traces for wait in trace.waits.get(lane, [])]))
    return layers


def _bars(axes: Any, row: int, parts: Sequence[Interval], zero: int, kind: str) -> None:
    bars = [((start - zero) / 1e6, (end - start) / 1e6) for start, end in parts]
    height = 0.3 if kind == "beside the step" else 0.7
    color = _COLORS[kind]  # of the edge, too: a bar is seen however short it is
    axes.broken_barh(bars, (row - height / 2, height), facecolors=color, edgecolor=color, linewidth=0.8)


def _frame(axes: Any, lanes: Sequence[str], traces: Sequence[Trace], start: int, end: int) -> None:
    axes.set_xlim(0, (end - start) / 1e6)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_xlabel("ms")
    axes.tick_params(axis="y", length=0)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#eeeeee")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for part in (part for trace in traces for part in trace.segments if part.kind == "paused"):
        axes.axvspan((part.start - start) / 1e6, (part.end - start) / 1e6, facecolor="#eeeeee", hatch="//")
    for trace in traces:
        left, right = ((time - start) / 1e6 for time in (trace.segments[0].start, trace.segments[-1].end))
        axes.axvline(right, color="#333333", linewidth=0.8, linestyle=(0, (4, 3)))
        if (right - left) * 1e6 < _LABELLED * (end - start):
            continue
        axes.annotate(
            f"step {trace.index}: {right - left:.1f} ms",
            ((left + right) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )


def _legend(axes: Any, *, marks: bool) -> None:
    patch = require("matplotlib.patches", "viz").Patch
    handles = [patch(color=_COLORS[kind], label=kind) for kind in _LEGEND]
    handles += axes.lines[:1] if marks else []
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(handles), frameon=False
    )
