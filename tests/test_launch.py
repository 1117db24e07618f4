import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from overlapkit import kernels, launch
from tests.interpreter import interpreter


def test_who_runs_through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu: Tensor = torch.ones(2)
    cuda: Any = SimpleNamespace(is_cuda=True, is_nested=False, dtype=torch.float32, device="cuda:0")
    double: Any = SimpleNamespace(is_cuda=True, is_nested=False, dtype=torch.float64, device="cuda:0")
    monkeypatch.setattr(launch, "_interpret", False)
    assert not launch.through_triton(cpu)
    assert launch.through_triton(cuda)
    assert not launch.through_triton(double)
    monkeypatch.setattr(launch, "_interpret", True)
    assert launch.through_triton(cpu)
    assert not launch.through_triton(cpu.double())


def test_a_gpu_tensor_without_triton_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_TRITON_FOUND", False)
    monkeypatch.setattr(launch, "_interpret", False)
    cuda: Any = SimpleNamespace(is_cuda=True, is_nested=False, dtype=torch.float32, device="cuda:0")
    with pytest.raises(ImportError, match="a tensor on cuda:0 runs through Triton, which is not installed"):
        launch.through_triton(cuda)
    assert not launch.through_triton(torch.ones(2)), "the CPU needs no Triton"


def run_python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


HEAD = """
import sys, torch, overlapkit as ok
x = torch.randn(3, 8, requires_grad=True)
"""


def test_training_on_the_cpu_imports_no_triton() -> None:
    code = """
model = torch.nn.Sequential(torch.nn.RMSNorm(8))
ok.kernels.swap(model)
y = ok.kernels.swiglu(model(x), x)
ok.kernels.cross_entropy(y, torch.tensor([0, 1, 2])).backward()
print('triton' in sys.modules)"""
    assert run_python(HEAD + code, TRITON_INTERPRET="0") == "False"


def test_the_variable_turns_the_interpreter_on() -> None:
    code = """
y = ok.kernels.swiglu(x, x)
torch.testing.assert_close(y, torch.nn.functional.silu(x) * x)
print('overlapkit.kernels.raw.gated' in sys.modules)"""
    assert run_python(HEAD + code, TRITON_INTERPRET="1") == "True"
    assert run_python(HEAD + code, TRITON_INTERPRET="0") == "False"


def test_nothing_of_the_interpreter_is_left_behind() -> None:
    """Compiled forms, which a GPU in the same process needs, find Triton as it was."""
    import triton
    import triton.language as tl

    def state() -> dict[str, int]:
        spaces = {"tl": tl, "core": tl.core, "math": tl.math, "standard": tl.standard, "tensor": tl.tensor}
        return {
            f"{space}.{name}": id(value)
            for space, module in spaces.items()
            for name, value in vars(module).items()
            if callable(value) or isinstance(value, property)
        }

    with interpreter():
        pass  # Triton's rewriter leaves new names in modules on first use; those do no harm
    before = state()
    x = torch.randn(3, 8, requires_grad=True)
    with interpreter():
        kernels.cross_entropy(kernels.rms_norm(x), torch.tensor([0, 1, 2]), softcap=2.0).backward()
    after = state()
    assert {name: after[name] for name in before} == before
    assert not triton.knobs.runtime.interpret
    assert not launch._interpret


@pytest.mark.parametrize(
    ("n_rows", "n_cols", "elements", "whole", "expected"),
    [
        (4096, 1024, 4096, True, (4, 1024, 8)),
        (4096, 256, 4096, True, (16, 256, 8)),
        (4096, 8, 4096, True, (16, 8, 1)),
        (1, 8, 4096, True, (1, 8, 1)),
        (3, 1000, 4096, True, (4, 1024, 8)),
        (4096, 16_384, 2048, True, (1, 16_384, 16)),
        (4096, 11_008, 2048, False, (1, 2048, 4)),
        (0, 0, 2048, False, (1, 1, 1)),
    ],
)
def test_tile(n_rows: int, n_cols: int, elements: int, whole: bool, expected: tuple[int, int, int]) -> None:
    assert launch.tile(n_rows, n_cols, elements=elements, whole_rows=whole) == expected


def test_as_rows_is_a_view_wherever_strides_allow() -> None:
    x = torch.randn(4, 6, 10)
    views = [x, x[:, :, 2:7], torch.randn(8, 10)[::2], x[0, 0], x[:, 1], torch.randn(1, 10).expand(6, 10)]
    copies = [x.transpose(0, 1), x.permute(0, 2, 1), torch.randn(()).expand(6, 10), x[:, :, ::2]]
    for tensor in views:
        rows = launch.as_rows(tensor)
        assert rows.data_ptr() == tensor.data_ptr()
        assert torch.equal(rows, tensor.reshape(-1, tensor.shape[-1]))
    for tensor in copies:
        rows = launch.as_rows(tensor)
        assert rows.stride(-1) == 1
        assert torch.equal(rows, tensor.reshape(-1, tensor.shape[-1]))
    assert launch.as_rows(torch.ones(3, 0)).shape == (3, 0)
    assert launch.as_rows(torch.ones(0, 2, 5)).shape == (0, 5)


def test_a_launch_runs_on_the_device_of_its_first_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["cuda:0"]
    seen: list[tuple[tuple[int], str, tuple[Any, ...], dict[str, Any]]] = []

    @contextlib.contextmanager
    def device(name: str) -> Iterator[None]:
        current.append(name)
        yield
        current.pop()

    class Compiled:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *args, **options: seen.append((grid, current[-1], args, options))

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(launch, "_interpret", False)
    kernel = launch.kernel(lambda: None)
    kernel.__dict__["compiled"] = Compiled()
    x = SimpleNamespace(device="cuda:1")
    kernel.launch(3, x, 7, warps=4, BLOCK=8)
    assert seen == [((3,), "cuda:1", (x, 7), {"num_warps": 4, "BLOCK": 8})]
    assert current == ["cuda:0"]


def test_nothing_is_launched_for_zero_programs() -> None:
    def never() -> None:
        raise AssertionError("launched")

    with interpreter():
        launch.kernel(never).launch(0, warps=1)
