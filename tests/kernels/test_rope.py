from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from overlapkit import kernels
from tests.kernels.judge import compare, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [  # leading shape, heads of q, of k, columns, those that turn
    ((2, 5), 3, 1, 8, 8),
    ((1, 1), 1, 1, 2, 2),
    ((1, 127), 4, 4, 10, 6),
    ((2, 3), 19, 2, 254, 254),  # more heads than a tile has rows
    ((7,), 3, 2, 37, 20),
]
Rotation = Callable[..., tuple[Tensor, Tensor]]


def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def table(n: int, pairs: int) -> tuple[Tensor, Tensor]:
    angle = torch.outer(torch.arange(n), 100.0 ** (-torch.arange(pairs) / pairs))
    return angle.cos(), angle.sin()


def by_complex_numbers(cos: Tensor, sin: Tensor, interleaved: bool) -> Rotation:
    """The independent form: pairs are complex numbers, times e^(i angle). cos and sin are each token's."""

    def turn(x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        pairs = cos.shape[-1]
        turning, rest = x[..., : 2 * pairs].to(wide), x[..., 2 * pairs :]
        by_pair = turning.unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
        by_pair = by_pair if interleaved else by_pair.mT
        z = (
            torch.complex(by_pair[..., 0], by_pair[..., 1])
            * torch.complex(cos.to(wide), sin.to(wide))[..., None, :]
        )
        y = torch.view_as_real(z)
        return torch.cat(((y if interleaved else y.mT).flatten(-2).to(x.dtype), rest), -1)

    return lambda q, k: (turn(q), turn(k))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(path: str, case: Any, interleaved: bool, dtype: torch.dtype) -> None:
    lead, q_heads, k_heads, width, turning = case
    q, k = make(*lead, q_heads, width, dtype=dtype), make(*lead, k_heads, width, dtype=dtype)
    cos, sin = table(lead[-1] + 2, turning // 2)

    def ours(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.rope(q, k, cos, sin, interleaved=interleaved, rotary_dim=turning)

    torchs = by_complex_numbers(cos[: lead[-1]], sin[: lead[-1]], interleaved)
    compare(ours, torchs, (q, k), (torch.randn(q.shape), torch.randn(k.shape)))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("lead", [(0, 5), (2, 0), (0,)], ids=str)
def test_zero_tokens(path: str, lead: tuple[int, ...], interleaved: bool) -> None:
    q, k = make(*lead, 2, 8), make(*lead, 1, 8)
    y, z = kernels.rope(q, k, *table(5, 2), interleaved=interleaved, rotary_dim=4)
    assert (y.shape, z.shape) == (q.shape, k.shape)
    dq, dk = torch.autograd.grad((y.sum(), z.sum()), (q, k))
    assert (dq.shape, dk.shape) == (q.shape, k.shape)


@pytest.mark.parametrize(
    "kind", ["each token", "one row for all", "a row of its own", "int32", "three dimensions"]
)
def test_positions(path: str, kind: str) -> None:
    """As of packed documents, which count from 0 again."""
    q, k = make(2, 5, 3, 8), make(2, 5, 1, 8)
    cos, sin = table(9, 4)
    positions = torch.tensor([[0, 1, 2, 0, 1], [4, 8, 0, 1, 2]])
    if kind in ("one row for all", "a row of its own"):
        positions = positions[1:] if kind == "one row for all" else positions[1]
    if kind == "int32":
        positions = positions.int()
    if kind == "three dimensions":
        q, k, positions = make(5, 3, 8), make(5, 1, 8), positions[1]
    of_tokens = cos[positions.long()], sin[positions.long()]
    grads = (torch.randn(q.shape), torch.randn(k.shape))
    found = run(lambda q, k: kernels.rope(q, k, cos, sin, positions), (q, k), grads)
    torch.testing.assert_close(found, run(by_complex_numbers(*of_tokens, False), (q, k), grads))
    if kind == "each token":
        given = run(lambda q, k: kernels.rope(q, k, *of_tokens), (q, k), grads)
        assert all(torch.equal(a, b) for a, b in zip(found, given, strict=True))


def test_a_position_outside_of_the_table_is_nan_and_reads_nothing(path: str) -> None:
    q, k = torch.ones(1, 5, 2, 6), torch.ones(1, 5, 1, 6)
    positions = torch.tensor([0, 3, 4, -1, 2**40])
    for x in kernels.rope(q, k, *table(4, 2), positions, rotary_dim=4):
        assert x[:, :2].isfinite().all()
        assert x[:, 2:, :, :4].isnan().all()
        assert (x[..., 4:] == 1).all(), "these columns do not turn"


def test_as_transformers_hands_them_over(path: str) -> None:
    """Tokens before columns, and each angle twice, beside the formula that its models hold."""

    def rotate_half(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), -1)

    cos, sin = (torch.cat((x, x), -1)[None].expand(2, -1, -1) for x in table(5, 4))
    q, k = make(2, 5, 6, 8).transpose(1, 2), make(2, 2, 5, 8)
    grads = (torch.randn(2, 6, 5, 8), torch.randn(()).expand(2, 2, 5, 8))

    def ours(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        y, z = kernels.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return y.transpose(1, 2), z.transpose(1, 2)

    def theirs(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        c, s = cos[:, None].to(q.dtype), sin[:, None].to(q.dtype)
        return q * c + rotate_half(q) * s, k * c + rotate_half(k) * s

    compare(ours, theirs, (q.detach().requires_grad_(), k), grads)


def test_parts_of_one_projection_are_read_where_they_lie(
    interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overlapkit.kernels.raw import rope as raw

    seen: list[Any] = []
    launch = raw._rotate.launch
    monkeypatch.setattr(
        raw._rotate, "launch", lambda grid, *args, **kw: (seen.extend(args), launch(grid, *args, **kw))
    )
    qkv = torch.randn(2, 5, 8, 6)
    q, k, _ = qkv.split((4, 2, 2), dim=2)
    turn = torch.polar(torch.ones(5, 3), torch.rand(5, 3))
    y, z = kernels.rope(q, k, turn.real, turn.imag, interleaved=True)
    places = [x.data_ptr() for x in seen[:4]]
    assert places == [x.data_ptr() for x in (q, k, turn.real, turn.imag)]
    expected = by_complex_numbers(turn.real, turn.imag, True)(q, k)
    torch.testing.assert_close((y, z), expected)


@pytest.mark.parametrize("kind", ["transposed", "every second column", "one value for all", "sliced"])
def test_any_strides(path: str, kind: str) -> None:
    def strided(*shape: int) -> Tensor:
        if kind == "transposed":
            return torch.randn(shape[::-1]).permute(3, 2, 1, 0)
        if kind == "every second column":
            return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
        return (
            torch.randn(()).expand(shape)
            if kind == "one value for all"
            else torch.randn(9, 9, 9, 9)[
                1 : 1 + shape[0], 1 : 1 + shape[1], 1 : 1 + shape[2], 1 : 1 + shape[3]
            ]
        )

    q, k = strided(2, 5, 3, 8).requires_grad_(), make(2, 5, 1, 8)
    cos, sin = table(5, 4)
    turn = by_complex_numbers(cos, sin, False)

    def ours(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.rope(q, k, cos, sin.mT.contiguous().mT)

    compare(ours, turn, (q, k), (strided(2, 5, 3, 8), torch.randn(2, 5, 1, 8)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_tables_of_another_dtype(path: str, dtype: torch.dtype) -> None:
    q, k = torch.randn(5, 2, 8), torch.randn(5, 1, 8)
    cos, sin = (x.to(dtype) for x in table(5, 4))
    torch.testing.assert_close(
        kernels.rope(q, k, cos, sin), by_complex_numbers(cos.float(), sin.float(), False)(q, k)
    )


@pytest.mark.parametrize("frozen", ["q", "k"])
def test_what_is_frozen_or_unused_gets_no_gradient(path: str, frozen: str) -> None:
    inputs = (make(2, 5, 3, 8), make(2, 5, 1, 8))
    tables = table(5, 4)
    grads: list[Tensor | None] = [torch.randn(x.shape) for x in inputs]
    turn = by_complex_numbers(*tables, False)
    outputs = kernels.rope(*inputs, *tables)
    used, unused = (1, 0) if frozen == "q" else (0, 1)
    both = torch.autograd.grad([x.sum() for x in outputs], inputs, retain_graph=True)
    found = torch.autograd.grad(outputs[used].sum(), inputs, allow_unused=True)
    assert torch.equal(found[used], both[used])
    assert found[unused] is None
    inputs[unused].requires_grad_(False)
    grads[unused] = None
    compare(lambda q, k: kernels.rope(q, k, *tables), turn, inputs, grads)


def test_derivatives_of_any_order(path: str) -> None:
    """A rotation is linear: its gradient is the same operator, and so on."""
    q, k = make(3, 2, 4), make(3, 1, 4)
    tables = table(3, 2)
    double = (q.detach().double().requires_grad_(), k.detach().double().requires_grad_())
    assert torch.autograd.gradcheck(lambda q, k: kernels.rope(q, k, *tables), double)

    def second(rotate: Rotation, *x: Tensor) -> tuple[Tensor, ...]:
        y, z = rotate(*x)
        first = torch.autograd.grad((y**3).sum() + (z**3).sum(), x, create_graph=True)
        return torch.autograd.grad(sum((g**2).sum() for g in first), x)

    found = second(lambda q, k: kernels.rope(q, k, *tables), q, k)
    torch.testing.assert_close(found, second(by_complex_numbers(*tables, False), q, k))


def test_inputs_are_left_alone_and_two_runs_agree_bitwise(interpreted: None) -> None:
    q, k = make(2, 5, 3, 8), make(2, 5, 1, 8)
    copies = q.detach().clone(), k.detach().clone()
    y, z = kernels.rope(q, k, *table(5, 4))
    first = torch.autograd.grad((y.sum(), z.sum()), (q, k), retain_graph=True)
    second = torch.autograd.grad((y.sum(), z.sum()), (q, k))
    again = kernels.rope(q, k, *table(5, 4))
    for a, b in zip((*first, y, z, *copies), (*second, *again, q, k), strict=True):
        assert torch.equal(a, b)
    assert (q._version, k._version) == (0, 0)


def test_opcheck(interpreted: None) -> None:
    op = torch.ops.overlapkit.rope.default
    cos, sin = (x[None] for x in table(5, 3))
    positions = torch.tensor([[0, 4, 1, 2], [0, 1, 0, 1]])
    permuted = torch.randn(6, 3, 4, 2).permute(3, 2, 1, 0).requires_grad_()
    torch.library.opcheck(op, (make(2, 4, 3, 6), make(2, 4, 1, 6), cos, sin, None, False, False))
    torch.library.opcheck(op, (permuted, make(2, 4, 1, 6), cos, sin, positions, True, False))
    torch.library.opcheck(op, (make(0, 4, 3, 8), make(0, 4, 1, 8), cos, sin, None, False, True))


@pytest.mark.parametrize("lead", [(2, 5), (5,)], ids=str)
def test_compiled_in_one_graph_is_bitwise_the_same(path: str, lead: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    module = kernels.RotaryEmbedding(6, 9, interleaved=True)
    positions = torch.arange(5).expand(lead) + 2
    inputs = (make(*lead, 3, 8), make(*lead, 2, 8))
    grads = (torch.randn(*lead, 3, 8), torch.randn(*lead, 2, 8))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found = run(lambda q, k: compiled(q, k, positions), inputs, grads)
    for a, b in zip(run(lambda q, k: module(q, k, positions), inputs, grads), found, strict=True):
        assert torch.equal(a, b)


def test_recomputed_in_backward_and_under_autocast(interpreted: None) -> None:
    inputs, tables = (make(5, 3, 8, dtype=torch.bfloat16), make(5, 1, 8, dtype=torch.bfloat16)), table(5, 4)
    grads = (torch.randn(5, 3, 8), torch.randn(5, 1, 8))

    def again(*x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.float16):
            y, z = torch.utils.checkpoint.checkpoint(kernels.rope, *x, *tables, use_reentrant=False)
        assert y.dtype == z.dtype == torch.bfloat16
        return y, z

    kept = run(lambda *x: kernels.rope(*x, *tables), inputs, grads)
    assert all(torch.equal(a, b) for a, b in zip(kept, run(again, inputs, grads), strict=True))


WIDE = torch.ones(9, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": [1.0]}, TypeError, "q is a list"),
        ({"q": torch.ones(2, 8)}, ValueError, r"q has shape \(2, 8\): pass \(B, T, H, D\)"),
        ({"k": torch.ones(2, 5, 1, 6)}, ValueError, r"k has shape \(2, 5, 1, 6\): q needs \(2, 5, 1, 8\)"),
        ({"k": torch.ones(5, 1, 8)}, ValueError, r"k has shape \(5, 1, 8\)"),
        ({"k": torch.ones(2, 5, 1, 8).half()}, ValueError, "k has dtype torch.float16, q torch.float32"),
        ({"k": None}, TypeError, "k is a NoneType"),
        ({"rotary_dim": 5}, ValueError, "rotary_dim=5: allowed are even numbers from 2 to q's 8 columns"),
        ({"rotary_dim": 10}, ValueError, "rotary_dim=10"),
        ({"rotary_dim": 4.0}, TypeError, "rotary_dim=4.0 is a float"),
        ({"interleaved": 1}, TypeError, "interleaved=1 is a int: pass a bool"),
        ({"cos": WIDE[:, :2], "sin": WIDE[:, :2]}, ValueError, "cos has 2 columns: 4 .* pass rotary_dim=4"),
        (
            {"cos": WIDE[:3], "sin": WIDE[:3]},
            ValueError,
            r"cos has shape \(3, 4\): .* needs \(5 or more, 4\)",
        ),
        ({"cos": WIDE.int()}, ValueError, "cos has dtype torch.int32"),
        ({"sin": WIDE[:, :3]}, ValueError, r"sin has shape \(9, 3\): cos needs \(9, 4\)"),
        ({"sin": None}, TypeError, "sin is a NoneType"),
        ({"cos": WIDE.clone().requires_grad_()}, ValueError, r"cos requires a gradient.*pass cos.detach\(\)"),
        ({"cos": WIDE.to("meta")}, ValueError, "cos is on meta, q on cpu: move cos there"),
        (
            {"cos": WIDE[None, :5], "positions": torch.arange(5)},
            ValueError,
            r"needs \(P, 4\) beside positions",
        ),
        (
            {"cos": torch.ones(9, 8), "sin": torch.ones(9, 8), "interleaved": True},
            ValueError,
            r"cos has 8 columns: 4 are needed, one for each pair \(pass one of each",
        ),
        (
            {"positions": torch.arange(4)},
            ValueError,
            r"positions has shape \(4,\): .* \(5,\), \(1, 5\) or \(2, 5\)",
        ),
        ({"positions": torch.ones(5)}, ValueError, "positions has dtype torch.float32: pass int64 or int32"),
        ({"positions": [0] * 5}, TypeError, "positions is a list"),
    ],
)
def test_bad_input(path: str, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {"q": torch.ones(2, 5, 3, 8), "k": torch.ones(2, 5, 1, 8), "cos": WIDE, "sin": WIDE}
    with pytest.raises(error, match=message):
        kernels.rope(**{**good, **arguments})
