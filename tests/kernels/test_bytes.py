"""Bytes that each kernel moves, over its floor: every input read once, every output written once.

Rows are bf16. The interpreter stands in for 132 processors, so norms are counted at 4,096 rows; narrower
rows than users have keep it quick, and the ratios do not depend on the width within one kernel.
"""

import pytest
import torch
from torch import Tensor

from overlapkit import kernels
from tests.kernels.ledger import ledger


@pytest.fixture(autouse=True)
def _interpreted(interpreted: None) -> None:
    pass


def make(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


def size(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def test_the_ledger_counts_what_masks_let_through() -> None:
    gate, up = make(3, 37), make(3, 37)
    with ledger() as count:
        y = kernels.swiglu(gate, up)
    assert (count.loaded, count.stored) == (size(gate, up), size(y))


@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm(residual: bool) -> None:
    x, weight = make(4096, 256), make(256)
    other = make(4096, 256) if residual else None
    with ledger() as forward:
        out = kernels.rms_norm(x, weight, residual=other)
    outputs = out if residual else (out,)
    grads = [torch.ones_like(o) for o in outputs]
    assert 1.0 <= forward.total / size(x, weight, other, *outputs) <= 1.05
    with ledger() as backward:
        torch.autograd.backward(outputs, grads)
    # torch then adds up the 132 shares of the weight's gradient, which are counted here as written
    assert 1.0 <= backward.total / size(x, weight, *grads, x.grad, weight.grad) <= 1.05


def test_rms_norm_backward_of_wide_rows() -> None:
    """Two passes: 5/3, here plus 1/48 for the weight and, with only 128 rows, 1/4 for 33 shares."""
    x, weight = make(128, 16_384), make(16_384)
    y = kernels.rms_norm(x, weight)
    dy = torch.ones_like(y)
    with ledger() as count:
        y.backward(dy)
    assert 5 / 3 - 0.01 <= count.total / size(x, weight, dy, x.grad, weight.grad) <= 5 / 3 + 1 / 48 + 0.27


def test_swiglu() -> None:
    gate, up = make(64, 2752), make(64, 2752)
    with ledger() as forward:
        y = kernels.swiglu(gate, up)
    assert forward.total == size(gate, up, y)
    with ledger() as backward:
        y.backward(y.detach())
    assert backward.total == size(y, gate, up, gate.grad, up.grad)


@pytest.mark.parametrize("v", [32_768, 50_257])
def test_cross_entropy(v: int) -> None:
    """Forward and backward: two reads of the logits and one write of their gradient, over one of each."""
    logits, target = make(8, v), torch.arange(8)
    with ledger() as count:
        kernels.cross_entropy(logits, target).backward()
    assert 1.5 <= count.total / size(logits, logits.grad) <= 1.51


@pytest.mark.parametrize(("v", "passes"), [(32_768, 1.0), (128_256, 1.5)])
def test_cross_entropy_in_place(v: int, passes: float) -> None:
    """One read and one write; wide rows are read twice. Backward leaves rows alone whose gradient is 1."""
    x, target = make(8, v), torch.arange(8)
    with ledger() as count:
        kernels.cross_entropy_(x * 1, target).backward()
    assert passes <= count.total / (2 * size(x)) <= passes + 0.01


def test_cross_entropy_in_place_scales_only_rows_that_need_it() -> None:
    x = make(8, 4096)
    loss = kernels.cross_entropy_(x * 1, torch.arange(8), reduction="none")
    with ledger() as count:
        loss.backward(torch.tensor([1.0] * 6 + [2.0] * 2))
    assert count.loaded < 1.01 * size(x) / 4
    assert count.stored == size(x) / 4


def test_ignored_rows_cost_no_read_in_backward() -> None:
    logits = make(8, 4096)
    loss = kernels.cross_entropy(logits, torch.full((8,), -100))
    with ledger() as count:
        loss.backward()
    assert count.stored == size(logits)
    assert count.loaded < 0.05 * size(logits)
