"""Processes beside each other and inside one another: workers, two jobs, an interpreter that ends."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import overlapkit as ok
from overlapkit.checkpoint import describe, verify


class Tripled(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.full((3,), 3.0 * at)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_start_while_lanes_are_at_work(tmp_path: Path, start: str) -> None:
    """A save is written, another loader reads, the meter logs: workers that start then see none of it."""
    model = torch.nn.Linear(3, 1)
    optimizer = ok.AdamW(model.parameters())
    told: dict[int, float] = {}
    first = ok.DeviceLoader([torch.ones(2, 3)] * 50, "cpu", depth=3)
    meter = ok.StepMeter(
        model, optimizer, first, on_log=[lambda step, values: told.update({step: values["n"]})]
    )
    with ok.Checkpointer(tmp_path) as checkpointer:
        state = {"model": model, "optimizer": optimizer}
        passing = iter(first)
        next(passing)  # three more are read ahead meanwhile
        checkpointer.save(1, state)
        meter.log(n=torch.tensor(1.0))
        data = DataLoader(Tripled(), batch_size=4, num_workers=2, multiprocessing_context=start)
        with meter.step():
            seen = [batch[:, 0].tolist() for batch in ok.DeviceLoader(data, "cpu")]
            model(next(passing)).sum().backward()
            optimizer.step()
        checkpointer.save(2, state)
        del passing
    meter.close()
    assert seen == [[3.0 * at for at in range(first, first + 4)] for first in (0, 4, 8)]
    assert told == {0: 1.0}
    verify(tmp_path, 1)
    verify(tmp_path, 2)


JOB = """
import sys, torch, overlapkit as ok
value, folder = float(sys.argv[1]), sys.argv[2]
model = torch.nn.Linear(200, 200)
state = {"model": model, "value": value}
with ok.Checkpointer(folder, keep=None) as checkpointer:
    print("ready", flush=True)
    sys.stdin.readline()
    for step in range(1, 31):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value + step)
        checkpointer.save(step, state, block=step % 3 == 0)
        checkpointer.wait()
"""


def test_two_jobs_in_one_directory_leave_whole_checkpoints_of_one_or_the_other(tmp_path: Path) -> None:
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, str(1000 * (number + 1)), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n", job.stderr and job.stderr.read()
    for job in jobs:
        job.stdin.write("go\n")  # type: ignore[union-attr]
        job.stdin.flush()  # type: ignore[union-attr]
    errors = [job.communicate(timeout=100)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], errors
    state: dict[str, Any] = {"model": torch.nn.Linear(200, 200), "value": 0.0}
    with ok.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == list(range(1, 31))
        for step in checkpointer.steps():
            checkpointer.verify(step)
            assert checkpointer.restore(state, step) == step
            values = {value for p in state["model"].parameters() for value in p.unique().tolist()}
            assert values == {state["value"] + step}
            assert state["value"] in (1000.0, 2000.0)
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("step-")) == []


END = """
import sys, threading, torch, overlapkit as ok
from torch.utils.data import DataLoader, TensorDataset
from overlapkit.checkpoint.disk import Disk

class Slow(Disk):
    def sync(self, fd):
        threading.Event().wait(0.3)
        super().sync(fd)

if __name__ == "__main__":
    ok.Checkpointer._disk = Slow()
    model = torch.nn.Linear(4, 1)
    optimizer = ok.AdamW(model.parameters())
    data = DataLoader(TensorDataset(torch.ones(400, 4)), batch_size=4, num_workers=1)
    loader = ok.DeviceLoader(data, "cpu")
    checkpointer = ok.Checkpointer(sys.argv[1])
    meter = ok.StepMeter(model, optimizer, loader, checkpointer, on_log=[lambda s, v: print("told", v["n"])])
    for step, (x,) in enumerate(meter.steps(loader), start=1):
        model(x).sum().backward()
        optimizer.step()
        meter.log(n=torch.tensor(float(step)))
        checkpointer.save(step, {"model": model, "optimizer": optimizer, "loader": loader})
        if step == 2:
            how = sys.argv[2]
            if how == "error":
                raise LookupError("mine")
            if how == "exit":
                sys.exit(3)
            break
"""


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("exit", 3), ("error", 1)])
def test_an_interpreter_that_ends_in_the_middle_of_everything_loses_nothing(
    tmp_path: Path, how: str, code: int
) -> None:
    """Nobody closes anything: the save in flight is whole, logged values arrive, the status is one's own."""
    script = tmp_path / "script.py"
    script.write_text(END)
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run"), how],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == code, ran.stderr
    assert ran.stderr.count("Traceback") == (how == "error")
    assert [line for line in ran.stdout.splitlines() if line] == ["told 1.0", "told 2.0"]
    verify(tmp_path / "run")
    assert describe(tmp_path / "run").step == 2
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-1", "step-2"]
