"""Bytes that each kernel moves, over its floor: every input read once, every output written once.

Rows are bf16. The interpreter stands in for 132 processors, so norms are counted at 4,096 rows; narrower
rows than users have keep it quick. Of what is counted only the number of a norm's programs depends on the
width: that is taken from its launches.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from overlapkit import kernels
from overlapkit.kernels.raw import norm_backward, norm_forward
from tests.kernels.ahead import recorded
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


def norm(name: str, d: int) -> tuple[Callable[..., Any], list[Tensor], int]:
    """The function of x and a residual, its parameters, and the bytes of what it keeps for each row."""
    if name == "rms_norm":
        weight = make(d)
        return lambda x, other=None: kernels.rms_norm(x, weight, residual=other), [weight], 4
    parameters = [make(d), make(d)]
    return lambda x, other=None: kernels.layer_norm(x, *parameters, residual=other), parameters, 8


NORMS = ["layer_norm", "rms_norm"]


@pytest.mark.parametrize(
    ("name", "residual"), [("layer_norm", False), ("rms_norm", False), ("rms_norm", True)]
)
def test_norms(name: str, residual: bool) -> None:
    fn, parameters, kept = norm(name, 256)
    x, other = make(4096, 256), make(4096, 256) if residual else None
    with ledger() as forward:
        out = fn(x, other)
    outputs = out if residual else (out,)
    grads = [torch.ones_like(o) for o in outputs]
    assert 1.0 <= forward.total / (size(x, *parameters, other, *outputs) + kept * 4096) <= 1.05
    with ledger() as backward:
        torch.autograd.backward(outputs, grads)
    # torch then adds up the shares of the parameters' gradients, which are counted here as written
    floor = size(x, *parameters[:1], *grads, x.grad, *(p.grad for p in parameters)) + kept * 4096
    assert 1.0 <= backward.total / floor <= 1.05


@pytest.mark.parametrize("d", [256, 1024, 2048, 4096, 5120, 8192])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_any_width_have_as_few_programs(name: str, d: int) -> None:
    """Each program reads the parameters; in backward it reads the weight, and writes fp32 gradients."""
    fn, parameters, kept = norm(name, d)
    x, n = torch.empty(4096, d, dtype=torch.bfloat16, device="meta"), len(parameters)
    weight, rows = x[0], torch.empty(4096, device="meta")
    centred = name == "layer_norm"
    with recorded() as launches:
        norm_forward.forward(
            x, weight, weight if centred else None, None, 1e-5, 0.0, x.dtype, centred=centred
        )
        norm_backward.backward(x, None, x, weight, rows if centred else None, rows, 0.0, True, centred)
    forward, backward = (launch.grid for launch in launches)
    there, back = 2 * size(x) + kept * 4096, 3 * size(x) + kept * 4096
    assert (there + forward * 2 * n * d) / (there + 2 * n * d) <= 1.05
    assert (back + backward * (2 + 4 * n) * d) / (back + 2 * (1 + n) * d) <= 1.05
    if d == 256:
        y = fn(real := make(4096, d))
        with ledger() as count:
            y.backward(torch.ones_like(y))
        assert real.grad is not None
        assert count.total == back + backward * (2 + 4 * n) * d


@pytest.mark.parametrize("name", NORMS)
def test_norms_backward_of_wide_rows(name: str) -> None:
    """Two passes: 5/3, 1/48 for the weight, and the shares: with 32 rows, not 4,096, they weigh 128-fold."""
    fn, parameters, kept = norm(name, 16_384)
    x = make(32, 16_384)
    y = fn(x)
    dy = torch.ones_like(y)
    with ledger() as count:
        y.backward(dy)
    floor = size(x, *parameters[:1], dy, x.grad) + kept * 32
    shares = 25 * 16_384 * (2 + 4 * len(parameters))  # each reads the weight and writes its gradients
    assert (count.total - shares) / floor >= 5 / 3
    assert (count.total - shares + shares / 128) / floor <= 1.70


def test_dropout_add() -> None:
    """Backward reads no mask, and the residual's gradient is the one that came in."""
    x, residual = make(64, 2752), make(64, 2752)
    with ledger() as forward:
        y = kernels.dropout_add(x, residual, 0.1, 1)
    programs = 64 * 2  # of 2,048 columns, each of which reads the seed
    assert forward.total == size(x, residual, y) + 8 * programs
    with ledger() as backward:
        y.backward(y.detach())
    assert backward.total == size(y, x.grad) + 8 * programs


@pytest.mark.parametrize(
    ("d", "forward", "backward"),
    [(16_384, 1, 1), (32_768, 1, 5 / 3), (70_000, 3 / 2, 5 / 3)],
)
def test_softmax(d: int, forward: float, backward: float) -> None:
    x, mask = make(2, d), make(2, d).detach()
    with ledger() as there:
        y = kernels.softmax(x, scale=0.5)
    assert there.total == forward * size(x, y)
    with ledger() as masked:
        kernels.softmax(x, mask=mask)
    assert masked.total - there.total == masked.loaded / 2  # the mask is read as often as x
    with ledger() as back:
        y.backward(y.detach())
    assert back.total == pytest.approx(backward * size(y, y, x.grad))


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_gated(name: str) -> None:
    gate, up = make(64, 2752), make(64, 2752)
    with ledger() as forward:
        y = getattr(kernels, name)(gate, up)
    assert forward.total == size(gate, up, y)
    with ledger() as backward:
        y.backward(y.detach())
    assert backward.total == size(y, gate, up, gate.grad, up.grad)


@pytest.mark.parametrize("name", ["swiglu_packed", "geglu_packed"])
def test_gated_packed(name: str) -> None:
    x = make(64, 2752)
    with ledger() as forward:
        y = getattr(kernels, name)(x, "gate_up")
    assert forward.total == size(x, y)
    with ledger() as backward:
        y.backward(y.detach())
    assert backward.total == size(y, x, x.grad)


def test_a_frozen_half_costs_nothing() -> None:
    gate, up = make(64, 512), make(64, 512).detach()
    y = kernels.swiglu(gate, up)
    with ledger() as backward:
        y.backward(y.detach())
    assert backward.total == size(y, gate, up, gate.grad)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turning", [64, 48])
def test_rope(turning: int, interleaved: bool) -> None:
    """Two sequences of the same positions read their angles twice, which costs 2 %."""
    q, k = make(2, 16, 32, 64), make(2, 16, 8, 64)
    angle = torch.rand(16, turning // 2)
    cos, sin, positions = angle.cos(), angle.sin(), torch.arange(16)
    with ledger() as forward:
        out = kernels.rope(q, k, cos, sin, positions, interleaved=interleaved, rotary_dim=turning)
    assert 1.0 <= forward.total / size(q, k, cos, sin, positions, *out) <= 1.05
    with ledger() as backward:
        torch.autograd.backward(out, [o.detach() for o in out])
    assert backward.total == forward.total


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
