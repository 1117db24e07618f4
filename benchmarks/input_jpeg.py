"""JPEG files to training batches: ours beside the other ways, each measurement in a process of its own.

512 photographs of 51 KB become batches of 64 crops of 224 x 224 pixels, on two threads or with up to two
workers (see jpeg_variants.py). Of each variant: images/s in the first epoch, from the constructor's call,
and in the later ones; the time to the first batch; the memory of the process and its workers. And of ours
and DALI: how much of the time to the first batch is left to a script that has half a second of other work to
do before its first step.

Ours imports DALI after the constructor's call, in the background; a script with DALI alone has done so
before. So the goal for the first batch counts the imports of both, all but torch's. Beside other work all
hides that leaves the interpreter to it: reading and decoding do, and importing DALI does so in short turns.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

import torch

from harness import Figure, alternate
from jpeg_run import ABSENT
from jpeg_variants import VARIANTS
from machine import ROOT, environment
from photographs import write_photographs

OURS, DALI, ITERATOR = "ours", "bare DALI", "DALI's torch iterator"
WORK_S = 0.5
PATIENCE_S = 120.0
"""How long one process may take; the slowest takes ten seconds on two cores."""


@dataclass
class Run:
    """A variant; calling it runs it once, in a fresh process, and keeps what it reported."""

    variant: str
    options: list[str]
    reports: list[dict[str, Any]] = field(default_factory=list)
    absent: str | None = None

    def __call__(self) -> None:
        if self.absent:
            return
        command = [sys.executable, str(ROOT / "benchmarks" / "jpeg_run.py"), self.variant, *self.options]
        ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S)
        if ran.returncode == ABSENT:
            self.absent = VARIANTS[self.variant][1]
            return
        if ran.returncode:
            raise RuntimeError(f"{self.variant} failed:\n{ran.stdout}\n{ran.stderr}")
        self.reports.append(json.loads(ran.stdout.splitlines()[-1]))

    def median(self, key: str) -> float | None:
        """None where it was not measured."""
        values = self._values(key)
        return median(values) if values else None

    def spread(self, key: str) -> tuple[float, float] | None:
        values = self._values(key)
        if len(values) < 2:
            return None
        low, _, high = quantiles(values, n=4, method="inclusive")
        return low, high

    def _values(self, key: str) -> list[float]:
        return [report[key] for report in self.reports if report.get(key) is not None]


def measure(quick: bool, device: torch.device) -> list[Figure]:
    """All figures of this part."""
    count, later, rounds, more = (128, 1, 1, 0) if quick else (512, 6, 5, 10)
    with tempfile.TemporaryDirectory(prefix="photographs-") as folder:
        options = ["--folder", folder, "--device", str(device)]
        whole = [Run(name, [*options, "--later", str(later)]) for name in VARIANTS]
        starts = [Run(name, [*options, "--work", str(WORK_S)]) for name in (OURS, DALI)]
        try:
            write_photographs(Path(folder), count)
        except ImportError:
            for run in (*whole, *starts):
                run.absent = "pip install scikit-learn pillow"
        turns: dict[str, Callable[[], object]] = {run.variant: run for run in whole}
        turns |= {f"{run.variant} beside work": run for run in starts}
        alternate(turns, rounds=rounds, warmup=0)
        if more:  # what is a few percent apart, on cores that differ by more from one minute to the next
            near = {run.variant: run for run in whole if run.variant in (OURS, DALI, ITERATOR)}
            alternate(near, rounds=more, warmup=0)
    return figures(whole, starts)


def figures(whole: list[Run], starts: list[Run]) -> list[Figure]:
    """Each variant's numbers, and ours against DALI and against the best of the others."""
    return [
        *_rows("later epochs", "later_rate", "images/s", 1, "higher", whole, 0.98),
        _against_best(whole),
        *_rows("first epoch", "first_rate", "images/s", 1, "higher", whole),
        *_rows("first batch with imports", "imported_s", "ms", 1e3, "lower", whole, 1.1),
        *_rows("first batch from the constructor", "first_batch_s", "ms", 1e3, "lower", whole[:2]),
        *_rows(f"first batch beside {WORK_S:g} s of work", "imported_s", "ms", 1e3, "lower", starts, 0.9),
        *_rows("memory", "memory", "MiB", 2**-20, "lower", whole),
    ]


def _rows(
    what: str,
    key: str,
    unit: str,
    scale: float,
    better: Literal["lower", "higher"],
    runs: list[Run],
    goal: float | None = None,
) -> list[Figure]:
    """One figure a variant: ours beside bare DALI's, with the goal if any; the others beside ours."""
    found = {run.variant: run for run in runs}
    rows = []
    for name, run in found.items():
        peer = found[DALI if name == OURS else OURS]
        value, peer_value, spread = run.median(key), peer.median(key), run.spread(key)
        missing = f" ({run.absent})" if run.absent else ""
        rows.append(
            Figure(
                f"JPEG {what}, {name}{missing}",
                None if value is None else scale * value,
                unit,
                better,
                peer=peer.variant,
                peer_value=None if peer_value is None else scale * peer_value,
                ratio_limit=goal if name == OURS else None,
                spread=spread and (scale * spread[0], scale * spread[1]),
            )
        )
    return rows


def _against_best(runs: list[Run]) -> Figure:
    """Goal: ours is ahead of every other that was measured, DALI alone aside, which it is made of."""
    found = {run.variant: run.median("later_rate") for run in runs}
    others = {name: rate for name, rate in found.items() if rate is not None and name not in (OURS, DALI)}
    best = max(others, key=lambda name: others[name], default="no other")
    return Figure(
        "JPEG later epochs, ours beside the best other",
        found[OURS],
        "images/s",
        "higher",
        peer=best,
        peer_value=others.get(best),
        ratio_limit=1.0,
    )
