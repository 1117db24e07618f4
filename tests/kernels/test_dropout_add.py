from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overlapkit import kernels
from overlapkit.kernels.dropout_add import _philox
from tests.interpreter import interpreter
from tests.kernels.judge import compare, run
from tests.kernels.strides import KINDS, strided

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
P, SEED = 0.3, 1234567890123456789


def make(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def ours(x: Tensor, residual: Tensor) -> Tensor:
    return kernels.dropout_add(x, residual, P, SEED)


def kept(*shape: int, seed: int | Tensor | None = SEED, p: float = P) -> Tensor:
    return kernels.dropout_add(torch.ones(shape), torch.zeros(shape), p, seed) != 0


def philox(counter: int, key: int) -> list[int]:
    """Philox 4x32-10 in Python's integers."""
    low = 2**32 - 1
    a, b, c, d, k, m = counter & low, counter >> 32, 0, 0, key & low, key >> 32 & low
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = y >> 32 ^ b ^ k, y & low, x >> 32 ^ d ^ m, x & low
        k, m = k + 0x9E3779B9 & low, m + 0xBB67AE85 & low
    return [a, b, c, d]


def torchs(x: Tensor, residual: Tensor) -> Tensor:
    """With a mask drawn in Python: row by row, four neighbours to a counter."""
    n_cols = x.shape[-1]
    groups = -(-n_cols // 4)
    rows = range(x.numel() // max(n_cols, 1))
    numbers = [[philox(r * groups + i // 4, SEED)[i % 4] for i in range(n_cols)] for r in rows]
    mask = torch.tensor(numbers, dtype=torch.int64) < (1 - P) * 2**32
    return residual + torch.where(mask.reshape(x.shape), x / (1 - P), 0.0)


def test_philox_gives_the_numbers_of_its_authors() -> None:
    """The known answer of Random123 for zeros; beyond, what Python's integers give."""
    assert philox(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    counters, key = torch.tensor([0, 1, 2**32 - 1, 2**32, 2**62 + 12345]), -(2**63) + 987654321
    found = torch.stack(_philox(counters, torch.tensor(key)), -1)
    assert found.tolist() == [philox(c, key) for c in counters.tolist()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 37), (2, 1), (2, 3, 55), (0, 16), (3, 0)], ids=str)
def test_values_and_gradients_are_as_good_as_torchs(
    path: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    inputs, grads = (make(*shape, dtype=dtype), make(*shape, dtype=dtype)), (make(*shape, grad=False),)
    compare(ours, torchs, inputs, grads)


@pytest.mark.parametrize("shape", [(3,), (300, 8), (2, 4097), (2, 3, 2049)], ids=str)
@pytest.mark.parametrize("seed", [SEED, -1, torch.tensor(7), torch.tensor([2**62])], ids=str)
def test_the_mask_is_the_same_on_every_path(shape: tuple[int, ...], seed: int | Tensor) -> None:
    plain = kept(*shape, seed=seed)
    with interpreter():
        assert torch.equal(kept(*shape, seed=seed), plain)
    assert (
        plain.numel() < 100 or abs(plain.float().mean() - (1 - P)) < 4 * (P * (1 - P) / plain.numel()) ** 0.5
    )


def test_masks_of_neighbouring_seeds_rows_and_columns_have_nothing_in_common(path: str) -> None:
    one, other = kept(64, 64, p=0.5), kept(64, 64, seed=SEED + 1, p=0.5)
    pairs = [(one, other), (one[1:], one[:-1]), (one[:, 1:], one[:, :-1]), (one[:, 4:], one[:, :-4])]
    for a, b in pairs:
        assert abs((a == b).float().mean() - 0.5) < 0.04  # five standard deviations


@pytest.mark.parametrize("kind", KINDS)
def test_any_strides(path: str, kind: str) -> None:
    """The place of an element counts, not where it lies."""
    x = strided(kind)
    compare(ours, torchs, (x.requires_grad_(), make(*x.shape)), (strided(kind),))
    compare(ours, torchs, (make(*x.shape), strided(kind).requires_grad_()), (torch.randn(x.shape),))


@pytest.mark.parametrize("options", [{"p": 0.0}, {"p": 0.9, "training": False}], ids=str)
def test_without_dropout_it_is_an_addition_and_draws_nothing(path: str, options: dict[str, Any]) -> None:
    x, residual = make(3, 8), make(3, 8, dtype=torch.bfloat16)
    before = torch.get_rng_state()
    assert torch.equal(kernels.dropout_add(x, residual, **options), x + residual)
    assert torch.equal(torch.get_rng_state(), before)


def test_with_p_of_one_only_the_residual_is_left(path: str) -> None:
    x, residual, dy = torch.full((3, 8), float("inf"), requires_grad=True), make(3, 8), torch.randn(3, 8)
    y, dx, dresidual = run(lambda x, r: kernels.dropout_add(x, r, 1.0), (x, residual), (dy,))
    assert torch.equal(y, residual)
    assert torch.equal(dx, torch.zeros(3, 8))
    assert torch.equal(dresidual, dy)


def test_the_least_p_drops_next_to_nothing(path: str) -> None:
    assert kept(100, 100, p=1e-12).all()


def test_without_a_seed_torchs_generator_decides(path: str) -> None:
    torch.manual_seed(1)
    first, second = kept(5, 37, seed=None), kept(5, 37, seed=None)
    torch.manual_seed(1)
    assert torch.equal(kept(5, 37, seed=None), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("seed", [SEED, None])
def test_recomputed_in_backward_with_the_same_mask(path: str, seed: int | None) -> None:
    x, residual = torch.ones(5, 37, requires_grad=True), torch.zeros(5, 37)
    y = torch.utils.checkpoint.checkpoint(kernels.dropout_add, x, residual, P, seed, use_reentrant=False)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, y.detach())


def test_only_the_seed_is_kept_for_backward(interpreted: None) -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        ours(make(5, 37), make(5, 37))
    assert [t.numel() for t in saved] == [1]


def test_a_seed_tensor_may_change_between_steps_but_not_within_one(interpreted: None) -> None:
    x, residual, seed = make(5, 37), make(5, 37), torch.zeros((), dtype=torch.int64)
    first = kernels.dropout_add(x, residual, P, seed)
    seed.add_(1)
    assert not torch.equal(kernels.dropout_add(x, residual, P, seed), first)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(path: str, frozen: int) -> None:
    inputs = [make(5, 37), make(5, 37)]
    inputs[frozen].requires_grad_(False)
    compare(ours, torchs, inputs, (torch.randn(5, 37),))


def test_mixed_dtypes(path: str) -> None:
    """As in torch: the wider dtype comes out, and each gradient in its own."""
    x, residual = make(5, 37, dtype=torch.bfloat16), make(5, 37)
    y, dx, dresidual = run(ours, (x, residual), (torch.randn(5, 37),))
    assert (y.dtype, dx.dtype, dresidual.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    torch.testing.assert_close(y, torchs(x.detach().float(), residual.detach()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(x, residual).dtype == (F.dropout(x) + residual).dtype
        assert ours(x, x).dtype == (F.dropout(x) + x).dtype


def test_inputs_are_left_alone_and_the_graph_may_be_retained(interpreted: None) -> None:
    x, residual = make(5, 37), make(5, 37)
    copies = x.detach().clone(), residual.detach().clone()
    y = ours(x, residual)
    first = torch.autograd.grad(y.sum(), (x, residual), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (x, residual))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(x, copies[0])
    assert torch.equal(residual, copies[1])


def test_a_second_derivative_is_an_error_not_a_wrong_number(interpreted: None) -> None:
    x, dy = make(3, 5), make(3, 5)
    (first,) = torch.autograd.grad(ours(x, make(3, 5)), x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="dropout_add cannot be differentiated twice"):
        first.sum().backward()


def opcheck_inputs() -> list[tuple[Any, ...]]:
    permuted = torch.randn(9, 4, 3).permute(1, 2, 0).requires_grad_()
    return [
        (permuted, make(4, 3, 9), torch.tensor([3]), 0.5),
        (make(4, 9, dtype=torch.bfloat16), make(4, 9), torch.tensor(3), 1.0),
        (make(0, 9), make(0, 9), torch.tensor(3), 0.1),
    ]


@pytest.mark.parametrize("number", range(3))
def test_opcheck(interpreted: None, number: int) -> None:
    torch.library.opcheck(torch.ops.overlapkit.dropout_add.default, opcheck_inputs()[number])


@pytest.mark.parametrize("seed", [SEED, None])
def test_compiled_in_one_graph_is_bitwise_the_same(path: str, seed: int | None) -> None:
    torch._dynamo.reset()
    inputs, grads = (make(5, 37), make(5, 37)), (torch.randn(5, 37),)

    def fn(x: Tensor, residual: Tensor) -> Tensor:
        return kernels.dropout_add(x, residual, P, seed)

    torch.manual_seed(1)
    eager = run(fn, inputs, grads)
    torch.manual_seed(1)
    for a, b in zip(
        eager, run(torch.compile(fn, fullgraph=True, backend="aot_eager"), inputs, grads), strict=True
    ):
        assert torch.equal(a, b)


def test_a_seed_that_changes_compiles_twice_at_most(interpreted: None) -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    fn = torch.compile(kernels.dropout_add, fullgraph=True, backend=backend)
    x, residual = make(5, 37, grad=False), make(5, 37, grad=False)
    for seed in range(10, 14):
        assert torch.equal(fn(x, residual, P, seed), kernels.dropout_add(x, residual, P, seed))
    assert len(graphs) <= 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x is a list"),
        ({"residual": torch.ones(4)}, ValueError, r"residual has shape \(4,\): x needs \(2, 4\)"),
        ({"p": 1.5}, ValueError, "p=1.5: allowed are probabilities, 0 to 1"),
        ({"p": "half"}, TypeError, "p='half' is a str"),
        ({"seed": 0.5}, TypeError, "seed=0.5 is a float: pass an int, an int64 tensor or None"),
        ({"seed": True}, TypeError, "seed=True is a bool"),
        ({"seed": 2**63}, ValueError, "seed=9223372036854775808: allowed is what an int64 holds"),
        ({"seed": torch.ones(2, dtype=torch.int64)}, ValueError, r"shape \(2,\): pass one int64 element"),
        ({"seed": torch.ones(1)}, ValueError, "seed has dtype torch.float32"),
        (
            {"seed": torch.ones((), dtype=torch.int64, device="meta")},
            ValueError,
            "seed is on meta, but x is on",
        ),
    ],
)
def test_bad_input(path: str, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kernels.dropout_add(**{"x": torch.ones(2, 4), "residual": torch.ones(2, 4), **arguments})
