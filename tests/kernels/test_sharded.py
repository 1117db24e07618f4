"""DTensors against the same function of the whole tensors: values, gradients, placements, collectives."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from overlapkit import kernels
from tests.ranks import run_ranks

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
Placements = Sequence[Placement]


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def distributed(x: Tensor, mesh: DeviceMesh, placements: Placements) -> Tensor:
    """The shards of a tensor that all ranks made alike; a leaf of its own."""
    return distribute_tensor(x.detach(), mesh, placements, src_data_rank=None).requires_grad_(x.requires_grad)


def whole(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(whole, x))
    return x.full_tensor() if isinstance(x, DTensor) else x


def check(
    fn: Callable[..., Any],
    inputs: Sequence[Tensor],
    placements: Sequence[Placements | None],
    mesh: DeviceMesh,
) -> list[Any]:
    """Compare fn of DTensors (plain where placements are None) with fn of whole ones; return placements."""
    parts = [
        x.detach().clone().requires_grad_(x.requires_grad) if p is None else distributed(x, mesh, p)
        for x, p in zip(inputs, placements, strict=True)
    ]
    out, true = fn(*parts), fn(*inputs)
    out, true = (o if isinstance(o, tuple) else (o,) for o in (out, true))
    weights = [torch.randn(t.shape) for t in true]
    wanted = [i for i, x in enumerate(inputs) if x.requires_grad]
    loss = sum((t * w).sum() for t, w in zip(true, weights, strict=True))
    true_grads = torch.autograd.grad(loss, [inputs[i] for i in wanted])
    replicas = [distribute_tensor(w, mesh, [R] * mesh.ndim) for w in weights]
    loss = sum((o * w).sum() for o, w in zip(out, replicas, strict=True))
    grads = torch.autograd.grad(loss, [parts[i] for i in wanted])
    torch.testing.assert_close(whole(out), true)
    torch.testing.assert_close(whole(grads), true_grads)
    assert [o.shape for o in out] == [t.shape for t in true]
    assert [o.stride() for o in out] == [t.contiguous().stride() for t in true]
    return [out[0].placements, *(g.placements if isinstance(g, DTensor) else None for g in grads)]


def norm(x: Tensor, weight: Tensor, residual: Tensor) -> Any:
    return kernels.rms_norm(x, weight, 1e-5, residual=residual, offset=1.0)


def test_rows_of_a_norm(path: str) -> None:
    """Uneven shards; a residual that lies otherwise; a weight that is a plain parameter."""

    def run(rank: int) -> list[Any]:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        inputs = (leaf(3, 5, 8), leaf(8), leaf(3, 5, 8))
        return [
            check(norm, inputs, placements, mesh)
            for placements in (
                ([S1], [R], [S1]),
                ([S0], [R], [S1]),
                ([R], [R], [S1]),
                ([R], [R], [R]),
                ([S1], None, [R]),
            )
        ]

    for found in run_ranks(2, run):
        assert found == [
            [(S1,), (S1,), (Partial(),), (S1,)],
            [(S0,), (S0,), (Partial(),), (S1,)],
            [(S1,), (R,), (Partial(),), (S1,)],
            [(R,), (R,), (R,), (R,)],
            [(S1,), (S1,), None, (R,)],
        ]


def test_a_mesh_of_two_dimensions(path: str) -> None:
    def run(rank: int) -> list[Any]:
        mesh = init_device_mesh("cpu", (2, 2))
        torch.manual_seed(0)
        gate, up, weight = leaf(4, 3, 8), leaf(4, 3, 8), leaf(8)
        return [
            check(kernels.swiglu, (gate, up), ([S0, S1], [S0, S1]), mesh),
            check(packed, (gate,), ([S1, S0],), mesh),
            check(norm, (gate, weight, up), ([R, S0], [R, R], [R, S0]), mesh)[2],
        ]

    for swiglu, halves, dweight in run_ranks(4, run):
        assert swiglu == [(S0, S1)] * 3
        assert halves == [(S1, S0)] * 2
        assert dweight == (R, Partial())


def test_strided_shards(path: str) -> None:
    """What torch calls the shards of two dimensions of which it has made one."""

    def flat(gate: Tensor, up: Tensor) -> Tensor:
        return kernels.swiglu(gate.flatten(0, 1), up.flatten(0, 1))

    def run(rank: int) -> list[Any] | None:
        mesh = init_device_mesh("cpu", (2, 2))
        torch.manual_seed(0)
        gate, up = leaf(4, 4, 8), leaf(4, 4, 8)
        try:
            distributed(gate, mesh, [S0, S1]).flatten(0, 1)
        except RuntimeError:
            return None
        return check(flat, (gate, up), ([S0, S1], [S0, S1]), mesh)[1:]

    found = run_ranks(4, run)
    if found == [None] * 4:
        pytest.skip("torch 2.11 does not flatten sharded dimensions")
    assert found == [[(S0, S1)] * 2] * 4


@pytest.mark.parametrize("given", ["table", "positions", "packed", "angles"])
def test_heads(path: str, given: str) -> None:
    """Sharded over batch, tokens (unevenly) and heads; a token turns by its place in the whole sequence."""

    def run(rank: int) -> list[Any]:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        q, k = leaf(2, 5, 4, 8), leaf(2, 5, 2, 8)
        angles = torch.rand(1 if given == "angles" else 9, *([5] if given == "angles" else []), 4)
        rows = {"positions": torch.arange(5) + 2, "packed": torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]])}
        positions = [rows[given]] if given in rows else []
        inputs, others = (q, k, angles.cos(), angles.sin(), *positions), [None] * (2 + len(positions))
        return [
            check(kernels.rope, inputs, placements, mesh)
            for placements in (
                ([S0], [S0], *others),
                ([S1], [R], *others),
                ([S2], [S2], *others),
                ([S1], [S1], [R], [R], *([[R]] if positions else [])),
            )
        ]

    for found in run_ranks(2, run):
        assert found == [[(s,), (s,), (r,)] for s, r in ((S0, S0), (S1, R), (S2, S2), (S1, S1))]


def test_a_softmax_and_what_is_spread_over_it(path: str) -> None:
    """A causal mask is cut where tokens are; a bias that all rows share gets a gradient that is a sum."""

    def run(rank: int) -> list[Any]:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        x, bias, causal = leaf(2, 5, 6), leaf(6), torch.ones(5, 6, dtype=torch.bool).tril()

        def masked(x: Tensor, mask: Tensor) -> Tensor:
            return kernels.softmax(x, scale=0.5, mask=mask)

        return [
            check(masked, (x, causal), ([S1], None), mesh),
            check(masked, (x, bias), ([S0], [R]), mesh),
            check(masked, (x, leaf(2, 1, 6)), ([S1], [S0]), mesh),
            check(masked, (x, bias), ([S0], None), mesh),
            check(lambda x: kernels.softmax(x, 0), (x,), ([S2],), mesh),
        ]

    for found in run_ranks(2, run):
        partial = (Partial(),)
        assert found[:4] == [
            [(S1,)] * 2,
            [(S0,), (S0,), partial],
            [(S1,), (S1,), (S0,)],
            [(S0,), (S0,), None],
        ]
        assert found[4] == [(S2,)] * 2


def test_dropout_draws_another_mask_for_each_shard_and_one_for_replicas(path: str) -> None:
    def run(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2, 2))
        x = torch.ones(2, 4, 64)
        found = []
        for seed in (7, torch.tensor(7)):
            inputs = [distributed(x.requires_grad_(), mesh, [S0, R]) for _ in "xr"]
            y = kernels.dropout_add(*inputs, 0.5, seed)
            (dx,) = torch.autograd.grad(y, inputs[:1], torch.ones_like(y))
            found += [y.to_local() - 1.0, dx.to_local()]
        return found

    ranks = run_ranks(4, run)
    for y, dx, again, _ in ranks:
        assert torch.equal(y, dx)
        assert torch.equal(y, again)
    first = kernels.dropout_add(torch.ones(1, 4, 64), torch.zeros(1, 4, 64), 0.5, 7)
    assert torch.equal(ranks[0][0], first)
    assert torch.equal(ranks[0][0], ranks[1][0])
    assert torch.equal(ranks[2][0], ranks[3][0])
    assert 0.4 < (ranks[0][0] == ranks[2][0]).float().mean() < 0.6


def packed(x: Tensor) -> Tensor:
    return kernels.geglu_packed(x, "up_gate", "tanh")


LOSSES: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none", "return_lse": True},
    {"ignore_index": 1, "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "return_lse": True},
]


@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_is_that_of_all_ranks(path: str, weighted: bool) -> None:
    """Ranks ignore unequally many targets, so that the mean of their means would be another number."""

    def run(rank: int) -> list[Any]:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        target = torch.tensor([-100, 1, -100, -100, 1, 2, 5, 1, 1])
        weight = torch.rand(7) if weighted else None
        found = []
        for options in LOSSES:
            for shape, dim in (((9, 7), S0), ((3, 7, 3), S2)):

                def fn(x: Tensor, t: Tensor, *w: Tensor, options: dict[str, Any] = options) -> Any:
                    return kernels.cross_entropy(x, t, *w, **options)

                t = target.where(target >= 0, options.get("ignore_index", -100)).view(shape[0], *shape[2:])
                inputs = (leaf(*shape), t) if weight is None else (leaf(*shape), t, weight)
                placed = ([dim], [S0 if dim is S0 else S1], *([[R]] if weighted else []))
                found.append(check(fn, inputs, placed, mesh)[0])
        soft = torch.rand(9, 7).softmax(-1)
        check(kernels.cross_entropy, (leaf(9, 7), soft), ([S0], [S0]), mesh)
        nothing = (leaf(2, 7), torch.full((2,), -100))
        check(kernels.cross_entropy, nothing, ([S0], [S0]), mesh)
        return found

    for found in run_ranks(2, run):
        assert found == [(Partial(),)] * 4 + [(S0,), (S1,)] + [(Partial(),)] * 2


def test_the_losses_in_place_and_of_a_linear_layer(path: str) -> None:
    def run(rank: int) -> list[Any]:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        target = torch.tensor([-100, 1, -100, -100, 1, 2, 5, 1, 1])
        found = []
        for options in ({}, {"reduction": "none"}):

            def in_place(x: Tensor, t: Tensor, options: dict[str, Any] = options) -> Any:
                return kernels.cross_entropy_(x * 1, t, **options)

            def head(x: Tensor, w: Tensor, t: Tensor, options: dict[str, Any] = options) -> Any:
                return kernels.linear_cross_entropy(x, w, t.view(x.shape[:-1]), chunk_bytes=200, **options)

            found += check(in_place, (leaf(9, 7), target), ([S0], [S0]), mesh)[:1]
            found += check(head, (leaf(9, 4), leaf(7, 4), target), ([S0], [R], [S0]), mesh)
        check(head, (leaf(9, 4), leaf(7, 4), target), ([S0], None, [S0]), mesh)
        return found

    one = [(Partial(),), (Partial(),), (S0,), (Partial(),)]
    assert run_ranks(2, run) == [one + [(S0,), (S0,), (S0,), (Partial(),)]] * 2


@pytest.fixture
def fake_ranks() -> Any:
    """A group of 8 of which only rank 3 runs; collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (2, 4))
    dist.destroy_process_group()


def test_what_is_communicated(fake_ranks: DeviceMesh, path: str) -> None:
    """Nothing, but one number for a mean; and that of a plain weight's gradient."""
    place = [S0, S1]
    x, residual = (distributed(leaf(4, 8, 16), fake_ranks, place) for _ in "xr")
    weight, plain = distributed(leaf(16), fake_ranks, [R, R]), leaf(16)
    logits = distributed(leaf(8, 32), fake_ranks, [R, S0])
    target = distributed(torch.zeros(8, dtype=torch.int64), fake_ranks, [R, S0])
    for fn, expected in (
        (lambda: norm(x, weight, residual)[0].to_local(), 0),
        (lambda: norm(x, plain, residual)[0].to_local(), 2),
        (lambda: kernels.swiglu(x, residual).to_local(), 0),
        (lambda: kernels.cross_entropy(logits, target), 1),
        (lambda: kernels.cross_entropy(logits, target, reduction="sum"), 0),
    ):
        with CommDebugMode() as comm:
            y = fn()
            y.backward(torch.ones_like(y))
        assert comm.get_total_counts() == expected
    assert x.grad is not None
    assert x.grad.to_local().shape == (2, 2, 16)


def test_compiled_in_one_graph_is_bitwise_the_same(fake_ranks: DeviceMesh, path: str) -> None:
    torch._dynamo.reset()
    x = distributed(leaf(4, 8, 16), fake_ranks, [S0, S1])
    weight = distributed(leaf(16), fake_ranks, [R, R])
    logits = distributed(leaf(8, 16), fake_ranks, [R, S0])
    target, angles = distributed(torch.arange(8), fake_ranks, [R, S0]), torch.rand(8, 4)

    def fn(x: Tensor, weight: Tensor, logits: Tensor, target: Tensor) -> Any:
        q, _ = kernels.rope(x.unflatten(-1, (2, 8)), x.unflatten(-1, (2, 8)), angles, angles)
        y = kernels.swiglu(kernels.rms_norm(x, weight), q.flatten(-2))
        return y, kernels.cross_entropy(logits, target)

    found = []
    for call in (fn, torch.compile(fn, fullgraph=True, backend="aot_eager")):
        y, loss = call(x, weight, logits, target)
        grads = torch.autograd.grad(
            [y, loss], [x, weight, logits], [torch.ones_like(y), torch.ones_like(loss)]
        )
        found.append([(t.to_local(), t.placements) for t in (y, loss, *grads)])
    for (a, a_placed), (b, b_placed) in zip(*found, strict=True):
        assert torch.equal(a, b)
        assert a_placed == b_placed


@pytest.mark.parametrize(
    ("placements", "error", "message"),
    [
        (([R, S2], [R, R], [R, R]), ValueError, r"x is sharded in dimension 2, along its rows .*x\.redistr"),
        (([R, R], [R, R], [S2, R]), ValueError, r"residual is sharded in dimension 2"),
        (
            ([R, Partial()], [R, R], [R, R]),
            ValueError,
            r"x is a sum to be done .*Partial.*redistribute",
        ),
        (([R, S0], [R, S0], [R, S0]), ValueError, r"weight has placements .*Shard.*: every rank needs all"),
        (([R, S0], [R, R], None), TypeError, "residual is a plain tensor beside DTensors"),
        ((None, [R, R], None), TypeError, "x is a plain tensor beside DTensors"),
    ],
)
def test_what_cannot_be_taken(
    fake_ranks: DeviceMesh, placements: Any, error: type[Exception], message: str
) -> None:
    shapes = ((4, 8, 16), (16,), (4, 8, 16))
    x, weight, residual = (
        leaf(*shape)
        if p is None
        else DTensor.from_local(torch.randn(shape), fake_ranks, p, run_check=False)
        if Partial() in p
        else distributed(leaf(*shape), fake_ranks, p)
        for shape, p in zip(shapes, placements, strict=True)
    )
    with pytest.raises(error, match=message):
        norm(x, weight, residual)


def test_heads_that_cannot_be_taken(fake_ranks: DeviceMesh) -> None:
    q, table = distributed(leaf(8, 4, 8), fake_ranks, [R, S2]), torch.rand(8, 4)
    with pytest.raises(ValueError, match="q is sharded in dimension 2, along its rows"):
        kernels.rope(q, q, table, table)
    with pytest.raises(TypeError, match="k is a plain tensor beside DTensors"):
        kernels.rope(distributed(leaf(8, 4, 8), fake_ranks, [R, S0]), leaf(8, 4, 8), table, table)
    q = distributed(leaf(9, 4, 8), fake_ranks, [R, S0])
    with pytest.raises(ValueError, match=r"cos has shape \(8, 4\): q of shape \(9, 4, 8\) needs 9 rows"):
        kernels.rope(q, q, table, table)


def test_the_dimension_that_a_softmax_sums_over_is_whole(fake_ranks: DeviceMesh) -> None:
    for placed, dim in ((S1, 1), (S0, -2)):
        with pytest.raises(ValueError, match=f"x is sharded in dimension {dim % 2}, along its rows"):
            kernels.softmax(distributed(leaf(8, 8), fake_ranks, [R, placed]), dim)


def test_dropout_needs_a_seed_that_ranks_agree_on(fake_ranks: DeviceMesh) -> None:
    x = distributed(leaf(8, 8), fake_ranks, [R, S0])
    with pytest.raises(ValueError, match="seed=None: x is a DTensor: pass the same seed on all ranks"):
        kernels.dropout_add(x, x)
    assert torch.equal(kernels.dropout_add(x, x, training=False).to_local(), 2 * x.to_local())
    with pytest.raises(TypeError, match="seed='a' is a str"):
        kernels.dropout_add(x, x, seed="a")


def test_meshes_that_differ(fake_ranks: DeviceMesh) -> None:
    x = distributed(leaf(4, 8), fake_ranks, [R, S0])
    other = distributed(leaf(4, 8), init_device_mesh("cpu", (8,)), [S0])
    with pytest.raises(ValueError, match="up lies on DeviceMesh.*, gate on DeviceMesh.*: use one mesh"):
        kernels.swiglu(x, other)


def test_arguments_that_are_no_tensors_get_the_functions_own_errors(fake_ranks: DeviceMesh) -> None:
    weight = distributed(leaf(8), fake_ranks, [R, R])
    with pytest.raises(TypeError, match="x is a list"):
        kernels.rms_norm([1.0], weight)
    with pytest.raises(ValueError, match=r"weight has shape \(8,\)"):
        kernels.rms_norm(distributed(leaf(4, 16), fake_ranks, [R, S0]), weight)
