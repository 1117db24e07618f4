"""The command runs the parts that are asked for, and writes report and picture."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "input.py"


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=env)


def test_a_part_by_itself(tmp_path: Path) -> None:
    report, picture = tmp_path / "input.json", tmp_path / "input.png"
    ran = _run("overhead", "--quick", "--device", "cpu", "--json", str(report), "--png", str(picture))
    assert ran.returncode in (0, 3), ran.stdout + ran.stderr  # a busy machine may well miss a goal
    figures = json.loads(report.read_text())["figures"]
    assert [figure["unit"] for figure in figures] == ["us"] * 5 + ["ms"] * 4
    assert all(figure["value"] > 0 for figure in figures)
    assert all(figure["met"] is not False for figure in figures) is (ran.returncode == 0)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_part_that_there_is_not() -> None:
    ran = _run("jpegs")
    assert ran.returncode == 2
    assert "PART='jpegs': choose from jpeg, tokens, cold, overlap, overhead" in ran.stderr
