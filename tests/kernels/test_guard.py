"""The guard finds each kind of fault that was planted, says where, and lets the sound twin pass."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.errors import InterpreterError

from overlapkit import kernels
from overlapkit.launch import kernel
from tests.kernels.guard import OutOfBounds, guarded
from tests.kernels.ledger import ledger

BLOCK = 16


@kernel
def _copy(x_ptr, y_ptr, n, first, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n, other=0.0), mask=at < n)


@kernel
def _read(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0)))


@kernel
def _write(y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.full((BLOCK,), 1.0, tl.float32), mask=at < n)


@kernel
def _gather(x_ptr, index_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    index = tl.load(index_ptr + at, mask=at < n, other=0)
    tl.store(y_ptr + at, tl.load(x_ptr + index, mask=at < n), mask=at < n)


@kernel
def _through_a_table(table_ptr, n_tensors, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    for i in range(n_tensors):
        pointers = tl.load(table_ptr + i).to(tl.pointer_type(tl.float32)) + tl.arange(0, BLOCK)
        tl.store(
            pointers, tl.load(pointers, mask=tl.arange(0, BLOCK) < n) + 1.0, mask=tl.arange(0, BLOCK) < n
        )


@kernel
def _count(y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + at, 1, mask=at < n)


@kernel
def _swap(y_ptr, at):  # type: ignore[no-untyped-def]
    tl.atomic_cas(y_ptr + at, 0, 1)


def copy(grid: int = 3, n: int = 37, first: int = 0, x: Tensor | None = None) -> None:
    x = torch.randn(37) if x is None else x
    _copy.launch(grid, x, torch.zeros(37), n, first, warps=1, BLOCK=BLOCK)


def read(n: int) -> None:
    _read.launch(1, torch.randn(9), torch.zeros(1), n, warps=1, BLOCK=BLOCK)


def write(n: int) -> None:
    _write.launch(1, torch.zeros(9), n, warps=1, BLOCK=BLOCK)


def gather(last: int) -> None:
    index = torch.tensor([0, 3, 36, last])
    _gather.launch(1, torch.randn(37), index, torch.zeros(4), 4, warps=1, BLOCK=BLOCK)


def through_a_table(n: int, slip: int = 0) -> None:
    tensors = [torch.zeros(9), torch.zeros(12)]
    table = torch.tensor([t.data_ptr() + slip for t in tensors])
    _through_a_table.launch(1, table, 2, n, warps=1, BLOCK=BLOCK)
    assert [t.tolist() for t in tensors] == [[1.0] * 9, [1.0] * 9 + [0.0] * 3]


def freed() -> None:
    table = torch.tensor([torch.zeros(9).data_ptr()])
    _through_a_table.launch(1, table, 1, 9, warps=1, BLOCK=BLOCK)


def count(n: int) -> None:
    _count.launch(1, torch.zeros(9, dtype=torch.int32), n, warps=1, BLOCK=BLOCK)


def swap(at: int) -> None:
    _swap.launch(1, torch.zeros(9, dtype=torch.int32), at, warps=1)


SOUND: list[Callable[[], None]] = [
    copy,
    lambda: read(9),
    lambda: write(9),
    lambda: gather(36),
    lambda: through_a_table(9),
    lambda: count(9),
    lambda: swap(8),
]
PLANTED: dict[str, tuple[Callable[[], None], str]] = {
    "load": (
        lambda: read(10),
        r"_read, program \(0, 0, 0\): load of 4 bytes at 0x\w+, 0 bytes past the end of x_ptr",
    ),
    "store": (
        lambda: write(11),
        r"_write, .*: store of 4 bytes.*y_ptr \(9,\).*lane \(9,\); 2 of 11 elements",
    ),
    "before": (lambda: copy(1, 4, -2), r"load.* 8 bytes before x_ptr .*2 of 6 elements"),
    "off-by-one mask": (lambda: copy(n=38), r"_copy, program \(2, 0, 0\): load.*lane \(5,\); 1 of 6"),
    "extra grid row": (lambda: copy(grid=4, n=64), r"_copy, program \(2, 0, 0\): load"),
    "view": (lambda: copy(x=torch.randn(99)[:36]), r"load .*past the end of x_ptr \(36,\)"),
    "indirect index": (lambda: gather(37), r"_gather.*: load .*past the end of x_ptr .*lane \(3,\); 1 of 4"),
    "wild index": (lambda: gather(2**61), r"_gather.*: load"),
    "pointer table": (lambda: through_a_table(10), r"load.*past the end of a tensor behind a pointer \(9,\)"),
    "pointer that slipped": (lambda: through_a_table(9, 4), r"load.*a tensor behind a pointer \(9,\)"),
    "pointer to freed memory": (freed, r"_through_a_table.*: load"),
    "atomic": (lambda: count(10), r"_count.*: atomic of 4 bytes.*past the end of y_ptr .*1 of 10"),
    "atomic compare-and-swap": (lambda: swap(9), r"_swap.*: atomic of 4 bytes"),
}


@pytest.mark.usefixtures("interpreted")
class TestPlanted:
    def test_sound_kernels_pass(self) -> None:
        for launch in SOUND:
            launch()

    @pytest.mark.parametrize("fault", PLANTED)
    def test_is_found(self, fault: str) -> None:
        launch, message = PLANTED[fault]
        with pytest.raises(OutOfBounds, match=message):
            launch()

    def test_other_errors_of_a_kernel_stay_what_they_are(self) -> None:
        with pytest.raises(InterpreterError, match="cannot convert n of type"):
            _write.launch(1, torch.zeros(9), "n", warps=1, BLOCK=BLOCK)


def test_the_ledger_counts_atomics_of_integers_and_refuses_those_of_floats(interpreted: None) -> None:
    with ledger() as bytes_moved:
        count(9)
    assert (bytes_moved.loaded, bytes_moved.stored) == (36, 36)
    with ledger(), pytest.raises(InterpreterError, match="an atomic of floats"):
        _count.launch(1, torch.zeros(9), 9, warps=1, BLOCK=BLOCK)


def test_nothing_is_left_of_it(interpreted: None) -> None:
    before = Tensor.data_ptr
    with guarded() as guard:
        copy()
        assert guard.launches == 1
    assert Tensor.data_ptr is before
    copy()
    assert guard.launches == 1


def test_it_sees_the_kernels_of_the_package(interpreted: None) -> None:
    with guarded() as guard:
        x = torch.randn(3, 37, requires_grad=True)
        kernels.swiglu(kernels.rms_norm(x), x).sum().backward()
    assert guard.launches == 4
