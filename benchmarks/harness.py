"""How every benchmark here measures and reports.

The variants of a question alternate in one run, so that a machine that drifts (clocks, neighbours,
caches) drifts for all of them. What is reported is the median and the quartiles, beside the peer and
the goal. A benchmark is a script of this form:

    def main() -> int:
        args = parser("Does ours beat the peer?").parse_args()
        took = alternate({"ours": ours, "peer": peer}, rounds=5 if args.quick else 50)
        return finish([time_figure("call", took["ours"], took["peer"], ratio_limit=0.9)], args)

    if __name__ == "__main__":
        sys.exit(main())
"""

import argparse
import json
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

import machine
from figure import Figure, figure_table

__all__ = [
    "MET",
    "MISSED",
    "Figure",
    "Measurement",
    "Timer",
    "alternate",
    "figure_table",
    "finish",
    "new_file",
    "parser",
    "report",
    "returned_seconds",
    "time_figure",
    "timer_for",
    "torch_threads",
    "wall_seconds",
    "write_json",
]

MET, MISSED = 0, 3
"""Exit codes: every goal is met; one is missed."""

Timer = Callable[[Callable[[], object]], float]
"""Calls a variant once and returns its seconds."""

_SCALE = {"s": 1.0, "ms": 1e3, "us": 1e6}


@dataclass(frozen=True)
class Measurement:
    """The seconds that one variant took, one sample a round."""

    name: str
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third: half of all samples lie between them."""
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high


def wall_seconds(variant: Callable[[], object]) -> float:
    """Time on the host clock. A variant that queues work on a GPU must wait for it itself."""
    start = time.perf_counter()
    variant()
    return time.perf_counter() - start


def returned_seconds(variant: Callable[[], object]) -> float:
    """For variants that measure themselves (a subprocess, say): the seconds that the call returns."""
    seconds = variant()
    if not isinstance(seconds, float | int):
        raise TypeError(f"returned_seconds: the variant returned {seconds!r}, not its seconds")
    return float(seconds)


def timer_for(device: torch.device) -> Timer:
    """`wall_seconds` on the CPU; on a GPU two CUDA events around the call, its L2 cache flushed before.

    The launches of the call count where they take longer than its kernels: kernels of a few
    microseconds need a variant that replays a CUDA graph.
    """
    if device.type != "cuda":
        return wall_seconds
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    trash = torch.empty(2 * cache, dtype=torch.uint8, device=device)

    def event_seconds(variant: Callable[[], object]) -> float:
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            trash.zero_()
            start.record()
            variant()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return event_seconds


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute on so many cores in this thread; each thread has a number of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def alternate(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    timer: Timer = wall_seconds,
    limit_s: float = math.inf,
) -> dict[str, Measurement]:
    """Time the variants in turns: each once a round, and round r begins with variant r modulo their number.

    Args:
        variants: What is called, by name.
        rounds: Timed rounds, at least 1. A multiple of the number of variants gives each every place.
        warmup: Rounds before them whose times are thrown away.
        timer: How one call is timed.
        limit_s: No further round begins that would end later than so many seconds after the call, were it as
            long as the longest before it; one is timed in any case.

    Returns:
        A Measurement of `rounds` samples for each name, fewer where `limit_s` came first, in the order given.

    Raises:
        ValueError: No variants, rounds < 1 or warmup < 0.
        Exception: What a variant raised, with a note that names the variant and the round.
    """
    if not variants:
        raise ValueError("variants={}: there is nothing to measure")
    if rounds < 1 or warmup < 0:
        raise ValueError(f"rounds={rounds}, warmup={warmup}: rounds is at least 1 and warmup at least 0")
    names = list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    began, longest = time.monotonic(), 0.0
    for turn in range(-warmup, rounds):
        started = time.monotonic()
        if turn > 0 and started - began + longest > limit_s:
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            try:
                seconds = timer(variants[name])
            except Exception as error:
                error.add_note(f"in variant {name!r}, round {turn} (warm-up rounds are negative)")
                raise
            if turn >= 0:
                samples[name].append(seconds)
        longest = max(longest, time.monotonic() - started) if turn >= 0 else 0.0  # warm-up rounds compile
    return {name: Measurement(name, tuple(taken)) for name, taken in samples.items()}


def time_figure(
    name: str,
    ours: Measurement,
    peer: Measurement | None = None,
    *,
    unit: Literal["s", "ms", "us"] = "ms",
    limit: float | None = None,
    ratio_limit: float | None = None,
) -> Figure:
    """The Figure of a time (lower is better): medians and quartiles in `unit`, beside the peer's median."""
    scale = _SCALE[unit]
    low, high = ours.quartiles
    return Figure(
        name,
        ours.median * scale,
        unit,
        better="lower",
        peer=None if peer is None else peer.name,
        peer_value=None if peer is None else peer.median * scale,
        limit=limit,
        ratio_limit=ratio_limit,
        spread=(low * scale, high * scale),
    )


def parser(question: str) -> argparse.ArgumentParser:
    """The options that every benchmark has; add your own to it.

    Args:
        question: What the benchmark answers; the help's text and the table's title.
    """
    options = argparse.ArgumentParser(description=question)
    options.set_defaults(question=question, commit=machine.commit())  # pictures are changes of the checkout
    options.add_argument("--quick", action="store_true", help="a short run, under a minute on two cores")
    options.add_argument("--json", type=new_file, metavar="PATH", help="write the report here")
    options.add_argument("--device", help="cpu, cuda or cuda:N (default: the GPU where there is one)")
    return options


def new_file(text: str) -> Path:
    """An option's type: a path that can be written. A report that cannot would cost the whole run."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: name a file in a folder that exists and can be written")
    return path


def finish(
    figures: Sequence[Figure], args: argparse.Namespace, details: Mapping[str, Any] | None = None
) -> int:
    """Print the table, write the JSON where `--json` asks for it, and return the exit code.

    Args:
        figures: Of the report.
        args: The command line's.
        details: Goes into the JSON beside them, e.g. the report of a step.

    Returns:
        0 when every goal is met, 3 when one is missed.

    Raises:
        ValueError: No figures, or two of one name.
    """
    names = [figure.name for figure in figures]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"figures={names}: a report has at least one figure, each with a name of its own")
    rows = [figure.as_json() for figure in figures]
    if args.json is not None:
        write_json(args.json, report(rows, args) | ({} if details is None else {"details": dict(details)}))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(figure_table(rows, args.question + (" (--quick)" if args.quick else "")))
    return MISSED if any(row["met"] is False for row in rows) else MET


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """What a benchmark's JSON holds."""
    return {
        "question": args.question,
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "quick": args.quick,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": args.commit,
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "threads": torch.get_num_threads(),
        "figures": rows,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON that appears under its name only when it is whole."""
    half = path.with_name(path.name + ".part")
    half.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    os.replace(half, path)
