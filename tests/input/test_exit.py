"""A process that ends in the middle of a pass ends at once, with its own error and exit code."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

SETUP = """
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
from overlapkit.input import DeviceLoader

WORKERS = int(sys.argv[1])

if __name__ == "__main__":
    data = DataLoader(TensorDataset(torch.arange(4000)), batch_size=2, num_workers=WORKERS,
                      persistent_workers=WORKERS > 1)
    loader = DeviceLoader(data, "cpu", depth=3)
    passing = iter(loader)
    next(passing)
"""


def run(body: str, workers: int, *, interrupt: bool = False) -> tuple[int, str]:
    script = SETUP + textwrap.indent(textwrap.dedent(body), "    ")
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if interrupt:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    return child.returncode, errors


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_end_of_the_script(workers: int) -> None:
    assert run("pass", workers) == (0, "")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_uncaught_error(workers: int) -> None:
    code, errors = run("for batch in loader:\n    raise LookupError('mine')", workers)
    assert code == 1
    assert errors.strip().endswith("LookupError: mine")
    assert errors.count("Traceback") == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_ctrl_c(workers: int) -> None:
    body = "print('ready', flush=True)\nfor batch in loader:\n    time.sleep(0.01)"
    code, errors = run(body, workers, interrupt=True)
    assert code in (-signal.SIGINT, 130)
    assert "KeyboardInterrupt" in errors.splitlines()[-1]


def test_nothing_is_read_for_a_loop_that_has_ended() -> None:
    """Each batch takes a tenth of a second, and ten more were asked for."""
    code, errors = run(
        """
        def slow():
            for number in range(100):
                time.sleep(0.1)
                print(number, file=sys.stderr, flush=True)
                yield number

        passing = iter(DeviceLoader(slow, "cpu", depth=10))
        next(passing)
        print("end", file=sys.stderr, flush=True)
        """,
        0,
    )
    assert code == 0
    assert len(errors.partition("end")[2].split()) <= 1  # the one that was being read
