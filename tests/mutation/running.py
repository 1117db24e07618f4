"""Tests run in a fork of this process, which has torch at hand: a mutation costs its tests, no imports."""

import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutation.reporting import WHERE

WARM = ("numpy", "pytest", "rich", "safetensors.torch", "torch", "torch.distributed.tensor", "typer")
"""Imported once, before the first fork."""

_ENDS = (0, 3, 4, 5)
"""pytest's exit statuses without a failed test: well, an error of its own, wrong usage, no tests."""


@dataclass
class Outcome:
    """How a run of tests ended.

    Attributes:
        failed: The first test that failed, or None.
        late: It ran into its time limit, or the whole run did.
        seconds: What the run took.
        passed: Seconds of each test that passed.
        trouble: What pytest wrote, where it did not get as far as a test.
    """

    failed: str | None = None
    late: bool = False
    seconds: float = 0.0
    passed: dict[str, float] = field(default_factory=dict)
    trouble: str = ""


def warm() -> None:
    """Import what all runs need, but nothing of ours: that comes from each run's own copy."""
    for name in WARM:
        importlib.import_module(name)


class Run:
    """Tests under way in a child process, in a process group of their own.

    Args:
        at: The copy of the checkout they run in.
        arguments: Of pytest.
        limit_s: After this the run is ended: its test is late.
    """

    def __init__(self, at: Path, arguments: Sequence[str], limit_s: float) -> None:
        self._report = at / "mutation-report.jsonl"
        self._said = at / "mutation-output.txt"
        self._report.write_text("")
        self._begun = time.monotonic()
        self._limit_s = limit_s
        self._late = False
        self._status: int | None = None
        self._child = os.fork()
        if self._child == 0:
            _be_pytest(at, arguments, self._report, self._said)
        with contextlib.suppress(OSError):  # the child does so, too: whoever ends it may come before it
            os.setpgid(self._child, self._child)

    def is_over(self) -> bool:
        """Whether the child has ended; ends it where it is late."""
        if self._status is None:
            if time.monotonic() - self._begun > self._limit_s:
                self._late = True
                _end(self._child)
            child, status = os.waitpid(self._child, 0 if self._late else os.WNOHANG)
            if child:
                self._status = os.waitstatus_to_exitcode(status)
                _end(self._child)  # ranks and workers that are left
        return self._status is not None

    def outcome(self) -> Outcome:
        """How it ended."""
        found = Outcome(seconds=time.monotonic() - self._begun)
        began: str | None = None
        for line in map(json.loads, self._report.read_text().splitlines()):
            began = line.get("began", began)
            if line.get("outcome") == "failed" and found.failed is None:
                found.failed, found.late = line["test"], line["late"]
            elif line.get("phase") == "call" and line["outcome"] == "passed":
                found.passed[line["test"]] = line["seconds"]
        if found.failed is None and (self._late or self._status not in _ENDS):
            found.failed, found.late = began, self._late  # ended, died or interrupted in that test
        if found.failed is None and self._status != 0:
            found.trouble = self._said.read_text()[-3000:]
        return found


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _be_pytest(at: Path, arguments: Sequence[str], report: Path, said: Path) -> None:
    """The child's life."""
    status = 70
    try:
        os.setpgid(0, 0)
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(at)
        for name in [
            one for one in sys.modules if one.partition(".")[0] in ("tests", "overlapkit", "__main__")
        ]:
            del sys.modules[name]
        sys.path[:0] = [str(at / "src"), str(at)]
        for name in [one for one in os.environ if one.startswith("PYTEST_")]:
            del os.environ[name]  # this may run in a worker of pytest-xdist, and its child is none
        os.environ.update({"PYTHONPATH": f"{at / 'src'}{os.pathsep}{at}", WHERE: str(report)})
        import pytest

        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        status = int(
            pytest.main(["-q", "-p", "tests.mutation.reporting", "-p", "no:cacheprovider", *arguments])
        )
        sys.stdout.flush()
    finally:
        os._exit(status)


def each(jobs: Sequence[Any], places: Sequence[Any], begin: Any) -> Iterator[tuple[Any, Any, Outcome]]:
    """Carry out jobs, as many at once as there are places; yields (job, place, outcome) as they end.

    Args:
        jobs: Whatever `begin` takes.
        places: What one job has for itself at a time.
        begin: `begin(job, place)` starts a Run.
    """
    waiting, free = list(reversed(jobs)), list(places)
    under_way: list[tuple[Any, Any, Run]] = []
    try:
        while waiting or under_way:
            while waiting and free:
                job, place = waiting.pop(), free.pop()
                under_way.append((job, place, begin(job, place)))
            for one in [one for one in under_way if one[2].is_over()]:
                under_way.remove(one)
                yield one[0], one[1], one[2].outcome()
                free.append(one[1])
            time.sleep(0.02)
    finally:
        for _, _, run in under_way:
            _end(run._child)


def emptied(folder: Path) -> Path:
    """The folder, without what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder
