"""The whole-step benchmark runs both variants and reports every figure, measured or not."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step.py"


def test_a_short_run_reports_every_figure(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--steps", "3", "--rounds", "1", "--device", "cpu"]
    ran = subprocess.run(
        [*command, "--json", str(tmp_path / "step.json")],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode in (0, 3), ran.stdout + ran.stderr  # one short run may well miss the goal
    figures = {
        figure["name"]: figure for figure in json.loads((tmp_path / "step.json").read_text())["figures"]
    }
    assert list(figures) == [f"{name}, one process" for name in ("step", "exposed share", "peak memory")]
    assert figures["step, one process"]["ratio"] > 0
    assert figures["step, one process"]["met"] is (ran.returncode == 0)
    assert 0 <= figures["exposed share, one process"]["value"] < 100
    assert figures["exposed share, one process"]["ratio"] is None  # a plain DataLoader publishes no waits
    assert figures["peak memory, one process"]["value"] > 100
