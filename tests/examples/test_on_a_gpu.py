"""The examples by themselves, as a user runs them, where there is a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLES

COMMANDS = {
    "train_gpt.py": [],
    "train_images.py": ["--data", "{tmp}/digits"],
    "finetune_transformers.py": ["--data", "{tmp}/tokens", "--megabytes", "0.1"],
    "migrate/step_6_checkpointer.py": [],
    "lightning_module.py": [],
    "accelerate_loop.py": [],
    "torchtitan_storage.py": [],
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
    assert "rank 0 of 1 · cuda" in ran.stdout
