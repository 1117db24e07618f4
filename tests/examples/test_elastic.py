"""examples/elastic.sh, to the end: a rank is killed, and the job goes on from its last checkpoint."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "elastic.sh"
SMALL = [
    *("--width", "32", "--layers", "1", "--window", "32", "--batch", "4"),
    *("--steps", "300", "--save-every", "20"),
]


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_a_job_goes_on_with_one_rank_where_two_began(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path), *SMALL],
        env=environment,
        capture_output=True,
        text=True,
        timeout=880,
    )
    logs = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert "killed one of two ranks" in done.stdout
    assert "it went on, and reached the end" in done.stdout
    began = re.findall(r"^training on (\d) rank\(s\) from step (\d+)$", logs, re.MULTILINE)
    assert ("2", "0") in began
    ranks, step = next(one for one in began if one[0] == "1" and one[1] != "0")
    assert int(step) % 20 == 0
    # the survivor made the steps that were left, and every one of them
    (losses,) = re.findall(r"^losses (.*)$", (tmp_path / "first.log").read_text(), re.MULTILINE)
    assert len(losses.split()) == 300 - int(step)
    assert (tmp_path / "checkpoints" / "step-300").is_dir()
