"""The lanes of a trace as a table: step by step for one rank, rank by rank for several."""

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from overlapkit.measure.traces.detail import TraceDetail
    from overlapkit.measure.traces.lanes import Lanes

_ROWS = 16
_COLUMNS = ("compute", "comm exposed", "copy exposed", "idle", "span", "overlap")


def lanes_table(trace: "TraceDetail") -> Table:
    """Milliseconds; the first four add up to the fifth. Of many rows the first are shown."""
    several = len(trace.ranks) > 1
    compared = several and not isinstance(trace.arrivals, str)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rank" if several else "step", no_wrap=True)
    for name in (*_COLUMNS, "waited", "came last") if compared else _COLUMNS:
        table.add_column(name, justify="right")
    for place, (name, lanes) in enumerate(_rows(trace, several)[:_ROWS]):
        cells = _cells(lanes)
        if compared and not isinstance(trace.arrivals, str):
            arrival = trace.arrivals.ranks[place]
            cells += [f"{arrival.waited / 1e6:.2f}", f"{arrival.last} of {arrival.shared}"]
        table.add_row(name, *cells)
    if (left := len(_rows(trace, several)) - _ROWS) > 0:
        table.add_row(f"{left} more")
    if not several:
        table.add_row("all", *_cells(trace.ranks[0].lanes))
    return table


def _rows(trace: "TraceDetail", several: bool) -> "list[tuple[str, Lanes]]":
    if several:
        return [(str(one.rank), one.lanes) for one in trace.ranks]
    return [(str(step.number), step.lanes) for step in trace.steps]


def _cells(lanes: "Lanes") -> list[str]:
    times = (lanes.compute, lanes.exposed_communication, lanes.exposed_copy, lanes.idle, lanes.span)
    overlap = "-" if lanes.overlap is None else f"{lanes.overlap:.1f}%"
    return [*(f"{time / 1e6:.2f}" for time in times), overlap]
