"""The parts of benchmarks/gpu.py: how each is started, what it may take, and what became of it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from harness import MET, MISSED
from machine import ROOT, environment
from pytest_deadline import NO_TIME, UNTIL

WEIGHTS = {
    "ceilings": 25,
    "tests": 115,
    "kernels": 75,
    "optim": 35,
    "input": 40,
    "checkpoint": 85,
    "step": 125,
    "meter": 20,
}
"""Every part in the order in which it runs, and about the seconds that it takes on one H200: its weight where
the budget is shared."""

SCRIPTS = {name: f"gpu_{name}" for name in ("input", "checkpoint", "step")}
"""Parts whose question on a GPU is another than without: they have a file of their own."""

START_S = 8.0
"""Of a part's share: a process that starts, imports torch and makes a CUDA context."""

WORKERS = 6  # processes of pytest-xdist: each compiles kernels on one core, and has a context on the GPU

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
    details: dict[str, Any] | None = None
    output_tail: str = ""


def run_part(name: str, share: float, device: str, out: Path) -> Result:
    """Run one part in a process of its own, and read what it left."""
    with tempfile.TemporaryDirectory(prefix=f"gpu-{name}-") as folder:
        report = Path(folder) / ("junit.xml" if name == "tests" else "report.json")
        if name == "tests":
            command, missing = tests_command(report), "no test is marked gpu"
        else:
            command, missing = benchmark_command(name, device, report, share, out), "it has no script yet"
        if command is None:
            return Result(name, "absent", missing)
        if share < LEAST_S:
            return Result(name, "no time", f"{max(share, 0):.0f} s of the budget were left for it")
        began = time.monotonic()
        output = Path(folder) / "output"
        code = run(command, share, output)
        try:
            result = (_tests_result if name == "tests" else _benchmark_result)(name, code, report)
        except Exception as error:  # whatever a part left behind, the parts after it still run
            result = Result(name, "failed", f"its report cannot be read: {error!r}")
        result.seconds, result.share_s = round(time.monotonic() - began, 1), round(share, 1)
        said = output.read_bytes()[-LOG_TAIL:]
        with (out / "gpu.log").open("ab") as file:
            file.write(f"\n===== {name}: {shlex.join(command)}\n".encode() + said)
        if result.status not in ("passed", "missed"):
            result.output_tail = said.decode(errors="replace")[-TAIL:]
        return result


def tests_command(report: Path) -> list[str] | None:
    """Run pytest over the files that hold a gpu mark (importing the others would cost time), or None."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"), key=_importance)
    files = [str(path.relative_to(ROOT)) for path in paths if "mark.gpu" in path.read_text()]
    if not files:
        return None
    options = ["-m", "gpu", "-v", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    options += ["-p", "no:benchmark"]  # pytest-benchmark warns beside pytest-xdist, and warnings are errors
    options += ["-p", "benchmarks.pytest_deadline"]
    if find_spec("xdist"):
        options += ["-n", str(WORKERS), "--dist", "worksteal"]
    return [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *files]


def _importance(path: Path) -> tuple[bool, Path]:
    """Kernels last: they have most cases, and what does not fit any more is left out."""
    return path.parent.name == "kernels", path


def benchmark_command(name: str, device: str, report: Path, share: float, out: Path) -> list[str] | None:
    """The benchmark's own command, or None while there is no such benchmark."""
    script = ROOT / "benchmarks" / f"{SCRIPTS.get(name, name)}.py"
    if not script.exists():
        return None
    command = [sys.executable, str(script.relative_to(ROOT)), "--json", str(report), "--device", device]
    if device == "cpu":
        return [*command, "--quick"]
    command += ["--budget", f"{max(1.0, 0.9 * share - START_S):.0f}"]
    return (
        [*command, "--png", str(out / "step.png")] if name == "step" and find_spec("matplotlib") else command
    )


def run(command: list[str], limit: float, output: Path) -> int | None:
    """The exit status, or None where the limit ended it, with all that it started."""
    env = environment() | {"PYTHONUNBUFFERED": "1", UNTIL: str(time.time() + max(1.0, 0.95 * limit - 5.0))}
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
    left = json.loads(report.read_text()) if report.exists() else {"figures": []}
    figures: list[dict[str, Any]] = left["figures"]
    found = Result(name, "passed", figures=figures, details=left.get("details"))
    if code is None:
        found.status, found.detail = "timeout", "stopped at its share"
    elif code not in (MET, MISSED) or not figures:
        found.status, found.detail = "failed", f"{_ending(code)}, {len(figures)} figures"
    else:
        missed = [figure["name"] for figure in figures if figure["met"] is False]
        found.status, found.detail = "missed" if code else "passed", ", ".join(missed)
    return found


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
    reasons = [str(mark.get("message")) for case in skipped if (mark := case.find("skipped")) is not None]
    late = reasons.count(NO_TIME)
    counts = {
        "passed": passed,
        "failed": len(bad),
        "skipped": len(skipped),
        "no_time": late,
        "failures": names,
    }
    counts["reasons"] = sorted({reason for reason in reasons if reason != NO_TIME})
    detail = f"{passed} passed, {len(bad)} failed, {len(skipped)} skipped"
    detail += f", {late} of them because no time was left" if late else ""
    if code == NOTHING_FOUND or (code == 0 and passed == 0):
        return Result(name, "skipped", detail, tests=counts)
    if late and not code:
        return Result(name, "no time", detail, tests=counts)
    return Result(name, "failed" if code else "passed", detail, tests=counts)


def _ending(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
