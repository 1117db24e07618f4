"""The parts of benchmarks/gpu.py: how each is started, what it may take, and what became of it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
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

PROCESSES = min(6, os.cpu_count() or 1)
"""Of pytest, among which the tests are dealt out: each compiles kernels on one core, and has a context on the
GPU, so that what breaks one costs the others nothing."""

FAILED_TESTS, NOTHING_FOUND = 1, 5  # pytest's exit codes
TAIL = 4000  # characters of output that the JSON keeps of each process of a part that did not pass
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
        if name == "tests":
            reports = [Path(folder) / f"junit-{number}.xml" for number in range(PROCESSES)]
            commands, missing = tests_commands(reports), "no test is marked gpu"
        else:
            reports = [Path(folder) / "report.json"]
            commands = benchmark_command(name, device, reports[0], share, out)
            missing = "it has no script yet"
        if not commands:
            return Result(name, "absent", missing)
        if share < LEAST_S:
            return Result(name, "no time", f"{max(share, 0):.0f} s of the budget were left for it")
        began = time.monotonic()
        outputs = [Path(folder) / f"output-{number}" for number in range(len(commands))]
        codes = run(commands, share, outputs)
        try:
            result = (_tests_result if name == "tests" else _benchmark_result)(name, codes, reports)
        except Exception as error:  # whatever a part left behind, the parts after it still run
            result = Result(name, "failed", f"its report cannot be read: {error!r}")
        result.seconds, result.share_s = round(time.monotonic() - began, 1), round(share, 1)
        said = [output.read_bytes()[-LOG_TAIL // len(outputs) :] for output in outputs]
        with (out / "gpu.log").open("ab") as file:
            for command, words in zip(commands, said, strict=True):
                file.write(f"\n===== {name}: {shlex.join(command)}\n".encode() + words)
        if result.status not in ("passed", "missed"):
            result.output_tail = "\n".join(words.decode(errors="replace")[-TAIL:] for words in said)
        return result


def tests_commands(reports: Sequence[Path]) -> list[list[str]]:
    """Processes of pytest over the files that hold a gpu mark: importing the others would cost time."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"), key=_importance)
    files = [str(path.relative_to(ROOT)) for path in paths if "mark.gpu" in path.read_text()]
    if not files:
        return []
    options = ["-m", "gpu", "-v", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    options += ["-W", "default"]  # what only a GPU makes others warn of is told, and hides no result
    command = [sys.executable, "-m", "pytest", *options, "-p", "benchmarks.pytest_deadline", *files]
    return [
        [*command, f"--deal={number}/{len(reports)}", f"--junitxml={report}"]
        for number, report in enumerate(reports)
    ]


def _importance(path: Path) -> tuple[bool, Path]:
    """Kernels last: they have most cases, and what does not fit any more is left out."""
    return path.parent.name == "kernels", path


def benchmark_command(name: str, device: str, report: Path, share: float, out: Path) -> list[list[str]]:
    """The benchmark's own command; none while there is no such benchmark."""
    script = ROOT / "benchmarks" / f"{SCRIPTS.get(name, name)}.py"
    if not script.exists():
        return []
    command = [sys.executable, str(script.relative_to(ROOT)), "--json", str(report), "--device", device]
    if device == "cpu":
        return [[*command, "--quick"]]
    command += ["--budget", f"{max(1.0, 0.9 * share - START_S):.0f}"]
    if name == "step" and find_spec("matplotlib"):
        command += ["--png", str(out / "step.png")]
    return [command]


def run(commands: Sequence[list[str]], limit: float, outputs: Sequence[Path]) -> list[int | None]:
    """Side by side: the exit status of each, None where the limit ended it, with all that it started."""
    env = environment() | {"PYTHONUNBUFFERED": "1", UNTIL: str(time.time() + max(1.0, 0.95 * limit - 5.0))}
    end = time.monotonic() + limit
    with ExitStack() as stack:
        processes = []
        for command, output in zip(commands, outputs, strict=True):
            to: Any = stack.enter_context(output.open("wb"))
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=to, stderr=to, process_group=0
            )
            stack.callback(_end_group, process)
            processes.append(process)
        return [_status(process, end) for process in processes]


def _status(process: subprocess.Popen[bytes], end: float) -> int | None:
    with suppress(subprocess.TimeoutExpired):
        return process.wait(max(0.0, end - time.monotonic()))
    return None


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a part, its own workers included: they would hold memory of the GPU."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _benchmark_result(name: str, codes: Sequence[int | None], reports: Sequence[Path]) -> Result:
    (code,), (report,) = codes, reports
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


def _tests_result(name: str, codes: Sequence[int | None], reports: Sequence[Path]) -> Result:
    """Of all processes together; one that ended without a report loses its own tests alone."""
    cases = [
        case for report in reports if report.exists() for case in ElementTree.parse(report).iter("testcase")
    ]
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    reasons = [str(mark.get("message")) for case in cases if (mark := case.find("skipped")) is not None]
    late, passed = reasons.count(NO_TIME), len(cases) - len(bad) - len(reasons)
    counts: dict[str, Any] = {
        "passed": passed,
        "failed": len(bad),
        "skipped": len(reasons),
        "no_time": late,
        "failures": [f"{case.get('classname')}::{case.get('name')}" for case in bad],
        "reasons": sorted({reason for reason in reasons if reason != NO_TIME}),
    }
    detail = f"{passed} passed, {len(bad)} failed, {len(reasons)} skipped"
    detail += f", {late} of them because no time was left" if late else ""
    found = Result(name, "passed", detail, tests=counts)
    lost = [_ending(code) for code, report in zip(codes, reports, strict=True) if not report.exists()]
    if lost:
        found.detail += f"; without a report: {', '.join(lost)}; the log ends in the tests that ran"
    if None in codes:
        found.status = "timeout"
    elif lost or bad or not {*codes} <= {0, FAILED_TESTS, NOTHING_FOUND}:
        found.status = "failed"
    elif late:
        found.status = "no time"
    elif passed == 0:
        found.status = "skipped"
    return found


def _ending(code: int | None) -> str:
    if code is None:
        return "stopped at its share"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
