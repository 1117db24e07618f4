"""`scale`: one model's step over numbers of ranks, as a table and a picture."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from overlapkit.extras import require
from overlapkit.plan.costs import Profile
from overlapkit.plan.links import Link
from overlapkit.plan.simulation import SimulatedReport, simulate

_GIB = 2**30


@dataclass(frozen=True)
class Scaling:
    """Simulated steps, one for each number of ranks; `print` shows a table."""

    reports: tuple[SimulatedReport, ...]

    def rows(self) -> list[dict[str, Any]]:
        """For each number of ranks: step, exposed time, throughput, memory, break-even and goodput."""
        return [
            {
                "ranks": report.world,
                "step_ms": report.period_ms,
                "exposed_ms": report.parts["communication"].mean_ms,
                "exposed_share": report.exposed_share,
                "tokens_per_s_per_rank": report.tokens_per_s,
                "memory_bytes": report.peak_memory,
                "break_even_tokens": report.break_even_tokens,
                "goodput": report.goodput,
                "save_interval_s": report.save_interval_s,
            }
            for report in self.reports
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: the rows, what went in, and what was taken for granted."""
        first = self.reports[0]
        return {"rows": self.rows(), "inputs": first.inputs, "assumptions": list(first.assumptions)}

    def __str__(self) -> str:
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        titles = ("ranks", "step ms", "exposed ms", "share", "tokens/s a rank", "GiB", "break-even tokens")
        failing = self.reports[0].goodput is not None
        for title in (*titles, *(("goodput", "save every s") if failing else ())):
            table.add_column(title, justify="right")
        for row in self.rows():
            cells = [
                f"{row['ranks']:,}",
                f"{row['step_ms']:,.1f}",
                f"{row['exposed_ms']:,.1f}",
                f"{row['exposed_share']:.1%}",
                _or_dash(row["tokens_per_s_per_rank"], "{:,.0f}"),
                f"{row['memory_bytes'] / _GIB:.2f}",
                _or_dash(row["break_even_tokens"], "{:,}"),
            ]
            if failing:
                cells += [f"{row['goodput']:.1%}", f"{row['save_interval_s']:,.0f}"]
            table.add_row(*cells)
        text = io.StringIO()
        Console(file=text, width=120, force_terminal=False, color_system=None).print(table)
        lines = [line.rstrip() for line in text.getvalue().strip("\n").splitlines()]
        lines += ["", "from:", *(f"  {name}: {what}" for name, what in self.reports[0].inputs.items())]
        lines += ["taken for granted:", *(f"  {one}" for one in self.reports[0].assumptions)]
        return "\n".join(lines)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw step time and exposed share against the number of ranks, as PNG.

        Raises:
            ImportError: matplotlib is missing (the extra viz).
        """
        figure = require("matplotlib.figure", "viz").Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
        step = figure.add_subplot()
        ranks = [row["ranks"] for row in self.rows()]
        hidden = [row["step_ms"] - row["exposed_ms"] for row in self.rows()]
        step.plot(ranks, [row["step_ms"] for row in self.rows()], "o-", color="#4477aa", label="step")
        step.plot(ranks, hidden, "--", color="#66a5cc", label="without exposed communication")
        step.set_xscale("log", base=2)
        step.set_xticks(ranks, [f"{each:,}" for each in ranks], rotation=45)
        step.set(xlabel="ranks", ylabel="ms a step", ylim=(0, None))
        share = step.twinx()
        exposed = [100 * row["exposed_share"] for row in self.rows()]
        share.plot(ranks, exposed, "s-", color="#d62728", label="exposed share")
        share.set(ylabel="exposed, % of the step", ylim=(0, max(5.0, *(1.2 * each for each in exposed))))
        lines = [*step.get_lines(), *share.get_lines()]
        step.legend(lines, [line.get_label() for line in lines], loc="upper left", fontsize=8)
        figure.savefig(path, format="png")


def scale(profile: Profile, link: Link, worlds: Sequence[int], **options: Any) -> Scaling:
    """Simulate a step at each number of ranks.

    Args:
        profile: See `simulate`.
        link: See `simulate`.
        worlds: Numbers of ranks, one or more.
        options: Of `simulate`.

    Raises:
        ValueError: `worlds` is empty; and as of `simulate`.
    """
    if not worlds:
        raise ValueError("worlds is empty: give one number of ranks or more")
    return Scaling(tuple(simulate(profile, link, world, **options) for world in worlds))


def _or_dash(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)
