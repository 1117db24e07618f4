from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overlapkit import kernels
from tests.kernels.judge import compare, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(5, 37), (1, 1), (7,), (2, 3, 255), (0, 16), (4, 0), (300, 8), (3, 4097)]


def torchs(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (2 * torch.randn(shape)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_as_good_as_torchs(
    path: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    inputs = (make(*shape, dtype=dtype), make(*shape, dtype=dtype))
    compare(kernels.swiglu, torchs, inputs, (torch.randn(shape).to(dtype),))


def test_extreme_gates_stay_finite(path: str) -> None:
    gate = torch.tensor([-1e4, -90.0, 0.0, 90.0, 1e4], requires_grad=True)
    y, dgate, dup = run(kernels.swiglu, (gate, torch.ones(5, requires_grad=True)), (torch.ones(5),))
    torch.testing.assert_close(y, F.silu(gate.detach()))
    torch.testing.assert_close(dgate, torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))
    torch.testing.assert_close(dup, F.silu(gate.detach()))


def test_halves_of_one_projection(path: str) -> None:
    torch.manual_seed(1)

    def ours(h: Tensor) -> Tensor:
        return kernels.swiglu(*h.chunk(2, dim=-1))

    compare(ours, lambda h: torchs(*h.chunk(2, dim=-1)), (make(2, 5, 74),), (torch.randn(2, 5, 37),))


def test_halves_of_one_projection_are_not_copied(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    h = torch.randn(5, 74)
    seen: list[Tensor] = []
    from overlapkit.kernels.raw import swiglu as raw

    launch = raw._forward.launch
    monkeypatch.setattr(
        raw._forward, "launch", lambda grid, *args, **kw: (seen.extend(args[:2]), launch(grid, *args, **kw))
    )
    kernels.swiglu(*h.chunk(2, dim=-1))
    gate, up = seen
    assert (gate.data_ptr(), up.data_ptr()) == (h.data_ptr(), h.data_ptr() + 37 * 4)


@pytest.mark.parametrize(
    "grad", [torch.randn(()).expand(6, 9), torch.randn(9, 6).t(), torch.randn(12, 9)[::2]]
)
def test_any_strides(path: str, grad: Tensor) -> None:
    gate, up = torch.randn(9, 6).t().requires_grad_(), torch.randn(6, 20)[:, 3:12].requires_grad_()
    compare(kernels.swiglu, torchs, (gate, up), (grad,))
    compare(kernels.swiglu, torchs, (grad.requires_grad_(), up), (torch.randn(6, 9),))


def test_gradcheck_of_the_plain_form() -> None:
    assert torch.autograd.gradcheck(
        kernels.swiglu, [torch.randn(3, 5).double().requires_grad_() for _ in "gu"]
    )


def test_a_second_derivative_is_an_error_not_a_wrong_number(interpreted: None) -> None:
    x = make(3, 5)
    (first,) = torch.autograd.grad(kernels.swiglu(x, make(3, 5)).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="swiglu cannot be differentiated twice"):
        first.sum().backward()


@pytest.mark.parametrize("shape", [(4, 9), (0, 9), (2, 3, 9)], ids=str)
def test_opcheck(interpreted: None, shape: tuple[int, ...]) -> None:
    torch.library.opcheck(torch.ops.overlapkit.swiglu.default, (make(*shape), make(*shape)))
    permuted = torch.randn(shape[::-1]).permute(*range(len(shape)))[...].mT.contiguous().mT.requires_grad_()
    torch.library.opcheck(
        torch.ops.overlapkit.swiglu.default, (permuted, permuted.detach().clone().requires_grad_())
    )


def test_compiled_in_one_graph_is_bitwise_the_same(path: str) -> None:
    torch._dynamo.reset()
    inputs, grads = (make(5, 37), make(5, 37)), (torch.randn(5, 37),)
    compiled = torch.compile(kernels.SwiGLU(), fullgraph=True, backend="aot_eager")
    for a, b in zip(run(kernels.swiglu, inputs, grads), run(compiled, inputs, grads), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("gate", "up", "error", "message"),
    [
        (torch.ones(2, 4), torch.ones(4), ValueError, r"up has shape \(4,\): gate needs \(2, 4\)"),
        (torch.ones(4), torch.ones(4).half(), ValueError, "up has dtype torch.float16, gate torch.float32"),
        (torch.ones(4), torch.ones(4, device="meta"), ValueError, "up is on meta"),
        (torch.ones(4).int(), torch.ones(4), ValueError, "gate has dtype torch.int32"),
        (torch.ones(4), None, TypeError, "up is a NoneType"),
    ],
)
def test_bad_input(path: str, gate: Any, up: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kernels.swiglu(gate, up)
