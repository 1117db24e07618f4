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


def torchs(residual: bool, offset: float) -> Callable[..., Any]:
    def fn(x: Tensor, weight: Tensor | None, other: Tensor | None = None) -> Any:
        total = x + other if other is not None else x
        scale = None if weight is None else weight + offset
        y = F.rms_norm(total, total.shape[-1:], scale, EPS)
        return (y, total) if residual else y

    return fn


def ours(residual: bool, offset: float) -> Callable[..., Any]:
    def fn(x: Tensor, weight: Tensor | None, other: Tensor | None = None) -> Any:
        return kernels.rms_norm(x, weight, EPS, residual=other, offset=offset)

    return fn


def make(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.randn(shape, dtype=torch.float32).to(dtype).requires_grad_(grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_as_good_as_torchs(
    path: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, weight = make(*shape, dtype=dtype), make(shape[-1], dtype=dtype)
    compare(ours(False, 0.0), torchs(False, 0.0), (x, weight), (make(*shape, dtype=dtype, grad=False),))


def test_a_row_of_one(path: str) -> None:
    """It becomes its sign, and its gradient all but cancels."""
    y, dx = run(
        lambda x: kernels.rms_norm(x, None, 0.0),
        (torch.tensor([[-3.0]], requires_grad=True),),
        (torch.ones(1, 1),),
    )
    torch.testing.assert_close((y, dx), (torch.tensor([[-1.0]]), torch.zeros(1, 1)), rtol=0, atol=1e-7)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(5, 37), (2, 8200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_residual_is_added_before_and_its_gradient_after(
    path: str, dtype: torch.dtype, shape: tuple[int, ...], offset: float
) -> None:
    torch.manual_seed(1)
    inputs = [make(*shape, dtype=dtype), make(shape[-1], dtype=dtype), make(*shape, dtype=dtype)]
    grads = [make(*shape, dtype=dtype, grad=False), make(*shape, dtype=dtype, grad=False)]
    compare(ours(True, offset), torchs(True, offset), inputs, grads)


@pytest.mark.parametrize("used", [(True, False), (False, True)], ids=["y only", "sum only"])
def test_an_output_that_nobody_uses_gives_no_gradient(path: str, used: tuple[bool, bool]) -> None:
    inputs = [make(5, 37), make(37), make(5, 37)]
    grads = [make(5, 37, grad=False) if wanted else None for wanted in used]
    if used == (False, True):
        inputs[1] = make(37, grad=False)
    compare(ours(True, 0.0), torchs(True, 0.0), inputs, grads)


@pytest.mark.parametrize("shape", [(5, 37), (2, 8200)], ids=str)
def test_without_a_weight(path: str, shape: tuple[int, ...]) -> None:
    compare(ours(False, 0.0), torchs(False, 0.0), (make(*shape), None), (make(*shape, grad=False),))


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_is_frozen_gets_no_gradient(path: str, frozen: str) -> None:
    x, weight = make(5, 37, grad=frozen != "x"), make(37, grad=frozen != "weight")
    compare(ours(False, 0.0), torchs(False, 0.0), (x, weight), (make(5, 37, grad=False),))


@pytest.mark.parametrize("kind", KINDS)
def test_any_strides(path: str, kind: str) -> None:
    torch.manual_seed(2)
    x = strided(kind).requires_grad_()
    compare(ours(False, 0.0), torchs(False, 0.0), (x, make(37)), (torch.randn(x.shape),))
    dense = torch.randn(x.shape, requires_grad=True)
    compare(ours(False, 0.0), torchs(False, 0.0), (dense, make(37)), (strided(kind),))
    other, weight = torch.randn(x.shape, requires_grad=True), torch.randn(74)[::2].requires_grad_()
    grads = (strided(kind), strided(kind))
    compare(ours(True, 0.0), torchs(True, 0.0), (other, weight, x), grads)


def test_mixed_dtypes(path: str) -> None:
    """y has x's dtype, the sum the wider one; the weight may be fp32 beside bf16."""
    x, weight = make(5, 37, dtype=torch.bfloat16), make(37)
    residual = make(5, 37)
    y, total = kernels.rms_norm(x, weight, EPS, residual=residual)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    dy, dsum = make(5, 37, dtype=torch.bfloat16, grad=False), make(5, 37, grad=False)
    found = torch.autograd.grad([y, total], [x, weight, residual], [dy, dsum])
    assert [g.dtype for g in found] == [torch.bfloat16, torch.float32, torch.float32]
    truth = run(torchs(True, 0.0), to_double((x, weight, residual)), to_double((dy, dsum)))
    for mine, true in zip((y, total, *found), truth, strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=2**-7, atol=2e-2 if mine is y else 2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_default_eps_is_torchs(path: str, dtype: torch.dtype) -> None:
    x = torch.full((1, 4), 1e-3, dtype=dtype)
    torch.testing.assert_close(kernels.rms_norm(x), F.rms_norm(x, (4,)))


def test_inputs_are_left_alone_and_two_runs_agree_bitwise(interpreted: None) -> None:
    x, weight, residual = make(300, 37), make(37), make(300, 37)
    copies = [t.detach().clone() for t in (x, weight, residual)]
    grads = (torch.randn(300, 37), torch.randn(300, 37))
    first = run(ours(True, 0.0), (x, weight, residual), grads)
    second = run(ours(True, 0.0), (x, weight, residual), grads)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    for tensor, copy in zip((x, weight, residual), copies, strict=True):
        assert torch.equal(tensor, copy)
        assert tensor._version == 0


def test_retained_graph_gives_the_same_gradient_again(interpreted: None) -> None:
    x, weight = make(5, 37), make(37)
    y = kernels.rms_norm(x, weight)
    first = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradcheck_of_the_plain_form() -> None:
    x, weight, residual = (make(*s).double().detach().requires_grad_() for s in ((3, 5), (5,), (3, 5)))
    assert torch.autograd.gradcheck(ours(True, 1.0), (x, weight, residual))


def test_a_second_derivative_is_an_error_not_a_wrong_number(interpreted: None) -> None:
    x = make(3, 5)
    (first,) = torch.autograd.grad(kernels.rms_norm(x, make(5)).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="rms_norm cannot be differentiated twice"):
        first.sum().backward()


def opcheck_inputs() -> list[tuple[Any, ...]]:
    x, weight, residual = make(4, 3, 9), make(9), make(4, 3, 9)
    permuted = torch.randn(9, 4, 3).permute(1, 2, 0).requires_grad_()
    return [
        (x, weight, None, EPS, 0.0, torch.float32),
        (x, None, residual, EPS, 0.0, torch.float32),
        (permuted, weight, residual, EPS, 1.0, torch.float32),
        (make(0, 9), weight, None, EPS, 0.0, torch.float32),
    ]


@pytest.mark.parametrize("case", range(4))
def test_opcheck(interpreted: None, case: int) -> None:
    torch.library.opcheck(torch.ops.overlapkit.rms_norm.default, opcheck_inputs()[case])


@pytest.mark.parametrize("residual", [False, True])
def test_compiled_in_one_graph_is_bitwise_the_same(path: str, residual: bool) -> None:
    torch._dynamo.reset()
    inputs = [make(5, 37), make(37)] + ([make(5, 37)] if residual else [])
    grads = [torch.randn(5, 37)] * (2 if residual else 1)
    eager = run(ours(residual, 0.0), inputs, grads)
    compiled = torch.compile(ours(residual, 0.0), fullgraph=True, backend="aot_eager")
    for a, b in zip(eager, run(compiled, inputs, grads), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_normalised_is_the_sum_that_is_returned(path: str, dtype: torch.dtype) -> None:
    """Rounded as it is returned, since backward reads it so."""
    x, weight, residual = make(5, 37, dtype=dtype), make(37, dtype=dtype), make(5, 37, dtype=dtype)
    y, total = kernels.rms_norm(x, weight, EPS, residual=residual)
    assert torch.equal(y, kernels.rms_norm(total, weight, EPS))


def test_recomputed_in_backward(interpreted: None) -> None:
    x, weight = make(5, 37), make(37)
    kept = run(lambda x, w: kernels.rms_norm(x, w), (x, weight), (torch.ones(5, 37),))

    def again(x: Tensor, w: Tensor) -> Tensor:
        out = torch.utils.checkpoint.checkpoint(kernels.rms_norm, x, w, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out

    assert all(
        torch.equal(a, b) for a, b in zip(kept, run(again, (x, weight), (torch.ones(5, 37),)), strict=True)
    )


def test_under_autocast_the_dtype_of_x_stays(path: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kernels.rms_norm(make(2, 8), make(8)).dtype == torch.float32
        assert kernels.rms_norm(make(2, 8, dtype=torch.bfloat16), make(8)).dtype == torch.bfloat16


def test_module_is_a_drop_in(path: str) -> None:
    theirs, mine = nn.RMSNorm(37, eps=1e-6), kernels.RMSNorm(37, eps=1e-6)
    nn.init.normal_(theirs.weight)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 37)
    torch.testing.assert_close(mine(x), theirs(x))
    y, total = mine(x, residual=x)
    torch.testing.assert_close((y, total), (theirs(2 * x), 2 * x))
    gemma = kernels.RMSNorm(37, eps=1e-6, offset=1.0)
    assert torch.equal(gemma.weight, torch.zeros(37))
    torch.testing.assert_close(gemma(x), nn.RMSNorm(37, eps=1e-6)(x))
    assert "offset=1.0" in repr(gemma)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x is a list"),
        ({"x": torch.ones(3, dtype=torch.int64)}, ValueError, "x has dtype torch.int64"),
        ({"x": torch.ones(())}, ValueError, "x has no dimensions"),
        ({"weight": torch.ones(3)}, ValueError, r"weight has shape \(3,\): x needs \(4,\)"),
        ({"weight": torch.ones(4, device="meta")}, ValueError, "weight is on meta, but x is on cpu"),
        ({"weight": 2.0}, TypeError, "weight is a float"),
        ({"residual": torch.ones(4)}, ValueError, r"residual has shape \(4,\): x needs \(2, 4\)"),
        ({"eps": -1.0}, ValueError, "eps=-1.0"),
        ({"eps": "e"}, TypeError, "eps='e' is a str: pass a float"),
        ({"eps": True}, TypeError, "eps=True is a bool"),
        ({"eps": torch.tensor(1e-6)}, TypeError, "eps=.* is a Tensor"),
        ({"offset": "1"}, TypeError, "offset='1' is a str"),
        ({"offset": 1.0}, ValueError, "offset=1.0 is added to the weight"),
    ],
)
def test_bad_input(path: str, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kernels.rms_norm(**{"x": torch.ones(2, 4), **arguments})


def test_module_over_several_dimensions(path: str) -> None:
    theirs, mine = nn.RMSNorm((3, 4), eps=1e-6), kernels.RMSNorm((3, 4), eps=1e-6)
    nn.init.normal_(theirs.weight)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 4, 3).transpose(1, 2)
    torch.testing.assert_close(mine(x), theirs(x))
    y, total = mine(x, residual=x)
    torch.testing.assert_close((y, total), (theirs(2 * x), 2 * x))


def test_module_refuses_another_shape_than_its_own() -> None:
    """Without a weight only normalized_shape tells."""
    with pytest.raises(ValueError, match=r"x has shape \(2, 8\): it has to end in normalized_shape, \(4,\)"):
        kernels.RMSNorm(4, elementwise_affine=False)(torch.ones(2, 8))
    with pytest.raises(ValueError, match=r"residual has shape \(1, 2, 4\): x needs \(3, 2, 4\)"):
        kernels.RMSNorm((2, 4))(torch.ones(3, 2, 4), residual=torch.ones(1, 2, 4))
