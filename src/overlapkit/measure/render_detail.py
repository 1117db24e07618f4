"""What a report knows beside the parts of a step, a line each, as far as it was measured."""

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from overlapkit.counted import counted
from overlapkit.measure.detail import StepDetail

_MIB = 2**20
_SHOWN = 3  # of a list: the rest stands in to_dict()


def detail_table(detail: StepDetail) -> Table:
    """Two columns: what, and the numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("within", no_wrap=True)
    table.add_column("")
    for name, text in _lines(detail):
        table.add_row(name, Text(text))
    if detail.missing:
        table.add_row("not measured", Text(", ".join(detail.missing) + " (report.detail.missing says why)"))
    return table


def _lines(detail: StepDetail) -> Iterator[tuple[str, str]]:
    if detail.flops is not None:
        of_peak = "" if detail.mfu is None else f", {detail.mfu:.1%} of the device's peak (MFU)"
        flops = f"{detail.flops / 1e12:,.3f} T" if detail.flops >= 1e11 else f"{detail.flops / 1e9:,.3f} G"
        yield "arithmetic", f"{flops}FLOP a step{of_peak}"
    if detail.recompute_ms:
        yield "recompute", f"{detail.recompute_ms:.2f} ms of backward"
    if detail.passes and len(detail.passes) > 1:
        times = [f"{one.forward_ms:.1f} + {one.backward_ms:.1f}" for one in detail.passes]
        yield f"{len(times)} microbatches", f"{_some(times)} ms (forward + backward)"
    yield from _communication(detail)
    if detail.compilations:
        yield "compiled", _some([f"{one.name} ({one.where}) {one.ms:.0f} ms" for one in detail.compilations])
    if detail.syncs:
        yield "host waits", _some([f"{one.where} {one.a_step:.0f} times a step" for one in detail.syncs])
    if detail.checkpoint is not None:
        cost = detail.checkpoint
        slowdown = "" if cost.slowdown_ms is None else f" + {cost.slowdown_ms:.1f} of slower steps"
        a_save = f"({cost.stall_ms:.1f} ms of stall{slowdown}) / {counted(round(cost.interval), 'step')}"
        yield "saving", f"{a_save} = {cost.amortised_ms:.2f} ms a step"
    if detail.io is not None:
        read, written = detail.io.read_bytes / _MIB, detail.io.written_bytes / _MIB
        yield (
            "storage",
            f"{read:.1f} MiB/s read, {written:.1f} MiB/s written, {detail.io.processes} process(es)",
        )
    if detail.peaks:
        peaks = [f"{phase} {value / _MIB:,.0f}" for phase, value in detail.peaks.items()]
        yield "peak MiB", " · ".join(peaks)


def _communication(detail: StepDetail) -> Iterator[tuple[str, str]]:
    if detail.buckets:
        ends = [
            f"{one.start_ms if one.ready_ms is None else one.ready_ms:.1f}..{one.end_ms:.1f}"
            for one in detail.buckets
        ]
        yield f"{len(ends)} bucket(s)", f"{_some(ends)} ms after backward began (ready..done)"
    exposed = [one for one in detail.gathers or () if one.exposed_ms >= 0.005]
    if exposed:
        yield "gathers", "waited for " + _some([f"{one.unit} {one.exposed_ms:.2f} ms" for one in exposed])


def _some(texts: list[str]) -> str:
    more = f", and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more
