"""A Comparison as text for a terminal of 80 columns or more."""

import io
import shutil
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from overlapkit.measure.compare import Change, Comparison


def sentence(found: "Comparison") -> str:
    """Whether a step became faster, and by what; tokens count where steps have other numbers of them."""
    step = found.step
    assert step.before is not None
    assert step.after is not None
    times = f"a step takes {step.after:.1f} ms, before it took {step.before:.1f} ms"
    if step.verdict in ("faster", "slower"):
        speed = step.before / step.after
        tokens = found.tokens_per_s
        if tokens[0] and tokens[1] and any(one.startswith("tokens a step") for one in found.differs):
            speed = tokens[1] / tokens[0]
            times += f"; {tokens[1]:,.0f} tokens/s, before {tokens[0]:,.0f}"
        head = f"{speed:.2f} times as fast: {times}"
    elif step.verdict == "same":
        within = "" if step.noise is None else f" (noise: {step.noise:.1f} ms)"
        head = f"No faster or slower: {times}{within}"
    else:
        head = f"Too few steps to tell noise: {times}"
    return f"{head}{_by_what(found)}."


def _by_what(found: "Comparison") -> str:
    moved = [part for part in found.parts if part.verdict in ("faster", "slower")]
    moved.sort(key=lambda part: -abs(part.difference or 0.0))
    if not moved:
        return ""
    words = [
        f"{part.name} {abs(part.difference or 0.0):.1f} ms {'less' if part.verdict == 'faster' else 'more'}"
        for part in moved[:3]
    ]
    return "; " + ", ".join(words)


def render(found: "Comparison") -> str:
    """The sentence, the table, the findings, what else differs."""
    console = Console(
        file=io.StringIO(), width=max(80, min(100, shutil.get_terminal_size().columns)), color_system=None
    )
    console.print(sentence(found), highlight=False, markup=False)
    console.print(_table(found))
    for word, findings in (("gone", found.gone), ("new", found.new), ("still there", found.kept)):
        for finding in findings:
            console.print(f"{word}: {finding}", highlight=False, markup=False)
    if found.differs:
        console.print(f"not the same: {'; '.join(found.differs)}", highlight=False, markup=False)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).rstrip()


def _table(found: "Comparison") -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("before", "after", "change", "of the step", "noise"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for change in (found.step, *found.parts):
        table.add_row(change.name, *_cells(change, found.step.before))
    tokens, peaks = found.tokens_per_s, found.peak_memory
    if tokens[0] is not None and tokens[1] is not None:
        table.add_row("tokens/s", f"{tokens[0]:,.0f}", f"{tokens[1]:,.0f}", f"{tokens[1] - tokens[0]:+,.0f}")
    if peaks[0] is not None and peaks[1] is not None:
        before, after = (peak / 2**20 for peak in peaks if peak is not None)
        table.add_row("peak MiB", f"{before:,.0f}", f"{after:,.0f}", f"{after - before:+,.0f}")
    return table


def _cells(change: "Change", step: float | None) -> list[str]:
    def ms(value: float | None, sign: str = "") -> str:
        return "-" if value is None else f"{value:{sign}.2f}"

    difference = change.difference
    share = "-" if difference is None or not step else f"{difference / step:+.1%}"
    return [ms(change.before), ms(change.after), ms(difference, "+"), share, ms(change.noise), change.verdict]
