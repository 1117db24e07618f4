"""How fast is a trace read, in how much memory, and are the numbers those of HolisticTraceAnalysis?

    python benchmarks/explain.py [--quick] [--json PATH] [--traces DIR]

Both read the same files, in turns, each in a process of its own with one compute thread: real traces, where
there are any (--traces, or ../shared/traces beside the repository), and a made one. A process reads a small
trace first, so that imports are not counted. Measured is from the call to the lanes; theirs are
get_temporal_breakdown and get_comm_comp_overlap. HolisticTraceAnalysis leaves out the last step that it finds
and rounds times down to whole microseconds: so the files are copies without the profiler's steps, in whole
microseconds, and then the numbers must be the same, to the microsecond and 0.01 points of overlap. Memory is
the most that the process held, all that it imports included (torch is most of that), while it read a made
trace of 1 GB (--quick: 50 MB).

The peer is pip install holistictraceanalysis (make bench-explain installs it). Some minutes on two cores.
"""

import gzip
import json
import math
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import Figure, Measurement, alternate, finish, parser, returned_seconds, time_figure
from made_trace import write_trace

ROOT = Path(__file__).resolve().parent.parent
READER = Path(__file__).with_name("trace_readers.py")
PEER = "HolisticTraceAnalysis"
MB = 1_000_000
SMALL = "small.json.gz"


def main() -> int:
    options = parser("How fast is a trace read, in how much memory, and are the numbers right?")
    options.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "traces", metavar="DIR")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _plain(write_trace(folder / "made.json", 1).read_bytes(), folder / SMALL)
        figures: list[Figure] = []
        for title, files in _cases(folder, args.traces, args.quick):
            figures += compare(folder, title, files, rounds=1 if args.quick else 4)
        figures += large(folder, (50 if args.quick else 1000) * MB)
    return finish(figures, args)


def compare(folder: Path, title: str, files: list[Path], rounds: int) -> list[Figure]:
    """Time and numbers of one case."""
    answers: dict[str, dict[str, Any]] = {}

    def once(name: str) -> float:
        answers[name] = run(name, folder / SMALL, files)
        return float(answers[name]["seconds"])

    readers = ["ours", "hta"] if find_spec("hta") else ["ours"]
    variants: dict[str, Callable[[], float]] = {name: partial(once, name) for name in readers}
    took = alternate(variants, rounds=rounds, warmup=0, timer=returned_seconds)
    peer = Measurement(PEER, took["hta"].samples) if "hta" in took else None
    if peer is None:
        print(f"{PEER} is not installed: pip install holistictraceanalysis", file=sys.stderr)
        return [time_figure(f"{title}: read", took["ours"])]
    times, overlaps = differences(answers["ours"]["numbers"], answers["hta"]["numbers"])
    return [
        time_figure(f"{title}: read", took["ours"], peer, ratio_limit=0.2),
        Figure(f"{title}: largest difference of a lane", times, "us", better="lower", limit=1),
        Figure(f"{title}: largest difference of overlap", overlaps, "points", better="lower", limit=0.01),
    ]


def differences(ours: list[Any], theirs: list[Any]) -> tuple[float, float]:
    """Of times, and of overlaps, between two readings of the same ranks."""
    if len(ours) != len(theirs):
        return math.inf, math.inf
    ranks = list(zip(ours, theirs, strict=True))
    times = [abs(one[place] - other[place]) for one, other in ranks for place in range(3)]
    pairs = [(one[3], other[3]) for one, other in ranks]
    if any((a is None) != (b is None) for a, b in pairs):
        return max(times), 100.0
    return max(times), max((abs(round(a, 2) - b) for a, b in pairs if a is not None), default=0.0)


def large(folder: Path, nbytes: int) -> list[Figure]:
    """Memory and speed of one large trace."""
    path = write_trace(folder / "large.json", nbytes)
    answer = run("ours", folder / SMALL, [path])
    path.unlink()
    what = f"a trace of {nbytes // MB:,} MB"
    peak, before = answer["peak"], answer["before"]
    grown = None if peak is None or before is None else (peak - before) / MB
    return [
        Figure(f"{what}: peak memory", peak and peak / 1e9, "GB", better="lower", limit=2),
        Figure(f"{what}: beyond what is imported", grown, "MB"),
        Figure(f"{what}: read", nbytes / MB / answer["seconds"], "MB/s"),
    ]


def run(name: str, small: Path, files: list[Path]) -> dict[str, Any]:
    """One reading."""
    command = [sys.executable, str(READER), name, str(small), *map(str, files)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ran.returncode:
        raise SystemExit(f"{name} on {files[0].name} failed:\n{ran.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def _cases(folder: Path, traces: Path, quick: bool) -> Iterator[tuple[str, list[Path]]]:
    """What both read: each with its title."""
    made = write_trace(folder / "made.json", (5 if quick else 50) * MB)
    yield f"made, {5 if quick else 50} MB", [_plain(made.read_bytes(), folder / "made.json.gz")]
    for path in sorted(traces.glob("*.json.gz")) if traces.is_dir() else ():
        raw = gzip.decompress(path.read_bytes())
        if b'"cat": "kernel"' in raw:  # HolisticTraceAnalysis reads no trace without a device
            yield path.name.removesuffix(".json.gz"), [_plain(raw, folder / path.name)]
    for path in sorted(traces.glob("*.tar.gz")) if traces.is_dir() else ():
        with tarfile.open(path) as archive:
            members = sorted((m for m in archive.getmembers() if m.isfile()), key=lambda m: m.name)
            raws = [archive.extractfile(member).read() for member in members]  # type: ignore[union-attr]
        files = [_plain(raw, folder / f"{path.name}.{turn}.json.gz") for turn, raw in enumerate(raws)]
        yield path.name.removesuffix(".tar.gz"), files


def _plain(raw: bytes, path: Path) -> Path:
    """A copy without the profiler's steps, and in whole microseconds."""
    trace = json.loads(raw)
    kept = [e for e in trace["traceEvents"] if not str(e.get("name")).startswith("ProfilerStep")]
    for event in kept:
        event |= {key: math.floor(event[key]) for key in ("ts", "dur") if key in event}
    path.write_bytes(gzip.compress(json.dumps(trace | {"traceEvents": kept}, indent=1).encode(), 5))
    return path


if __name__ == "__main__":
    sys.exit(main())
