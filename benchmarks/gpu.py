"""Does everything that only a GPU can show hold? One command, one JSON, one table.

    python benchmarks/gpu.py [tests|kernels|optim|input|checkpoint|step|meter|all ...] --out DIR [--budget S]

Runs from a checkout with torch >= 2.11, its Triton, numpy, safetensors, rich and pytest; nothing has to be
installed. torchdata, DALI, Liger, quack, matplotlib and pytest-timeout are used where they are; without
xxhash checkpoints have slower checksums, and without msgspec no trace is read.

The ceilings come first, then the parts in the order above, each in a process of its own with its share of
what is left of the budget: a part that crashes or hangs costs no other part, and each is told how long it may
take, so that it does less rather than be stopped. Tests that had no time left are counted. All together is
made for one H200 in less than nine minutes (gpu_parts.py holds what each part is thought to take).

DIR/gpu.json and DIR/gpu.txt (goals met and missed, parts, figures) are written anew after every part;
DIR/gpu.log holds what the parts said, and DIR/step.png, with matplotlib, the lanes of a step.

Exit codes: 0 all that was asked for ran and every goal is met; 3 a goal is missed, or a part is absent,
skipped or had no time left; 1 a part failed or was stopped at its share; 2 wrong usage, or no CUDA
device. What a part left out for want of time is a missed goal.
"""

import argparse
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from figure import short
from gpu_parts import WEIGHTS, Result, run, run_part
from harness import MET, MISSED, figure_table, write_json

FAILED = 1


def main() -> int:
    args = _arguments()
    signal.signal(signal.SIGTERM, _interrupt)
    args.out = args.out.resolve()  # parts run elsewhere
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu.log").write_bytes(b"")
    began = time.monotonic()
    about = _about_machine()
    results: list[Result] = []
    _write(args, about, results, time.monotonic() - began)
    for at, name in enumerate(args.parts):
        left = args.budget - (time.monotonic() - began)
        share = left * WEIGHTS[name] / sum(WEIGHTS[later] for later in args.parts[at:])
        print(f"{name}: up to {max(share, 0):.0f} s", flush=True)
        results.append(run_part(name, share, args.device, args.out))
        _write(args, about, results, time.monotonic() - began)
    print((args.out / "gpu.txt").read_text())
    return exit_code(results)


def exit_code(results: Sequence[Result]) -> int:
    statuses = {result.status for result in results}
    if statuses & {"failed", "timeout"}:
        return FAILED
    return MET if statuses <= {"passed"} else MISSED


def _about_machine() -> dict[str, Any]:
    """Asked in a process of its own: this one stays without a CUDA context, beside every part."""
    with tempfile.TemporaryDirectory(prefix="gpu-machine-") as folder:
        output = Path(folder) / "output"
        (code,) = run([[sys.executable, "benchmarks/machine.py"]], 120, [output])
        lines = [line for line in output.read_text(errors="replace").splitlines() if line.startswith("{")]
        if code != 0 or not lines:
            return {"commit": None, "hardware": None, "versions": None}
        about: dict[str, Any] = json.loads(lines[-1])
        return about


def _write(
    args: argparse.Namespace, about: dict[str, Any], results: Sequence[Result], seconds: float
) -> None:
    complete = len(results) == len(args.parts)
    content = {
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "device": args.device,
        "budget_s": args.budget,
        "seconds": round(seconds, 1),
        "complete": complete,
        "exit_code": exit_code(results) if complete else None,
        **about,
        "parts": [asdict(result) for result in results],
        "not_run": args.parts[len(results) :],
    }
    write_json(args.out / "gpu.json", content)
    with (args.out / "gpu.txt").open("w") as file:
        console = Console(file=file, width=130)
        console.print(_goals_table(results))
        console.print(_parts_table(results))
        for result in results:
            if result.figures:
                console.print(figure_table(result.figures, result.name))


def _goals_table(results: Sequence[Result]) -> Table:
    """Every figure that has a goal."""
    figures = [(result.name, row) for result in results for row in result.figures if row["goal"]]
    met = sum(row["met"] is True for _, row in figures)
    table = Table(title=f"goals: {met} of {len(figures)} met", title_justify="left")
    for heading in ("part", "figure", "measured", "goal", ""):
        table.add_column(heading, justify="right" if heading == "measured" else "left")
    for part, row in figures:
        verdict = "[green]met" if row["met"] else "[red]MISSED"
        table.add_row(part, row["name"], short(row["value"], row["unit"]), row["goal"], verdict)
    return table


def _parts_table(results: Sequence[Result]) -> Table:
    table = Table(title="parts", title_justify="left")
    for heading in ("part", "status", "seconds", "of", "what"):
        table.add_column(heading, justify="right" if heading in ("seconds", "of") else "left")
    for result in results:
        table.add_row(
            result.name, result.status, f"{result.seconds:.1f}", f"{result.share_s:.0f}", result.detail
        )
    return table


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    wanted = [*(name for name in WEIGHTS if name != "ceilings"), "all"]
    options.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(wanted)} (default: all)")
    options.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the reports")
    options.add_argument(
        "--budget", type=float, default=520.0, metavar="SECONDS", help="default: %(default)s"
    )
    options.add_argument(
        "--allow-cpu", action="store_true", help="without a GPU: run the frame with --quick on the CPU"
    )
    args = options.parse_args()
    for name in args.parts:
        if name not in wanted:
            options.error(f"PART={name!r}: choose from {', '.join(wanted)}")
    if not args.budget > 0:
        options.error(f"--budget {args.budget}: give it a number of seconds above 0")
    if args.out.exists() and not args.out.is_dir():
        options.error(f"--out {args.out}: it is a file; name a folder")
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cpu" and not args.allow_cpu:
        options.error(
            f"no CUDA device: torch {torch.__version__} sees none on this machine; run it where there is a "
            "GPU, or pass --allow-cpu to try the frame itself"
        )
    every = not args.parts or "all" in args.parts
    args.parts = [name for name in WEIGHTS if every or name in args.parts or name == "ceilings"]
    return args


if __name__ == "__main__":
    sys.exit(main())
