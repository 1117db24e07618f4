"""The parts of a step on all ranks, side by side."""

from rich import box
from rich.table import Table

from overlapkit.measure.across.ranks import Ranks

_SMALL = 0.01  # of a step


def ranks_table(ranks: Ranks) -> Table:
    """Median, worst rank and skew of each part that takes a percent of a step on the worst rank."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{ranks.world} ranks", no_wrap=True)
    for name in ("median ms", "worst ms", "rank", "skew ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, part in ranks.parts.items():
        if part.worst_ms >= _SMALL * ranks.period_ms:
            figures = (
                f"{part.median_ms:.2f}",
                f"{part.worst_ms:.2f}",
                str(part.worst_rank),
                f"{part.skew_ms:.2f}",
            )
            table.add_row(name, *figures)
    return table
