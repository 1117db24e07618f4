"""The main job as a user runs it: resumed bit for bit, equal to its plain baseline, with all it promises.

Runs are made in this process and its forks, which have torch already; under torchrun and from the shell
tests/docs/test_readme.py starts it.
"""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.examples import scripts

SCRIPT = "train_gpt.py"
SMALL: list[object] = [
    "--width",
    32,
    "--layers",
    2,
    "--window",
    32,
    "--batch",
    8,
    "--steps",
    20,
    "--eval-batches",
    2,
]
HOW: dict[str, tuple[int, list[str]]] = {"one process": (1, []), "FSDP2": (2, []), "DDP": (2, ["--ddp"])}
pytestmark = pytest.mark.timeout(300)


def run(how: str, out: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Run to the end; the result file and what was printed."""
    world, extra = HOW[how]
    words = [*SMALL, *extra, "--out", out, *options]
    if world > 1:
        printed = scripts.run_on_ranks(world, (SCRIPT, *words))
    else:
        with redirect_stdout(io.StringIO()) as text:
            scripts.run(SCRIPT, *words)
        printed = text.getvalue()
    return json.loads((out / "result.json").read_text()), printed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One uninterrupted run of each kind, made when it is first asked for."""
    runs: dict[str, Any] = {}

    class Runs(dict):
        def __missing__(self, how: str) -> Any:
            out = tmp_path_factory.mktemp("whole")
            self[how] = (*run(how, out), out)
            return self[how]

    return Runs(runs)


@pytest.mark.parametrize("how", HOW)
def test_a_stopped_and_resumed_run_repeats_the_losses_bit_for_bit(
    how: str, whole: dict[str, Any], tmp_path: Path
) -> None:
    stop = {"one process": "1", "FSDP2": "7", "DDP": "13"}[how]
    first, _ = run(how, tmp_path, "--stop-at", stop)
    assert len(first["losses"]) == int(stop)
    second, printed = run(how, tmp_path)
    assert f"going on after step {stop}" in printed
    assert second["losses"] == whole[how][0]["losses"]
    assert second["validation"] == whole[how][0]["validation"]


@pytest.mark.parametrize("how", HOW)
def test_the_baseline_has_the_same_losses_within_rounding(
    how: str, whole: dict[str, Any], tmp_path: Path
) -> None:
    plain, _ = run(how, tmp_path, "--baseline")
    assert plain["losses"] == pytest.approx(whole[how][0]["losses"], rel=2e-6)
    assert len(plain["losses"]) == 20


def test_the_ways_to_run_it_agree_within_rounding_and_learn(whole: dict[str, Any]) -> None:
    alone = whole["one process"][0]["losses"]
    assert whole["DDP"][0]["losses"] == pytest.approx(whole["FSDP2"][0]["losses"], rel=1e-5)
    assert alone[0] == pytest.approx(whole["FSDP2"][0]["losses"][0], rel=0.05)  # other windows in a batch
    assert alone[0] > 5
    assert alone[-1] < alone[0] - 0.4


def test_resuming_across_the_end_of_an_epoch(tmp_path: Path) -> None:
    how, short = "one process", ["--bytes", "1800"]  # 7 batches of 8 windows: 20 steps are nearly 3 epochs
    unbroken, _ = run(how, tmp_path / "whole", *short)
    for stop in ("7", "12"):  # at an epoch's end, and in the one after it
        run(how, tmp_path / "parts", *short, "--stop-at", stop)
    resumed, _ = run(how, tmp_path / "parts", *short)
    assert resumed["losses"] == unbroken["losses"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "bogus"], "--device='bogus' names no device"),
        (["--save-every", "0"], "argument --save-every: invalid positive value: '0'"),
        (["--ddp"], "--ddp needs ranks: torchrun"),
        (["--width", "30"], "--width 30: give a multiple of 8"),
    ],
)
def test_bad_options_are_one_line_before_any_step(options: list[str], words: str, tmp_path: Path) -> None:
    assert words in scripts.refusal(SCRIPT, *SMALL, "--out", tmp_path, *options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [[], ["--baseline"]])
def test_too_little_text_is_one_line_before_any_step(kind: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="100 bytes make no batch"):
        run("one process", tmp_path, "--bytes", "100", *kind)
    assert not list(tmp_path.iterdir())


def test_a_killed_run_goes_on_from_its_last_checkpoint(whole: dict[str, Any], tmp_path: Path) -> None:
    words = map(str, [scripts.EXAMPLES / SCRIPT, *SMALL, "--out", tmp_path, "--save-every", 2])
    running = subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    running.send_signal(signal.SIGKILL)
    running.wait()
    result, printed = run("one process", tmp_path)
    assert "going on after step" in printed
    assert result["losses"] == whole["one process"][0]["losses"]


def test_what_it_leaves_behind(whole: dict[str, Any]) -> None:
    result, printed, out = whole["FSDP2"]
    assert 3.0 < result["unigram"] < 3.5
    assert 2.2 < result["bigram"] < 2.7
    report = result["report"]
    assert report["world"] == 2
    assert len(report["answers"]) == 7
    assert report["parts"]["communication"]["bytes"] > 0
    for words in ("1 batch ready", "7 peak memory", "validation loss", "tokens/s"):
        assert words in printed
    for picture in ("lanes.png", "loss.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in out.glob("step-*")] == ["step-20"]
    assert list(out.glob("step-20/*.safetensors"))


def test_a_finished_run_says_that_nothing_is_left(whole: dict[str, Any]) -> None:
    _, _, out = whole["one process"]
    _, printed = run("one process", out)
    assert "nothing left to do" in printed


def test_the_example_stays_a_tutorial() -> None:
    assert len((scripts.EXAMPLES / SCRIPT).read_text().splitlines()) < 200
