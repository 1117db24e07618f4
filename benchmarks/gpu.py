"""Does everything that only a GPU can show hold? One command, one JSON, one table.

    python benchmarks/gpu.py [tests|kernels|optim|input|checkpoint|step|all ...] --out DIR [--budget SECONDS]

Runs from a checkout with torch >= 2.11, its Triton, numpy, safetensors, rich and pytest; nothing has
to be installed. The ceilings come first, then the parts in the order above, each in a process of its
own with its share of what is left of the budget: a part that crashes or hangs costs no other part.
DIR/gpu.json and DIR/gpu.txt are written anew after every part, DIR/gpu.log holds what the parts said.

Exit codes: 0 all that was asked for ran and every goal is met; 3 a goal is missed, or a part is absent,
skipped or had no time left; 1 a part failed or was stopped at its share; 2 wrong usage, or no CUDA
device.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import torch
from rich.console import Console
from rich.table import Table

from harness import MET, MISSED, figure_table, write_json
from machine import ROOT, environment

WEIGHTS = {"ceilings": 2, "tests": 6, "kernels": 6, "optim": 3, "input": 6, "checkpoint": 4, "step": 6}
"""Every part in the order in which it runs, with its weight in the sharing of the budget."""

LONG = {"input", "kernels"}
"""Parts whose whole run takes more than the budget: they run with --quick."""

FAILED = 1
NOTHING_FOUND = 5  # pytest's exit code
TAIL = 4000  # characters of output that the JSON keeps of a part that did not pass
LOG_TAIL = 2**20  # bytes of output that the log keeps of a part: all files stay far below 16 MB
LEAST_S = 5.0  # importing torch alone takes seconds: a part with less is not started

Status = Literal["passed", "missed", "failed", "timeout", "absent", "skipped", "no time"]


@dataclass
class Result:
    """What became of one part."""

    name: str
    status: Status
    detail: str = ""
    seconds: float = 0.0
    share_s: float = 0.0
    figures: list[dict[str, Any]] = field(default_factory=list)
    tests: dict[str, Any] | None = None
    output_tail: str = ""


def main() -> int:
    args = _arguments()
    signal.signal(signal.SIGTERM, _interrupt)
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
        results.append(run_part(name, share, args.device, args.out / "gpu.log"))
        _write(args, about, results, time.monotonic() - began)
    print((args.out / "gpu.txt").read_text())
    return exit_code(results)


def run_part(name: str, share: float, device: str, log: Path) -> Result:
    """Run one part in a process of its own, and read what it left."""
    with tempfile.TemporaryDirectory(prefix=f"gpu-{name}-") as folder:
        report = Path(folder) / ("junit.xml" if name == "tests" else "report.json")
        command = tests_command(report) if name == "tests" else benchmark_command(name, device, report)
        if command is None:
            missing = "no test is marked gpu" if name == "tests" else f"there is no benchmarks/{name}.py yet"
            return Result(name, "absent", missing)
        if share < LEAST_S:
            return Result(name, "no time", f"{max(share, 0):.0f} s of the budget were left for it")
        began = time.monotonic()
        output = Path(folder) / "output"
        code = _run(command, share, output)
        try:
            result = (_tests_result if name == "tests" else _benchmark_result)(name, code, report)
        except Exception as error:  # whatever a part left behind, the parts after it still run
            result = Result(name, "failed", f"its report cannot be read: {error!r}")
        result.seconds, result.share_s = round(time.monotonic() - began, 1), round(share, 1)
        said = output.read_bytes()[-LOG_TAIL:]
        with log.open("ab") as file:
            file.write(f"\n===== {name}: {shlex.join(command)}\n".encode() + said)
        if result.status not in ("passed", "missed"):
            result.output_tail = said.decode(errors="replace")[-TAIL:]
        return result


def tests_command(report: Path) -> list[str] | None:
    """Run pytest over the files that hold a gpu mark (importing the others would cost time), or None."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [str(path.relative_to(ROOT)) for path in paths if "mark.gpu" in path.read_text()]
    if not files:
        return None
    options = ["-m", "gpu", "-v", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    return [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *files]


def benchmark_command(name: str, device: str, report: Path) -> list[str] | None:
    """The benchmark's own command, or None while there is no such benchmark."""
    script = ROOT / "benchmarks" / f"{name}.py"
    if not script.exists():
        return None
    quick = ["--quick"] if device == "cpu" or name in LONG else []
    return [sys.executable, str(script.relative_to(ROOT)), "--json", str(report), "--device", device, *quick]


def exit_code(results: Sequence[Result]) -> int:
    statuses = {result.status for result in results}
    if statuses & {"failed", "timeout"}:
        return FAILED
    return MET if statuses <= {"passed"} else MISSED


def _run(command: list[str], limit: float, output: Path) -> int | None:
    """The exit status, or None where the limit ended it, with all that it started."""
    env = environment() | {"PYTHONUNBUFFERED": "1"}
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, process_group=0
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a part, its own workers included: they would hold memory of the GPU."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _benchmark_result(name: str, code: int | None, report: Path) -> Result:
    figures = json.loads(report.read_text())["figures"] if report.exists() else []
    if code is None:
        return Result(name, "timeout", "stopped at its share", figures=figures)
    if code not in (MET, MISSED) or not figures:
        return Result(name, "failed", f"{_ending(code)}, {len(figures)} figures", figures=figures)
    missed = [figure["name"] for figure in figures if figure["met"] is False]
    return Result(name, "missed" if code else "passed", ", ".join(missed), figures=figures)


def _tests_result(name: str, code: int | None, report: Path) -> Result:
    if code is None:
        return Result(name, "timeout", "stopped at its share; the log ends in the test that ran")
    if not report.exists():
        return Result(name, "failed", f"{_ending(code)}, no report")
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(bad) - len(skipped)
    names = [f"{case.get('classname')}::{case.get('name')}" for case in bad]
    counts = {"passed": passed, "failed": len(bad), "skipped": len(skipped), "failures": names}
    detail = f"{passed} passed, {len(bad)} failed, {len(skipped)} skipped"
    if code == NOTHING_FOUND or (code == 0 and passed == 0):
        return Result(name, "skipped", detail, tests=counts)
    return Result(name, "failed" if code else "passed", detail, tests=counts)


def _ending(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _about_machine() -> dict[str, Any]:
    """Asked in a process of its own: this one stays without a CUDA context, beside every part."""
    with tempfile.TemporaryDirectory(prefix="gpu-machine-") as folder:
        output = Path(folder) / "output"
        if _run([sys.executable, "benchmarks/machine.py"], 60, output) != 0:
            return {"commit": None, "hardware": None, "versions": None}
        about: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
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
        console.print(_parts_table(results))
        for result in results:
            if result.figures:
                console.print(figure_table(result.figures, result.name))


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
