"""A picture of a report: a panel for each group of figures, a bar for each of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figure import Figure, short
from overlapkit.extras import require

_OURS, _OTHER, _GOAL = "#4477aa", "#cfd4da", "#d62728"
_NOTE = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
_COLUMNS = 2
_LOG_FROM = 30  # times the smallest value


def draw(path: Path, figures: Sequence[Figure], title: str) -> None:
    """Write the picture as a PNG."""
    picture(figures, title).savefig(path, format="png")


def picture(figures: Sequence[Figure], title: str) -> Any:
    """A matplotlib figure.

    Args:
        figures: Named "group, variant"; those of one group have one unit. Variants that begin with "ours"
            are strong. A line marks the goal of a figure that has one.
        title: Stands above all.
    """
    groups: dict[str, list[Figure]] = {}
    for figure in figures:
        groups.setdefault(figure.name.split(", ", 1)[0], []).append(figure)
    rows = -(-len(groups) // _COLUMNS)
    canvas = require("matplotlib.figure", "viz").Figure(
        figsize=(12, 2.4 * rows), dpi=110, layout="constrained"
    )
    panels = list(canvas.subplots(rows, _COLUMNS, squeeze=False).flat)
    for axes, (group, members) in zip(panels, groups.items(), strict=False):
        _panel(axes, group, members)
    for axes in panels[len(groups) :]:
        axes.set_axis_off()
    canvas.suptitle(title)
    return canvas


def _panel(axes: Any, group: str, members: Sequence[Figure]) -> None:
    labels = [figure.name.split(", ", 1)[1] for figure in members]
    values = [figure.value or 0.0 for figure in members]
    colors = [_OURS if label.startswith("ours") else _OTHER for label in labels]
    axes.barh(range(len(members)), values, color=colors)
    axes.set_yticks(range(len(members)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_title(f"{group}: {members[0].unit}, {members[0].better} is better", fontsize=9, loc="left")
    positive = [value for value in values if value > 0]
    if positive and max(positive) > _LOG_FROM * min(positive):
        axes.set_xscale("log")
    for row, figure in enumerate(members):
        goal = _bound(figure)
        if goal is not None:
            axes.plot([goal, goal], [row - 0.45, row + 0.45], color=_GOAL)
        axes.annotate(short(figure.value), (max(figure.value or 0, goal or 0), row), **_NOTE)
    axes.margins(x=0.15)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _bound(figure: Figure) -> float | None:
    if figure.ratio_limit is not None and figure.peer_value is not None:
        return figure.ratio_limit * figure.peer_value
    return figure.limit
