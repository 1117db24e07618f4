"""One number of a benchmark's report: its unit, its peer, its goal, and whether the goal is met."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One number of a report.

    Args:
        name: What was measured; unique in its report.
        value: The number, or None where it could not be measured (never 0, never NaN).
        unit: Its unit, e.g. "ms", "GB/s", "%".
        better: Which direction is better; None for a figure that only informs.
        peer: The name of what it is compared with.
        peer_value: The peer's number, same unit. `ratio` is value / peer_value.
        limit: Goal: the value is at most this (better="lower") or at least this (better="higher").
        ratio_limit: The same for the ratio to the peer.
        spread: Quartiles of the value.

    Raises:
        ValueError: A goal without a direction, a ratio without a peer, or a number that is not finite.
    """

    name: str
    value: float | None
    unit: str
    better: Literal["lower", "higher"] | None = None
    peer: str | None = None
    peer_value: float | None = None
    limit: float | None = None
    ratio_limit: float | None = None
    spread: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.better not in (None, "lower", "higher"):
            raise ValueError(f"{self.name}: better={self.better!r}: it is 'lower', 'higher' or None")
        if self.better is None and (self.limit is not None or self.ratio_limit is not None):
            raise ValueError(f"{self.name}: a goal needs a direction: pass better='lower' or 'higher'")
        if self.peer is None and (self.peer_value is not None or self.ratio_limit is not None):
            raise ValueError(f"{self.name}: peer_value and ratio_limit need the peer's name: pass peer=")
        for key in ("value", "peer_value", "limit", "ratio_limit"):
            number = getattr(self, key)
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{self.name}: {key}={number}: pass None for what was not measured")

    @property
    def ratio(self) -> float | None:
        """Value over the peer's value; None where either is missing or the peer's is 0."""
        if self.value is None or not self.peer_value:
            return None
        return self.value / self.peer_value

    @property
    def goal(self) -> str | None:
        """The goal in words, or None where there is none."""
        sign = "<=" if self.better == "lower" else ">="
        parts = []
        if self.limit is not None:
            parts.append(f"{sign} {self.limit:g} {self.unit}")
        if self.ratio_limit is not None:
            parts.append(f"{sign} {self.ratio_limit:g} x {self.peer}")
        return ", ".join(parts) or None

    @property
    def met(self) -> bool | None:
        """Whether every goal is met; None where there is none. What was not measured is not met."""
        if self.goal is None:
            return None
        bounds = [] if self.limit is None else [self.limit]
        if self.ratio_limit is not None:
            if self.peer_value is None:
                return False
            bounds.append(self.ratio_limit * self.peer_value)  # a product: the peer's value may be 0
        return self.value is not None and all(self._reaches(self.value, bound) for bound in bounds)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "better": self.better,
            "spread": self.spread,
            "peer": self.peer,
            "peer_value": self.peer_value,
            "ratio": self.ratio,
            "goal": self.goal,
            "met": self.met,
        }

    def _reaches(self, value: float, bound: float) -> bool:
        return value <= bound if self.better == "lower" else value >= bound


def figure_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """A table of figures in their JSON form."""
    table = Table(title=title, title_justify="left")
    for heading in ("figure", "median", "quartiles", "peer", "ratio", "goal", ""):
        table.add_column(heading, justify="right" if heading in ("median", "quartiles", "ratio") else "left")
    for row in rows:
        spread = "" if row["spread"] is None else " .. ".join(short(end) for end in row["spread"])
        peer = "" if row["peer"] is None else f"{row['peer']} {short(row['peer_value'], row['unit'])}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        verdict = {None: "", True: "[green]met", False: "[red]MISSED"}[row["met"]]
        table.add_row(
            row["name"], short(row["value"], row["unit"]), spread, peer, ratio, row["goal"] or "", verdict
        )
    return table


def short(value: float | None, unit: str = "") -> str:
    """A number to three digits."""
    if value is None:
        return "not measured"
    digits = max(0, 3 - len(str(int(abs(value))))) if abs(value) >= 1 else 4
    return f"{value:,.{digits}f} {unit}".rstrip()
