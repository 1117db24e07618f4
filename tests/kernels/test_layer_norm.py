from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlapkit import kernels
from tests.kernels.judge import compare, run, to_double
from tests.kernels.strides import KINDS, strided

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(5, 37), (3,), (2, 3, 255), (3, 127), (0, 16), (300, 8), (2, 4097), (3, 8200)]
EPS = 1e-5


def torchs(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None) -> Any:
    total = x if residual is None else x + residual
    y = F.layer_norm(total, total.shape[-1:], weight, bias, EPS)
    return y if residual is None else (y, total)


def ours(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None) -> Any:
    return kernels.layer_norm(x, weight, bias, EPS, residual=residual)


def make(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def case(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """x, weight, bias, residual, and gradients of both outputs."""
    sizes = (shape, shape[-1:], shape[-1:], shape)
    inputs = [make(*size, dtype=dtype) for size in sizes]
    return inputs, (make(*shape, dtype=dtype, grad=False), make(*shape, dtype=dtype, grad=False))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_as_good_as_torchs(
    path: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    inputs, grads = case(*shape, dtype=dtype)
    compare(ours, torchs, inputs[:3], grads[:1])


@pytest.mark.parametrize("shape", [(5, 37), (2, 8200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_residual_is_added_before_and_its_gradient_after(
    path: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    compare(ours, torchs, *case(*shape, dtype=dtype))


def test_rows_far_from_zero(path: str) -> None:
    """The variance is that of what is left, not a difference of two large numbers."""
    (x, *others), grads = case(4, 1000)
    compare(ours, torchs, [(x.detach() + 1000.0).requires_grad_(), *others], grads)


def test_a_row_of_one(path: str) -> None:
    inputs = (make(3, 1), make(1), make(1))
    y, dx, dweight, dbias = run(ours, inputs, (torch.ones(3, 1),))
    assert torch.equal(y, inputs[2].detach().expand(3, 1))
    for gradient, value in ((dx, 0.0), (dweight, 0.0), (dbias, 3.0)):
        torch.testing.assert_close(gradient, torch.full_like(gradient, value), rtol=0, atol=1e-3)


@pytest.mark.parametrize("used", [(True, False), (False, True)], ids=["y only", "sum only"])
def test_an_output_that_nobody_uses_gives_no_gradient(path: str, used: tuple[bool, bool]) -> None:
    inputs, grads = case(5, 37)
    if used == (False, True):
        inputs[1:3] = [make(37, grad=False), make(37, grad=False)]
    compare(ours, torchs, inputs, [g if wanted else None for g, wanted in zip(grads, used, strict=True)])


@pytest.mark.parametrize("shape", [(5, 37), (2, 8200)], ids=str)
@pytest.mark.parametrize("given", ["neither", "weight", "bias"])
def test_without_a_weight_or_bias(path: str, given: str, shape: tuple[int, ...]) -> None:
    (x, weight, bias, _), grads = case(*shape)
    inputs = [x, weight if given == "weight" else None, bias if given == "bias" else None]
    compare(ours, torchs, inputs, grads[:1])


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient(path: str, frozen: str) -> None:
    inputs, grads = case(5, 37)
    inputs[["x", "weight", "bias"].index(frozen)].requires_grad_(False)
    compare(ours, torchs, inputs[:3], grads[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_any_strides(path: str, kind: str) -> None:
    x = strided(kind).requires_grad_()
    weight, bias = (torch.randn(74)[::2].requires_grad_() for _ in range(2))
    compare(ours, torchs, (x, weight, bias, make(*x.shape)), (torch.randn(x.shape), strided(kind)))
    compare(ours, torchs, (make(*x.shape), weight, bias, x), (strided(kind), torch.randn(x.shape)))


def test_mixed_dtypes(path: str) -> None:
    """y has x's dtype, the sum the wider one; parameters may be fp32 beside bf16."""
    (x, weight, bias, residual), grads = case(5, 37)
    x = x.detach().bfloat16().requires_grad_()
    y, total = ours(x, weight, bias, residual)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    found = torch.autograd.grad([y, total], [x, weight, bias, residual], [grads[0].bfloat16(), grads[1]])
    assert [g.dtype for g in found] == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
    exact = to_double((grads[0].bfloat16(), grads[1]))
    truth = run(torchs, to_double((x, weight, bias, residual)), exact)
    for mine, true in zip((y, total, *found), truth, strict=True):
        tolerance = 2**-7 if mine.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(mine.double(), true, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("norm", [kernels.layer_norm, kernels.rms_norm])
def test_a_residual_in_float64_keeps_its_digits(path: str, norm: Callable[..., Any]) -> None:
    x, residual = make(5, 37), torch.randn(5, 37, dtype=torch.float64)
    y, total = norm(x, residual=residual)
    assert y.dtype == torch.float32
    assert torch.equal(total, x + residual)


def test_inputs_are_left_alone_and_two_runs_agree_bitwise(interpreted: None) -> None:
    inputs, grads = case(300, 37)
    copies = [t.detach().clone() for t in inputs]
    first, second = run(ours, inputs, grads), run(ours, inputs, grads)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) and a._version == 0 for a, b in zip(inputs, copies, strict=True))


def test_retained_graph_gives_the_same_gradient_again(interpreted: None) -> None:
    inputs, _ = case(5, 37)
    y = ours(*inputs[:3])
    first = torch.autograd.grad(y.sum(), inputs[:3], retain_graph=True)
    second = torch.autograd.grad(y.sum(), inputs[:3])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradcheck_of_the_plain_form() -> None:
    assert torch.autograd.gradcheck(ours, [t.detach().double().requires_grad_() for t in case(3, 5)[0]])


def test_a_second_derivative_is_an_error_not_a_wrong_number(interpreted: None) -> None:
    x, weight, bias, _ = case(3, 5)[0]
    (first,) = torch.autograd.grad(ours(x, weight, bias).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="layer_norm cannot be differentiated twice"):
        first.sum().backward()


def opcheck_inputs() -> list[tuple[Any, ...]]:
    x, weight, bias, residual = case(4, 3, 9)[0]
    permuted = torch.randn(9, 4, 3).permute(1, 2, 0).requires_grad_()
    return [
        (permuted, weight, bias, residual, EPS, torch.float32),
        (x, None, bias, None, EPS, torch.float32),
        (x.detach().bfloat16().requires_grad_(), weight, None, residual, EPS, torch.float32),
        (make(0, 9), weight, bias, None, EPS, torch.float32),
    ]


@pytest.mark.parametrize("number", range(4))
def test_opcheck(interpreted: None, number: int) -> None:
    torch.library.opcheck(torch.ops.overlapkit.layer_norm.default, opcheck_inputs()[number])


@pytest.mark.parametrize("residual", [False, True])
def test_compiled_in_one_graph_is_bitwise_the_same(path: str, residual: bool) -> None:
    torch._dynamo.reset()
    inputs, grads = case(5, 37)
    some = (inputs, grads) if residual else (inputs[:3], grads[:1])
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for a, b in zip(run(ours, *some), run(compiled, *some), strict=True):
        assert torch.equal(a, b)


def test_recomputed_in_backward(interpreted: None) -> None:
    inputs, grads = case(5, 37)

    def again(*tensors: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(ours, *tensors, use_reentrant=False)

    for a, b in zip(run(ours, inputs, grads), run(again, inputs, grads), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("norm", [kernels.layer_norm, kernels.rms_norm])
def test_autocast_is_torchs_own(path: str, norm: Callable[..., Tensor]) -> None:
    """On the CPU the dtype stays; on CUDA (here tensors without data) float32 comes out."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    half = torch.bfloat16
    with torch.autocast("cpu", dtype=half):
        assert norm(make(2, 8)).dtype == F.layer_norm(make(2, 8), (8,)).dtype == torch.float32
        assert norm(make(2, 8, dtype=half)).dtype == F.layer_norm(make(2, 8, dtype=half), (8,)).dtype == half
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode():
            for dtype, width in ((half, 8), (half, 20_000), (torch.float32, 8)):
                assert norm(torch.empty(2, width, dtype=dtype, device="cuda")).dtype == torch.float32
            assert norm(torch.empty(2, 8, dtype=torch.float64, device="cuda")).dtype == torch.float64
    finally:
        torch.set_autocast_enabled("cuda", before)


@pytest.mark.parametrize("shape", [(37,), (3, 4)])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
def test_module_is_a_drop_in(path: str, shape: tuple[int, ...], options: dict[str, bool]) -> None:
    theirs, mine = nn.LayerNorm(shape, 1e-6, **options), kernels.LayerNorm(shape, 1e-6, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(5, *shape)
    torch.testing.assert_close(mine(x), theirs(x))
    torch.testing.assert_close(mine(x, residual=x), (theirs(2 * x), 2 * x))
    with pytest.raises(ValueError, match=r"it has to end in normalized_shape"):
        mine(torch.ones(5, *shape[:-1], 99))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x is a list"),
        ({"x": torch.ones(3, dtype=torch.int64)}, ValueError, "x has dtype torch.int64"),
        ({"weight": torch.ones(3)}, ValueError, r"weight has shape \(3,\): x needs \(4,\)"),
        ({"weight": (4,)}, TypeError, "weight is a tuple"),
        ({"bias": torch.ones(3)}, ValueError, r"bias has shape \(3,\): x needs \(4,\)"),
        ({"bias": torch.ones(4, device="meta")}, ValueError, "bias is on meta, but x is on cpu"),
        ({"residual": torch.ones(4)}, ValueError, r"residual has shape \(4,\): x needs \(2, 4\)"),
        ({"eps": -1.0}, ValueError, "eps=-1.0"),
        ({"eps": None}, TypeError, "eps=None is a NoneType: pass a float"),
    ],
)
def test_bad_input(path: str, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kernels.layer_norm(**{"x": torch.ones(2, 4), **arguments})
