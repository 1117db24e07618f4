"""Every kernel, as launch.py would launch it, compiled for GPUs that are not here."""

import os
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from overlapkit.kernels import raw
from overlapkit.kernels.cross_entropy_options import Options
from overlapkit.kernels.raw import (
    cross_entropy,
    cross_entropy_inplace,
    dropout_add,
    gated,
    norm_backward,
    norm_forward,
    rope,
    softmax,
)
from tests.kernels.ahead import Launch, recorded, resources

N = 4096
WIDTHS = {torch.bfloat16: [512, 1024, 5120, 8192, 16_384], torch.float32: [1024, 4096, 8192]}
ENDS = [1024, 8192, 16_384]  # the least and the most registers of one pass and of two
HEADS = [(32, 8, 128, 128), (8, 1, 256, 64)]  # of q, of k, their columns, those that turn
CLASSES = {torch.bfloat16: [32_768, 128_256, 262_144], torch.float32: [32_768, 128_256]}
A_NUMBER_A_ROW = {"cross_entropy._forward", "norm_backward._row_means"}  # all that they store


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # workers share what they compile
    monkeypatch.setenv("TRITON_CACHE_DIR", str(base / "triton"))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def norms(x: Tensor, weight: Tensor, rows: Tensor) -> None:
    """RMSNorm without a residual, and LayerNorm with one."""
    norm_forward.forward(x, weight, None, None, 1e-5, 1.0, x.dtype, centred=False)
    norm_forward.forward(x, weight, weight, x, 1e-5, 0.0, x.dtype, centred=True)
    norm_backward.backward(x, None, x, weight, None, rows, 1.0, True, False)
    norm_backward.backward(x, x, x, weight, rows, rows, 0.0, True, True)


def softmaxes(x: Tensor) -> None:
    """The widest rows that are one tile, and tiles."""
    softmax.forward(x, x, 0.5, x.dtype)
    softmax.backward(x, x, 0.5, x.dtype)


def launches(widths: list[int], classes: list[int], dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    """What each kernel is launched with, with every option on and with none."""
    rows, target = meta(N, dtype=torch.float32), meta(N, dtype=torch.int64)
    with recorded() as found:
        for d in widths:
            x, weight = meta(N, d, dtype=dtype), meta(d, dtype=dtype)
            norms(x, weight, rows)
            for activation in ("silu",) if d != widths[-1] else ("silu", "gelu", "gelu_tanh"):
                gated.forward(x, x, activation)
                gated.backward(x, x, x, activation, True, True)
            gated.backward_packed(x, meta(N, 2 * d, dtype=dtype), "silu", True)
        softmaxes(x)
        dropout_add.dropout(x, x, target, 2**30, 2.0, dtype)
        for q_heads, k_heads, d, turning in HEADS:
            q, k = meta(2, N // 2, q_heads, d, dtype=dtype), meta(2, N // 2, k_heads, d, dtype=dtype)
            cos = meta(1, N, turning // 2, dtype=torch.float32)
            rope.rotate(q, k, cos, cos, None, False, False)
            rope.rotate(q, k, cos, cos, meta(2, N // 2, dtype=torch.int64), True, True)
        for v in classes:
            logits, weight = meta(N, v, dtype=dtype), meta(v, dtype=torch.float32)
            softmaxes(logits)
            full = Options(label_smoothing=0.1, z_loss=1e-4, softcap=30.0)
            for w, options, dlse in ((None, Options(), None), (weight, full, rows)):
                cross_entropy.forward(logits, target, w, options)
                cross_entropy.backward(rows, dlse, logits, target, w, rows, rows, options)
                scale = None if dlse is None else rows[0]
                cross_entropy_inplace.forward_and_gradient_(logits, target, w, scale, options)
            cross_entropy.statistics(logits, target, weight, full, (v, 8 * v))  # weight: 8 v, were it read
            cross_entropy_inplace.scale_(logits, rows)
    return found


def names(package: ModuleType = raw) -> Iterator[str]:
    modules = [
        import_module(f"{package.__name__}.{info.name}") for info in pkgutil.iter_modules(package.__path__)
    ]
    for module in modules:
        for name, value in vars(module).items():
            if type(value).__name__ == "Kernel":
                yield f"{module.__name__.rpartition('.')[2]}.{name}"


def test_every_kernel_is_among_them() -> None:
    assert {launch.name for launch in launches([1024, 16_384], [32_768])} == set(names())


@pytest.mark.parametrize(
    ("capability", "dtype", "widths"),
    [
        (80, torch.bfloat16, ENDS),
        (90, torch.bfloat16, WIDTHS[torch.bfloat16]),
        (90, torch.float32, WIDTHS[torch.float32]),
        (100, torch.bfloat16, ENDS),
    ],
    ids=str,
)
def test_compiles_without_spills(capability: int, dtype: torch.dtype, widths: list[int]) -> None:
    for launch in launches(widths, CLASSES[dtype], dtype):
        used = resources(launch.compile(capability).asm["cubin"])
        assert used["REG"] > 0
        assert (used["STACK"], used["LOCAL"]) == (0, 0), (launch.kernel.fn, launch.args[0].shape, used)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_wide_norms_with_weights_in_float32_do_not_spill(capability: int) -> None:
    rows = meta(N, dtype=torch.float32)
    with recorded() as found:
        for dtype in (torch.bfloat16, torch.float32):
            norms(meta(N, 16_384, dtype=dtype), meta(16_384, dtype=torch.float32), rows)
    for launch in found:
        used = resources(launch.compile(capability).asm["cubin"])
        assert (used["STACK"], used["LOCAL"]) == (0, 0), (launch.kernel.fn, launch.args[0].dtype, used)


@pytest.mark.parametrize(
    ("capability", "classes", "dtype", "smoothing"),
    [(80, [8, 32, 128], torch.float32, 0.1), (100, [131_072], torch.bfloat16, 0.0)],
    ids=["several rows", "softcap alone, wide"],
)
def test_the_loss_in_place_does_not_spill_for_one_program_more(
    capability: int, classes: list[int], dtype: torch.dtype, smoothing: float
) -> None:
    """ptxas does, 8 bytes, unless told how many registers it may use."""
    rows, target = meta(N, dtype=torch.float32), meta(N, dtype=torch.int64)
    options = Options(label_smoothing=smoothing, z_loss=1e-4, softcap=30.0)
    with recorded() as found:
        for v in classes:
            logits, weight = meta(N, v, dtype=dtype), meta(v, dtype=dtype)
            cross_entropy_inplace.forward_and_gradient_(logits, target, weight, rows[0], options)
    for launch in found:
        used = resources(launch.compile(capability).asm["cubin"])
        assert (used["STACK"], used["LOCAL"]) == (0, 0), (launch.configuration, used)


def test_rows_are_loaded_and_stored_by_128_bits() -> None:
    for launch in launches([4096, 16_384], [32_768]):
        ptx, name = launch.compile(90).asm["ptx"], launch.name
        assert re.search(r"ld\.global\S*\.v4\.b32", ptx), name
        assert bool(re.search(r"st\.global\S*\.v4\.b32", ptx)) != (name in A_NUMBER_A_ROW), name


def test_no_offset_is_a_product_in_int32() -> None:
    """A stride, or a width that serves as one, times a row passes 2^31 for large tensors."""
    for launch in launches([1024, 16_384], [32_768]):
        assert int32_products(launch.compile(90).asm["ttir"]) == [], launch.kernel.fn


def int32_products(ttir: str) -> list[str]:
    """Lines of TTIR that multiply a stride or a width in 32 bits."""
    widths = {
        name for name in re.findall(r"(%\w+): i32", ttir) if name.endswith("_stride") or name == "%n_cols"
    }
    found = []
    for line in ttir.splitlines():
        if copied := re.match(r"\s*(%\w+) = tt\.(?:splat|broadcast) (%\w+) :", line):
            if copied[2] in widths:
                widths.add(copied[1])
        elif (product := re.match(r"\s*%\w+ = arith\.muli (%\w+), (%\w+) : (?:\S*x)?i32\b", line)) and (
            {product[1], product[2]} & widths
        ):
            found.append(line)
    return found


def test_the_search_for_int32_products_finds_one() -> None:
    ttir = """tt.func public @k(%x_stride: i32, %n: i32) {
      %a = tt.splat %x_stride : i32 -> tensor<4x1xi32> loc(#l)
      %b = arith.muli %rows, %a : tensor<4x1xi32> loc(#l)
      %c = arith.muli %n, %n : i32 loc(#l)"""
    assert [line.split()[0] for line in int32_products(ttir)] == ["%b"]
