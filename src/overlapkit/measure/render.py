"""A StepReport as text for a terminal of 80 columns or more."""

import io
import shutil
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from overlapkit.measure.across.table import ranks_table
from overlapkit.measure.across.words import unexplained
from overlapkit.measure.render_detail import detail_table
from overlapkit.measure.traces.tables import lanes_table

if TYPE_CHECKING:
    from overlapkit.measure.report import StepReport

_BAR = 20  # characters of a bar that stands for the whole step
_NAMES = {
    "compilation": "Compiling",
    "compute": "Arithmetic that the device is slow at",
    "garbage": "Python's garbage collector",
    "optimizer": "The optimizer",
    "other": "Other host work",
}
_RARE = ("compilation", "garbage")  # parts that are shown only where they took time


def sentence(report: "StepReport") -> str:
    """The verdict: what costs most, and what to do about it."""
    if report.period_ms is None:
        return "No step has been measured yet."
    step = f"a {'step' if _has_steps(report) else 'trace'} of {report.period_ms:.1f} ms"
    if not report.findings and report.ranks is not None and (apart := unexplained(report.ranks)):
        return apart
    if not report.findings:
        unknown = [name for name, part in report.parts.items() if part.mean_ms is None]
        waits = "" if report.exposed_share is None else f"; {report.exposed_share:.1%} was spent waiting"
        partial = f" (not measured: {', '.join(unknown)})" if unknown else ""
        return f"Healthy: {step} hides what was measured{waits}{partial}."
    worst = report.findings[0]
    of_trace = report.trace is not None and report.traced_step is None
    idle = worst.lane == "other" and of_trace and report.device != "cpu"
    name = "An idle device" if idle else _NAMES.get(worst.lane, f"Waiting for {worst.lane}")
    return f"{name} costs {worst.exposed_ms:.1f} ms, {worst.share:.0%} of {step}; see {worst.component}."


def render(report: "StepReport") -> str:
    """The verdict, where the time went, the seven answers, the fixes."""
    console = Console(
        file=io.StringIO(), width=max(80, min(100, shutil.get_terminal_size().columns)), color_system=None
    )
    console.print(sentence(report), highlight=False, markup=False)
    if report.period_ms is not None:
        console.print(_heading(report), highlight=False, markup=False)
        console.print(_parts(report))
    if report.ranks is not None and report.ranks.parts:
        console.print(ranks_table(report.ranks))
    if report.trace is not None:
        console.print(lanes_table(report.trace))
    if report.detail is not None and report.period_ms is not None:
        console.print(detail_table(report.detail))
    console.print(_answers(report))
    if report.findings:
        console.print(_fixes(report))
    assert isinstance(console.file, io.StringIO)
    text = "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
    return text.replace("\n\n\n", "\n\n").rstrip()


def _has_steps(report: "StepReport") -> bool:
    return report.trace is None or report.first_step is not None


def _heading(report: "StepReport") -> str:
    several = report.trace is not None and len(report.trace.ranks) > 1
    facts = [
        f"steps {report.first_step}..{report.last_step}" if _has_steps(report) else "no steps",
        "mean of all ranks read" if several else f"rank {report.rank} of {report.world}",
        report.device,
    ]
    if report.tokens_per_s is not None:
        facts.append(f"{report.tokens_per_s:,.0f} tokens/s")
    if report.detail is not None and report.detail.mfu is not None:
        facts.append(f"MFU {report.detail.mfu:.1%}")
    if report.peak_memory is not None:
        facts.append(f"peak {report.peak_memory / 2**20:,.0f} MiB")
    if report.traced_step is not None:
        facts.append(f"traced step {report.traced_step}")
    if report.trace_note is not None:
        facts.append(report.trace_note)
    return " · ".join(facts)


def _parts(report: "StepReport") -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("part", no_wrap=True)
    for name in ("ms", "share", "worst", "MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for name, part in report.parts.items():
        if name in _RARE and not part.mean_ms:
            continue
        moved = "" if part.bytes is None else f"{part.bytes / 2**20:.1f}"
        if part.mean_ms is None or part.share is None:
            table.add_row(name, "-", "-", "-", moved, Text(part.reason or ""))
        else:
            bar = "━" * round(part.share * _BAR)
            table.add_row(
                name, f"{part.mean_ms:.2f}", f"{part.share:.1%}", f"{part.worst_ms:.2f}", moved, bar
            )
    return table


def _answers(report: "StepReport") -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("question", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("evidence")
    for number, one in enumerate(report.answers, 1):
        verdict = f"{one.verdict} ({one.value:,.0f} MiB)" if one.unit == "MiB" and one.value else one.verdict
        table.add_row(f"{number} {one.name}", verdict, Text(one.evidence))
    return table


def _fixes(report: "StepReport") -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("to mend", no_wrap=True)
    table.add_column("saves at most", justify="right", no_wrap=True)
    table.add_column("how")
    for finding in report.findings:
        table.add_row(finding.lane, f"{finding.gain_ms:.2f} ms", Text(finding.fix))
    return table
