"""The doctor's report: its lines, as text for a terminal, and as JSON; and the exit status that they mean."""

import io
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from overlapkit.counted import counted
from overlapkit.doctor.line import LAYERS, Line, spans


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `examine` found.

    Attributes:
        lines: By layer, bottom up.
        rank, world: Who examined; rank 0 has the lines of all ranks, every other one its own.
        figures: What was measured, for scripts: storage by rank, and what `link=True` measured.
        alone: Why this rank of a job did not reach rank 0; empty where it did.
    """

    lines: tuple[Line, ...]
    rank: int = 0
    world: int = 1
    figures: dict[str, Any] = field(default_factory=dict)
    alone: str = ""

    @property
    def weak(self) -> tuple[Line, ...]:
        """The lines to do something about."""
        return tuple(line for line in self.lines if line.state == "weak")

    @property
    def exit_status(self) -> int:
        """1 where a line is weak, else 0: what is absent or unknown changes nothing."""
        return 1 if self.weak else 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        counts = {state: sum(line.state == state for line in self.lines) for state in _MARKS}
        return {
            "rank": self.rank,
            "world": self.world,
            "counts": counts,
            "lines": [line.to_dict() for line in self.lines],
            "figures": self.figures,
        }

    def __str__(self) -> str:
        """The verdict, then a table."""
        return render(self, shutil.get_terminal_size().columns)


_MARKS = {"ok": "ok", "weak": "WEAK", "absent": "-", "unknown": "?"}


def render(diagnosis: Diagnosis, columns: int) -> str:
    """The verdict, and a table of the lines.

    Args:
        diagnosis: To be shown.
        columns: Of the terminal; 80 to 120 are used.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=io.StringIO(), width=min(120, max(80, columns)), color_system=None)
    console.print(verdict(diagnosis), highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("layer", "what", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("seen")
    before = ""
    for line in diagnosis.lines:
        layer = line.layer if line.layer != before else ""
        before = line.layer
        table.add_row(layer, Text(line.name), _MARKS[line.state], Text(_told(line, diagnosis)))
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(row.rstrip() for row in console.file.getvalue().splitlines()).rstrip()


def verdict(diagnosis: Diagnosis) -> str:
    """One sentence."""
    weak = diagnosis.weak
    unknown = sum(line.state == "unknown" for line in diagnosis.lines)
    dark = f"; {unknown} could not be read" if unknown else ""
    if not weak:
        return f"Nothing weak in {counted(len(diagnosis.lines), 'line')}{dark}."
    layers = [layer for layer in LAYERS if any(line.layer == layer for line in weak)]
    return f"{len(weak)} weak, the lowest in layer {layers[0]}: mend from the bottom up{dark}."


def _told(line: Line, diagnosis: Diagnosis) -> str:
    parts = [line.saw]
    if line.cost:
        parts.append(f"costs: {line.cost}")
    if line.remedy:
        parts.append(f"do: {line.remedy}")
    if where := _where(line, diagnosis.lines):
        parts[0] = f"[{where}] {parts[0]}"
    return "\n".join(parts)


def _where(line: Line, lines: Sequence[Line]) -> str:
    """Which ranks saw it, where that is not all of those who looked."""
    hosts = {other.host for other in lines if other.host}
    everyone = {rank for other in lines for rank in other.ranks}
    parts = [line.host] if line.host and len(hosts) > 1 else []
    if line.ranks and set(line.ranks) != everyone and len(everyone) > 1:
        parts.append(f"rank {spans(line.ranks)}")
    return ", ".join(parts)
