"""The benchmark of kernels: floors by hand, a short run in the interpreter, the GPU's half without one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import kernel_speed
from budget import Budget
from figure import Figure
from kernel_cases import CASES, nbytes

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernels.py"
CPU = torch.device("cpu")


def test_floors_are_each_input_read_once_and_each_result_written_once() -> None:
    d, n, one = 128, 16, 2 * 16 * 128  # bytes of one tensor of 16 rows in half precision
    weight = 2 * d
    for name, forward, backward in (
        ("rms_norm", 2 * one + weight, 3 * one + 2 * weight),  # dy, x, w; dx, dw
        ("rms_norm with residual", 4 * one + weight, 4 * one + 2 * weight),
        ("layer_norm", 2 * one + 2 * weight, 3 * one + 3 * weight),  # the bias is not needed again
        ("swiglu", 3 * one, 5 * one),
        ("swiglu_packed", 3 * one, 5 * one),
        ("softmax", 2 * one, 3 * one),
    ):
        case = CASES[name](n, d, torch.float16, CPU)
        floors = case.floors(kernel_speed.outputs_of(case.ours(*case.inputs)))
        assert floors == {"forward": forward, "backward": backward, "both": forward + backward}, name
    case = CASES["cross_entropy"](n, d, torch.float16, CPU)
    assert case.floors([]) == {"both": 2 * one + 8 * n}


@pytest.mark.parametrize("name", CASES)
def test_ours_and_torchs_are_one_function(name: str) -> None:
    if name == "dropout_add":
        pytest.skip("its masks are drawn by different generators")
    case = CASES[name](16, 4096 if name == "rope" else 128, torch.float32, CPU)
    exact = [x.detach().clone().requires_grad_(x.requires_grad) for x in case.inputs]
    ours, torchs = case.ours(*case.inputs), case.peers["torch"](*exact)
    torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)


def test_a_short_run_reports_bytes(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "swiglu", "cross_entropy", "--quick", "--device", "cpu"]
    ran = subprocess.run(
        [*command, "--json", str(tmp_path / "kernels.json")],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode in (0, 3), ran.stdout + ran.stderr
    figures = json.loads((tmp_path / "kernels.json").read_text())["figures"]
    found = {figure["name"].split(",")[0]: figure for figure in figures if figure["value"] is not None}
    assert list(found) == ["swiglu forward 64 x 1", "swiglu backward 64 x 1", "cross_entropy 4 x 32"]
    assert [round(figure["value"], 2) for figure in found.values()] == [1.0, 1.0, 1.5]
    assert all(figure["goal"] for figure in found.values())
    for figure in found.values():  # where Liger is installed, it is in the same interpreter
        assert figure["peer"] in (None, "liger")


def test_the_gpus_half_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants, floors and goals; times mean nothing here."""
    monkeypatch.setattr(kernel_speed, "PEERS", dict.fromkeys(("liger", "quack"), "no_such_package"))

    def raises(*args: Any) -> Any:
        raise TypeError("another version")

    case = CASES["swiglu"](4, 64, torch.float32, CPU)
    case.peers["broken"] = raises
    figures = kernel_speed.case_figures("swiglu 4 x 64", case, CPU, 2, copy=1e9)
    assert [figure.name for figure in figures] == [
        "swiglu 4 x 64 against broken: TypeError: another version",
        "swiglu 4 x 64, forward: of copy bandwidth",
        "swiglu 4 x 64, forward against torch",
        "swiglu 4 x 64, forward + backward: of copy bandwidth",
        "swiglu 4 x 64, forward + backward against torch",
    ]
    assert [figure.goal for figure in figures[1:3]] == [">= 90 %", "<= 1 x torch"]


def test_the_heads_memory() -> None:
    """In torch's operations: the logits in fp32 and their gradient are torch's, a chunk is ours."""
    memory = import_module("kernel_memory")
    (figure,) = memory.head_figures(True, CPU)
    logits = 64 * 32_768 * 4 / 2**20
    assert figure.peer == "torch"
    assert figure.peer_value >= 2 * logits
    assert figure.value < logits
    assert figure.met


def test_memory_is_what_is_allocated_beside_gradients() -> None:
    memory = import_module("kernel_memory")
    x = torch.randn(256, 256, requires_grad=True)
    extra: Callable[[], torch.Tensor] = lambda: (x * x).sum()  # noqa: E731
    assert nbytes(x) <= memory.extra_bytes(extra, [x], CPU) <= 4 * nbytes(x)


def test_every_kernel_comes_at_its_first_width_before_any_at_its_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that fails or has no time left is a figure; those after it are measured."""
    monkeypatch.setattr(kernel_speed, "PEERS", {})
    monkeypatch.setattr(kernel_speed, "ELEMENTS", 2**10)
    monkeypatch.setattr(kernel_speed, "WIDTHS", (64, 128))
    monkeypatch.setattr(kernel_speed, "copy_bandwidth", lambda device, rounds: 1e9)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)

    def broken(*args: Any) -> Any:
        raise RuntimeError("out of shared memory")

    monkeypatch.setitem(kernel_speed.CASES, "geglu", broken)
    monkeypatch.setattr(kernel_speed, "head_figures", lambda quick, device: [Figure("the head", 1.0, "MiB")])
    names = ["swiglu", "geglu", kernel_speed.HEAD, "rms_norm"]
    figures = {f.name: f for f in kernel_speed.measure(names, False, CPU, Budget(None))}
    assert figures["geglu 16 x 64: RuntimeError: out of shared memory"].met is False
    order = [name.split(",")[0] for name in figures if name.endswith("forward: of copy bandwidth")]
    assert order == ["swiglu 16 x 64", "rms_norm 16 x 64", "swiglu 8 x 128", "rms_norm 8 x 128"]
    compiled = next(at for at, name in enumerate(figures) if name.endswith("against torch.compile"))
    before = list(figures)[:compiled]
    assert before[-1] == "the head"
    assert "rms_norm 16 x 64, forward: of copy bandwidth" in before
    assert figures["swiglu 16 x 64, forward against torch.compile"].ratio_limit == 1.0
    assert "swiglu 8 x 128, forward against torch.compile" not in figures
    late = kernel_speed.measure(names, True, CPU, Budget(1e-9))
    titles = [f"{name} 16 x 64" for name in names if name != kernel_speed.HEAD]
    left_out = [*titles, kernel_speed.HEAD, *(f"{title} against torch.compile" for title in titles)]
    assert [f.name for f in late[1:]] == [f"{title}: no time left" for title in left_out]
