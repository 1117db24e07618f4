"""Every code block of the README and of CONTRIBUTING runs as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = "--width 32 --layers 1 --window 16 --batch 4 --steps 2 --eval-batches 0"
SHORTENED = {  # the commands that take minutes: everything but their length is as written
    "make demo": ["make", "demo", f"ARGS={SMALL} --out {{tmp}}"],
    "make test": ["make", "test", "ARGS=tests/test_device.py -p no:cacheprovider"],
    "make check": ["make", "--dry-run", "check"],
}


def blocks(name: str) -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / name).read_text())


def commands() -> list[str]:
    shell = [text for name in ("README.md", "CONTRIBUTING.md") for kind, text in blocks(name) if kind == "sh"]
    return sorted({line for text in shell for line in text.splitlines()})


def test_every_block_says_what_it_is_and_is_run_here() -> None:
    kinds = {kind for name in ("README.md", "CONTRIBUTING.md") for kind, _ in blocks(name)}
    assert kinds == {"python", "sh"}
    assert len(commands()) == 6


@pytest.mark.parametrize("number", range(sum(kind == "python" for kind, _ in blocks("README.md"))))
def test_python_blocks(number: int, tmp_path: Path) -> None:
    code = [text for kind, text in blocks("README.md") if kind == "python"][number]
    for again in (False, True):  # the second time it goes on from the checkpoint
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert ran.returncode == 0, ran.stderr
        assert "1 batch ready" in ran.stdout
        assert ("steps 1..3 " if again else "steps 1..63 ") in ran.stdout  # the epoch's last four batches
        saved = sorted(path.name for path in (tmp_path / "runs/a").glob("step-*"))
        assert saved == ["step-20", "step-40", "step-60"]


@pytest.mark.parametrize("line", commands())
def test_shell_blocks(line: str, tmp_path: Path) -> None:
    words = SHORTENED.get(line) or [*shlex.split(line), *shlex.split(SMALL), "--out", "{tmp}"]
    if words[0] == "make" and not (ROOT / ".venv").exists():
        pytest.skip("make would build .venv first: run the tests through `make test`")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    ran = subprocess.run(
        [word.replace("{tmp}", str(tmp_path)) for word in words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    if "train_gpt" in line or "demo" in line:
        assert (tmp_path / "result.json").exists()
