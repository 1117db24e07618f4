"""What does a whole training step cost with overlapkit's parts, and with the plain ones?

    python benchmarks/step.py [--quick] [--json PATH] [--world 2] [--device cpu]

Runs examples/train_gpt.py in turns with and without --baseline, each run in a process of its own, on
one process and, with --world, under torchrun as FSDP2 and as DDP. A step's time is the mean period
that the run's own report gives: from one step's end to the next, with the wait for the batch and every
tenth step's checkpoint in it. Both variants train the same model on the same batches. With --quick each
runs twice for ten steps, which on shared cores repeats within a tenth only: so does its goal.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from harness import Figure, alternate, finish, parser, returned_seconds, time_figure
from machine import ROOT, environment

EVERY = 10  # steps between checkpoints


@dataclass
class Variant:
    """One way to run the main job; calling it gives the mean seconds of a step, and keeps the report."""

    command: list[str]
    options: list[str]
    reports: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self) -> float:
        with tempfile.TemporaryDirectory() as out:
            command = [*self.command, str(ROOT / "examples" / "train_gpt.py"), *self.options, "--out", out]
            ran = subprocess.run(command, env=environment(), capture_output=True, text=True)
            if ran.returncode:
                raise SystemExit(f"{' '.join(command)} failed:\n{ran.stdout}\n{ran.stderr}")
            self.reports.append(json.loads((Path(out) / "result.json").read_text())["report"])
        return self.reports[-1]["period_ms"] / 1e3


def exposed_percent(reports: list[dict[str, Any]]) -> float | None:
    """The median over runs; None where no run could measure it, as with foreign parts."""
    known = [report["exposed_share"] for report in reports if report["exposed_share"] is not None]
    return 100 * median(known) if known else None


def measure(setting: str, command: list[str], options: list[str], rounds: int, goal: float) -> list[Figure]:
    """Both variants in one setting."""
    ours, plain = Variant(command, options), Variant(command, [*options, "--baseline"])
    variants: dict[str, Callable[[], object]] = {"ours": ours, "baseline": plain}
    took = alternate(variants, rounds=rounds, warmup=0, timer=returned_seconds)
    peak = max(report["peak_memory"] for report in ours.reports) / 2**20
    plain_peak = max(report["peak_memory"] for report in plain.reports) / 2**20
    return [
        time_figure(f"step, {setting}", took["ours"], took["baseline"], ratio_limit=goal),
        Figure(
            f"exposed share, {setting}",
            exposed_percent(ours.reports),
            "%",
            better="lower",
            peer="baseline",
            peer_value=exposed_percent(plain.reports),
        ),
        Figure(f"peak memory, {setting}", peak, "MiB", "lower", peer="baseline", peer_value=plain_peak),
    ]


def main() -> int:
    options = parser("What does a training step cost with our parts, against plain PyTorch's?")
    options.add_argument("--world", type=int, default=1, help="also as FSDP2 and DDP on this many ranks")
    options.add_argument("--steps", type=int, help="steps a run (11 with --quick, else 51)")
    options.add_argument("--rounds", type=int, help="runs of each variant (2 with --quick, else 6)")
    args = options.parse_args()
    steps = (11 if args.quick else 51) if args.steps is None else args.steps
    rounds = (2 if args.quick else 6) if args.rounds is None else args.rounds
    if min(steps, rounds, args.world) < 1:
        options.error("--steps, --rounds and --world are at least 1")
    goal = 1.1 if args.quick else 1.02
    common = ["--steps", str(steps), "--save-every", str(EVERY), "--eval-batches", "0"]
    common += ["--device", args.device] if args.device else []
    figures = measure("one process", [sys.executable], common, rounds, goal)
    if args.world > 1:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(args.world)]
        figures += measure(f"FSDP2, {args.world} ranks", launch, common, rounds, goal)
        figures += measure(f"DDP, {args.world} ranks", launch, [*common, "--ddp"], rounds, goal)
    return finish(figures, args)


if __name__ == "__main__":
    sys.exit(main())
