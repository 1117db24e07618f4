"""A checkout beside torch, its Triton, numpy, safetensors, rich and pytest alone, as on a lent machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import overlapkit as ok
from overlapkit.checkpoint import CheckpointError, hashing, verify

ROOT = Path(__file__).parent.parent
ABSENT = ("msgspec", "typer", "xxhash", "torchdata", "nvidia", "matplotlib", "fsspec", "pynvml", "hypothesis")

WITHOUT = (
    "tests/benchmarks/test_gpu.py",  # these three only speak of the mark
    "tests/test_bare_checkout.py",
    "tests/test_conftest.py",
    "tests/input/images/test_loader.py",
    "tests/measure/test_tracing.py",
)

LOOP = """
import sys
import torch
from torch import nn
import overlapkit as ok

for name in ok.__all__:
    getattr(ok, name)
torch.manual_seed(0)
model = nn.Linear(3, 4)
optimizer = ok.AdamW(model.parameters())
meter = ok.StepMeter(model, optimizer)
with ok.Checkpointer(sys.argv[1]) as checkpointer:
    for x in ok.DeviceLoader([torch.ones(2, 3)] * 3, "cpu"):
        with meter.step():
            model(x).sum().backward()
            optimizer.step()
    checkpointer.save(1, {"model": model}, block=True)
    before = model.weight.clone()
    with torch.no_grad():
        model.weight.zero_()
    checkpointer.restore({"model": model})
assert torch.equal(model.weight, before)
str(meter.report())
try:
    from overlapkit.measure import explain
except ModuleNotFoundError as error:
    assert error.name == "msgspec"
else:
    raise SystemExit("explain needs msgspec")
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds none of `ABSENT`, and a folder of stand-ins for them."""
    for name in ABSENT:
        hidden = tmp_path / "hidden" / f"{name}.py"
        hidden.parent.mkdir(exist_ok=True)
        hidden.write_text(f"raise ModuleNotFoundError('not installed', name={name!r})")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "hidden"), str(ROOT / "src")])}


def test_a_whole_loop_runs_and_what_it_saves_is_read_everywhere(bare: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOOP, str(tmp_path / "saved")]
    ran = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    assert '"hash": "blake2b_128"' in (tmp_path / "saved" / "step-1" / "manifest.json").read_text()
    assert verify(tmp_path / "saved" / "step-1") is None
    model = nn.Linear(3, 4)
    with ok.Checkpointer(tmp_path / "saved") as checkpointer:
        assert checkpointer.restore({"model": model}) == 1
    file = tmp_path / "saved" / "step-1" / "rank-00000.safetensors"
    with file.open("r+b") as data:
        data.seek(-1, os.SEEK_END)
        data.write(b"\xff")
    with ok.Checkpointer(tmp_path / "saved") as checkpointer, pytest.raises(CheckpointError):
        checkpointer.restore({"model": model}, 1)


def test_checksums_that_cannot_be_made_here_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 4)
    with ok.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model}, block=True)
        monkeypatch.delitem(hashing.HASHES, "xxh3_128")
        with pytest.raises(CheckpointError, match="pip install xxhash"):
            checkpointer.restore({"model": model}, 1)


def test_every_file_with_a_gpu_mark_is_collected(bare: dict[str, str]) -> None:
    """Except where its own subject is absent, of images DALI, of traces msgspec: they are skipped."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    names = [str(path.relative_to(ROOT)) for path in files]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--collect-only", "-p", "no:cacheprovider"]
    command += ["-p", "no:timeout", "-p", "no:xdist", "-p", "no:hypothesispytest", *names]
    ran = subprocess.run(command, env=bare, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stdout
    for name in names:
        assert (f"{name}::" in ran.stdout) == (name not in WITHOUT), name


if torch.cuda.is_available():  # what it hides is hidden for GPU machines, which have the real thing
    pytestmark = pytest.mark.skip("for machines without a GPU")
