"""The rules that hold for every test, on small test files of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

MARKED = """
import pytest

@pytest.mark.gpu
def test_gpu(): pass

@pytest.mark.netns
def test_netns(): pass

@pytest.mark.timeout(5)
def test_plain(): pass
"""

LANES = """
import threading
import pytest
from overlapkit.lane import Lane

kept = []

def test_closed():
    with Lane("closed") as lane:
        lane.submit(lambda: None).wait()

def test_dropped_in_a_cycle():
    lane = Lane("dropped")
    lane.submit(lambda: None).wait()
    lane.itself = lane

def test_left_behind():
    kept.append(Lane("forgotten"))
    kept[0].submit(lambda: None).wait()

def test_after_it():
    assert any(thread.name == "overlapkit-forgotten" for thread in threading.enumerate())
"""

LOCKS = """
import threading
from overlapkit.input import mixture

def made():
    exec("a = threading.Lock()\\nb = threading.Lock()", vars(mixture))
    return mixture.a, mixture.b

def test_one_order():
    a, b = made()
    with a, b: pass

def test_the_other():
    a, b = made()
    with b, a: pass
"""


@pytest.fixture
def run(tmp_path):
    """Runs pytest on a test file, with this repository's conftest and settings; returns its output."""

    def run(body: str, *options: str, path: str | None = None) -> str:
        (tmp_path / "tests").mkdir()
        for name in ("conftest.py", "lock_order.py"):
            shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        (tmp_path / "tests" / "test_it.py").write_text(body)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
        env = os.environ | {"COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
        env |= {} if path is None else {"PATH": path}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True).stdout

    return run


def test_marks_skip_with_a_reason(run, tmp_path):
    said = run(MARKED, path=str(tmp_path / "nowhere"))
    assert "1 passed, 2 skipped" in said
    assert "needs a CUDA device" in said
    assert "needs the ip command" in said or "needs root" in said


def test_the_suite_runs_without_pytest_timeout(run):
    said = run(MARKED, "-p", "no:timeout", "-k", "plain")
    assert "1 passed" in said
    assert "timeout: " not in said


def test_a_lane_left_behind_fails_its_own_test_only(run):
    said = run(LANES)
    assert "4 passed, 1 error" in said
    assert "ERROR tests/test_it.py::test_left_behind - Failed: left behind: overlapkit-forgotten" in said


def test_locks_in_two_orders_fail_the_test_that_shows_it(run):
    said = run(LOCKS)
    assert "2 passed, 1 error" in said
    assert "ERROR tests/test_it.py::test_the_other - Failed: these locks are taken in" in said
