from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overlapkit import kernels
from tests.kernels.judge import compare, run
from tests.kernels.strides import KINDS, strided

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(5, 37), (3,), (2, 1), (2, 3, 255), (3, 127), (0, 16), (3, 0), (2, 4097), (2, 70_001)]


def make(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def ours(scale: float = 1.0) -> Callable[..., Tensor]:
    return lambda x, mask=None: kernels.softmax(x, scale=scale, mask=mask)


def torchs(scale: float = 1.0) -> Callable[..., Tensor]:
    def fn(x: Tensor, mask: Tensor | None = None) -> Tensor:
        z = x * scale
        if mask is not None:
            z = z.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else z + mask
        return F.softmax(z, -1).to(x.dtype)

    return fn


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_as_good_as_torchs(
    path: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    inputs, grads = (make(*shape, dtype=dtype),), (make(*shape, dtype=dtype, grad=False),)
    compare(ours(), torchs(), inputs, grads)


MASKS = {
    "all": (2, 3, 5, 37),
    "for each query": (5, 37),
    "for each key": (2, 1, 1, 37),
    "same in each head": (2, 1, 5, 37),
    "whole rows": (3, 5, 1),
    "last of a batch": (1, 37),
}


@pytest.mark.parametrize("kind", ["bool", "float", "float with a gradient"])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_masks_are_broadcast(path: str, shape: tuple[int, ...], kind: str) -> None:
    x, dy = make(2, 3, 5, 37), make(2, 3, 5, 37, grad=False)
    mask = make(*shape, grad=kind.endswith("gradient")) if kind != "bool" else torch.rand(shape) < 0.7
    if shape == (3, 5, 1):
        mask = mask if kind != "bool" else torch.ones(shape, dtype=torch.bool)
    compare(ours(0.3), torchs(0.3), (x, mask), (dy,))


def test_a_mask_that_no_three_strides_describe(interpreted: None) -> None:
    """It is copied: five dimensions, every second one broadcast."""
    x, mask = make(2, 3, 2, 3, 2, 7), make(2, 1, 2, 1, 2, 7)
    compare(ours(), torchs(), (x, mask), (torch.randn(x.shape),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wide_rows_with_a_mask(path: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)  # the largest of 66,000 errors depends on it
    x, mask = make(2, 33_000, dtype=dtype), torch.arange(33_000) % 3 > 0
    mask[:20_000] = False  # whole tiles with nothing in them
    compare(ours(-2.0), torchs(-2.0), (x, mask), (torch.randn(2, 33_000).to(dtype),))


@pytest.mark.parametrize("width", [37, 33_000])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_row_that_is_masked_out_whole_is_zeros_as_in_torchs_attention(
    path: str, kind: str, width: int
) -> None:
    x = make(2, width)
    keep = torch.tensor([[True], [False]])
    mask = keep if kind == "bool" else torch.zeros(2, 1).masked_fill(~keep, float("-inf"))
    y, dx = run(ours(), (x, mask), (torch.randn(2, width),))
    assert torch.equal(y[1], torch.zeros(width))
    assert torch.equal(dx[1], torch.zeros(width))
    torch.testing.assert_close(y[0], F.softmax(x[0].detach(), -1))
    assert not dx.isnan().any()
    theirs = F.scaled_dot_product_attention(torch.ones(2, 1), torch.ones(3, 1), torch.eye(3), keep)
    assert torch.equal(theirs[1], torch.zeros(3))


def test_what_is_masked_may_be_anything_and_what_is_not_shows(path: str) -> None:
    x = torch.tensor([[1.0, float("nan"), 2.0], [1.0, float("inf"), 2.0]])
    mask = torch.tensor([True, False, True])
    torch.testing.assert_close(
        kernels.softmax(x, mask=mask)[:, ::2], F.softmax(torch.tensor([[1.0, 2.0]] * 2), -1)
    )
    assert kernels.softmax(x).isnan().all()
    assert kernels.softmax(x, mask=torch.zeros(3)).isnan().all()
    assert kernels.softmax(torch.full((1, 3), float("-inf"))).isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_any_strides(path: str, kind: str) -> None:
    compare(ours(), torchs(), (strided(kind).requires_grad_(), None), (strided(kind),))
    x = strided(kind)
    compare(ours(), torchs(), (make(*x.shape), strided(kind)), (torch.randn(x.shape),))


@pytest.mark.parametrize("dim", [0, -2, 1])
def test_another_dimension_is_left_to_torch(path: str, dim: int) -> None:
    x, mask = make(3, 4, 5), torch.rand(4, 5)
    expected = F.softmax(x * 0.5 + mask, dim)
    torch.testing.assert_close(kernels.softmax(x, dim, scale=0.5, mask=mask), expected)


def test_the_dtype_of_the_result(path: str) -> None:
    x = make(3, 37, dtype=torch.bfloat16)
    y, dx = run(lambda x: kernels.softmax(x, dtype=torch.float32), (x,), (torch.ones(3, 37),))
    torch.testing.assert_close(y, F.softmax(x.detach(), -1, dtype=torch.float32))
    assert dx.dtype == torch.bfloat16
    assert kernels.softmax(x, dtype=torch.float64).dtype == torch.float64


def test_autocast_is_torchs_own(path: str) -> None:
    """On the CPU the dtype stays; on CUDA (here tensors without data) float32 comes out."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    half = make(3, 37, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kernels.softmax(half).dtype == F.softmax(half, -1).dtype == torch.bfloat16
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode():
            x = torch.empty(2, 8, dtype=torch.bfloat16, device="cuda")
            assert kernels.softmax(x).dtype == torch.float32
            assert kernels.softmax(x, dtype=torch.bfloat16).dtype == torch.bfloat16
    finally:
        torch.set_autocast_enabled("cuda", before)


def test_inputs_are_left_alone_and_two_runs_agree_bitwise(interpreted: None) -> None:
    inputs, grads = (make(3, 2, 37), make(2, 37)), (torch.randn(3, 2, 37),)
    copies = [t.detach().clone() for t in inputs]
    first, second = run(ours(0.5), inputs, grads), run(ours(0.5), inputs, grads)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) and a._version == 0 for a, b in zip(inputs, copies, strict=True))


def test_gradcheck_of_the_plain_form() -> None:
    x, mask = (t.detach().double().requires_grad_() for t in (make(2, 3, 5), make(3, 1)))
    assert torch.autograd.gradcheck(ours(0.7), (x, mask))


def test_a_second_derivative_is_an_error_not_a_wrong_number(interpreted: None) -> None:
    x = make(3, 5)
    (first,) = torch.autograd.grad(kernels.softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="softmax cannot be differentiated twice"):
        first.sum().backward()


def opcheck_inputs() -> list[tuple[Any, ...]]:
    permuted = torch.randn(9, 4, 3).permute(1, 2, 0).requires_grad_()
    return [
        (permuted, make(3, 1), 0.5, torch.float32),
        (make(4, 3, 9, dtype=torch.bfloat16), torch.rand(9) < 0.5, 1.0, torch.float32),
        (make(0, 9), None, 1.0, torch.float32),
    ]


@pytest.mark.parametrize("number", range(3))
def test_opcheck(interpreted: None, number: int) -> None:
    torch.library.opcheck(torch.ops.overlapkit.softmax.default, opcheck_inputs()[number])


def test_a_float64_result_has_its_digits(path: str) -> None:
    x, mask = torch.randn(3, 37), torch.randn(37, dtype=torch.float64)
    y = kernels.softmax(x, dtype=torch.float64, scale=0.5, mask=mask)
    torch.testing.assert_close(y, F.softmax(x.double() * 0.5 + mask, -1), rtol=1e-14, atol=0.0)


def test_compiled_in_one_graph_is_bitwise_the_same(path: str) -> None:
    torch._dynamo.reset()
    inputs, grads = (make(3, 2, 37), make(2, 37)), (torch.randn(3, 2, 37),)
    compiled = torch.compile(ours(0.5), fullgraph=True, backend="aot_eager")
    for a, b in zip(run(ours(0.5), inputs, grads), run(compiled, inputs, grads), strict=True):
        assert torch.equal(a, b)


def test_recomputed_in_backward_and_retained(interpreted: None) -> None:
    x, dy = make(5, 37), torch.randn(5, 37)
    kept = kernels.softmax(x)
    again = torch.utils.checkpoint.checkpoint(kernels.softmax, x, use_reentrant=False)
    first = torch.autograd.grad(kept, x, dy, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(kept, x, dy)[0])
    assert torch.equal(first, torch.autograd.grad(again, x, dy)[0])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x is a list"),
        ({"x": torch.ones(3, dtype=torch.int64)}, ValueError, "x has dtype torch.int64"),
        ({"dim": 2}, IndexError, "dim=2: x has 2 dimensions, -2 to 1"),
        ({"dtype": torch.int32}, TypeError, "dtype=torch.int32: pass a floating-point torch.dtype"),
        ({"scale": "1"}, TypeError, "scale='1' is a str"),
        ({"scale": float("inf")}, ValueError, "scale=inf: allowed are finite numbers"),
        ({"mask": True}, TypeError, "mask is a bool"),
        ({"mask": torch.ones(4, dtype=torch.int64)}, ValueError, "mask has dtype torch.int64: pass bool"),
        ({"mask": torch.ones(3)}, ValueError, r"mask has shape \(3,\): .* that of x, \(2, 4\)"),
        ({"mask": torch.ones(5, 2, 4)}, ValueError, r"mask has shape \(5, 2, 4\)"),
        ({"mask": torch.ones(4, device="meta")}, ValueError, "mask is on meta, but x is on cpu"),
    ],
)
def test_bad_input(path: str, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kernels.softmax(**{"x": torch.ones(2, 4), **arguments})
