"""The examples by themselves, as a user runs them, where there is a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLES

COMMANDS = {
    "train_images.py": ["--data", "{tmp}/digits"],
    "finetune_transformers.py": ["--data", "{tmp}/tokens", "--megabytes", "0.1"],
    "migrate/step_6_checkpointer.py": [],
}
NEEDS = {
    "train_images.py": ("nvidia.dali", "sklearn", "PIL"),
    "finetune_transformers.py": ("transformers", "tokenizers"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("script", COMMANDS)
def test_it_runs(script: str, tmp_path: Path) -> None:
    for package in NEEDS.get(script, ()):
        pytest.importorskip(package, reason="is in the extra examples")
    words = [word.format(tmp=tmp_path) for word in COMMANDS[script]]
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *words, "--steps", "5", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    saved = json.loads((tmp_path / "out" / "result.json").read_text())
    report = saved.get("report") or json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["device"].startswith("cuda")
