"""The trace benchmark measures a made trace, and reports the peer as not measured where it is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

from made_trace import write_trace
from overlapkit.measure import explain

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "explain.py"
SHORT = """
import sys
from pathlib import Path
import explain
explain.find_spec = lambda name: None
explain.MB = 10_000
sys.exit(explain.main())
"""


def test_a_short_run(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        SHORT,
        "--quick",
        "--traces",
        str(tmp_path),
        "--json",
        str(tmp_path / "r"),
    ]
    environment = {**os.environ, "PYTHONPATH": f"{SCRIPT.parent}:{os.environ.get('PYTHONPATH', '')}"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert "pip install holistictraceanalysis" in ran.stderr
    figures = {figure["name"]: figure for figure in json.loads((tmp_path / "r").read_text())["figures"]}
    assert figures["made, 5 MB: read"]["value"] > 0
    memory = next(figure for name, figure in figures.items() if name.endswith("peak memory"))
    assert 0 < memory["value"] < 2
    assert memory["met"]


def test_the_made_trace_has_known_lanes(tmp_path: Path) -> None:
    (one,) = explain(write_trace(tmp_path / "t.json", 1)).trace.ranks
    assert one.lanes.compute == 600 * 17_000
    assert one.lanes.communication == 12 * 300_000
    # beside each collective but the last: 16 us of one kernel, 14 whole ones, 1 us of another
    hidden = 11 * (16 + 14 * 17 + 1) * 1_000
    assert one.lanes.communication - one.lanes.exposed_communication == hidden
    (step,) = one.steps
    assert (step.number, step.record.forward, step.record.backward) == (0, 200 * 17_000, 400 * 17_000)
