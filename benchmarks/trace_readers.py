"""One reading of traces, in a process of its own: part of benchmarks/explain.py.

    python benchmarks/trace_readers.py ours|hta SMALL FILE...

Prints JSON: the seconds from the call to the numbers, the numbers of each rank, and the most memory that the
process held, in bytes, before the call and at all. SMALL is a trace that is read first: what is imported
then is not counted.
"""

import json
import logging
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

Numbers = list[float | None]
"""Microseconds of compute, of what is busy without computing, idle; percent of communication overlapped."""


def ours(files: list[str]) -> list[Numbers]:
    from overlapkit.measure import explain

    found: list[Numbers] = []
    for one in explain(files).trace.ranks:
        lanes = one.lanes
        other = lanes.exposed_communication + lanes.exposed_copy
        found.append([lanes.compute / 1e3, other / 1e3, lanes.idle / 1e3, lanes.overlap])
    return found


def hta(files: list[str]) -> list[Numbers]:
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files=dict(enumerate(files)), trace_dir="/")
    times = analysis.get_temporal_breakdown(visualize=False).set_index("rank").sort_index()
    overlaps = analysis.get_comm_comp_overlap(visualize=False).set_index("rank").sort_index()
    found: list[Numbers] = []
    for rank in times.index:
        row, overlap = times.loc[rank], float(overlaps.loc[rank, "comp_comm_overlap_pctg"])
        parts = [float(row[f"{name}(us)"]) for name in ("compute_time", "non_compute_time", "idle_time")]
        found.append(
            [*parts, overlap if overlap == overlap else None]
        )  # it says NaN where nothing communicates
    return found


READERS = {"ours": ours, "hta": hta}


def _peak() -> int | None:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    return 1024 * int(match[1]) if match else None


def main() -> None:
    name, small, files = sys.argv[1], sys.argv[2], sys.argv[3:]
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    READERS[name]([small])
    before = _peak()
    start = time.perf_counter()
    numbers = READERS[name](files)
    seconds = time.perf_counter() - start
    answer: dict[str, Any] = {"seconds": seconds, "numbers": numbers, "peak": _peak(), "before": before}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
