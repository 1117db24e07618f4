from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from overlapkit import kernels
from overlapkit.kernels.linear_cross_entropy_chunks import chunk_rows
from tests.kernels.judge import compare, run, to_double
from tests.kernels.test_cross_entropy import truth
from tests.ranks import one_rank_group, run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FULL: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0}
SMALL = 12 * 45 * 3  # three rows of 45 fp32 logits at a time, in torch's operations


def make(
    n: int = 8, d: int = 16, v: int = 45, dtype: torch.dtype = torch.float32, bias: bool = True
) -> tuple[list[Tensor | None], Tensor]:
    """input, linear_weight and linear_bias; and target."""
    head: list[Tensor | None] = [torch.randn(n, d), torch.randn(v, d) / d**0.5, torch.randn(v)]
    if not bias:
        head[2] = None
    target = torch.randint(v, (n,))
    target[1::3] = -100
    return [None if t is None else t.to(dtype).requires_grad_() for t in head], target


def functions(
    target: Tensor, weight: Tensor | None = None, chunk_bytes: int = SMALL, **options: Any
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Ours; and the definition, whose loss of half-precision logits is computed in fp32 as ours is."""

    def ours(x: Tensor, w: Tensor, b: Tensor | None) -> Any:
        return kernels.linear_cross_entropy(
            x, w, target, linear_bias=b, weight=weight, chunk_bytes=chunk_bytes, **options
        )

    def theirs(x: Tensor, w: Tensor, b: Tensor | None) -> Any:
        logits = F.linear(x, w, b)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return truth(logits.to(wide), target, weight, **options)

    return ours, theirs


def check(head: list[Tensor | None], target: Tensor, weight: Tensor | None = None, **options: Any) -> None:
    shape = target.shape if options.get("reduction") == "none" else ()
    grads = [torch.randn(shape), *[torch.randn(target.shape)] * options.get("return_lse", False)]
    compare(*functions(target, weight, **options), head, grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(1, 1, 3), (7, 16, 45), (127, 8, 255)], ids=str)
def test_values_and_gradients_are_as_good_as_torchs(
    path: str, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    check(*make(*size, dtype=dtype), chunk_bytes=4 * size[2] * 40)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_every_option_with_every_reduction(path: str, bias: bool, return_lse: bool, reduction: str) -> None:
    torch.manual_seed(1)
    check(*make(bias=bias), torch.rand(45), reduction=reduction, return_lse=return_lse, **FULL)
    head, target = make(bias=bias)
    target[target == -100] = 3
    check(head, target, reduction=reduction, return_lse=return_lse, ignore_index=3)


def test_all_options_in_half_precision(path: str) -> None:
    check(*make(dtype=torch.bfloat16), torch.rand(45), return_lse=True, **FULL)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_zero_rows(path: str, reduction: str) -> None:
    head, target = make(0)
    out = run(functions(target, reduction=reduction)[0], head, [torch.ones(0 if reduction == "none" else ())])
    assert all(not t.isnan().any() and t.sum() == 0 for t in out)


def test_the_mean_over_nothing_is_zero(path: str) -> None:
    head, target = make()
    for found in run(functions(target.fill_(-100), torch.rand(45))[0], head, [torch.ones(())]):
        assert not found.any()


def test_a_target_out_of_range(path: str) -> None:
    head, target = make()
    target[4] = 45
    if path == "plain":
        with pytest.raises(IndexError, match="Target 45 is out of bounds"):
            functions(target)[0](*head)
    else:
        assert functions(target, reduction="none")[0](*head).isnan().nonzero().tolist() == [[4]]
        assert functions(target)[0](*head).isnan()


def test_any_strides_and_any_leading_shape(path: str) -> None:
    (x, w, b), target = make(12)
    assert x is not None
    for layout in (
        lambda x: x.view(2, 6, 16),
        lambda x: x.t().contiguous().t(),
        lambda x: x[:1].expand(12, 16),
    ):
        t = target.view(layout(x).shape[:-1])
        ours, theirs = functions(t, reduction="none")
        flat = functions(target, reduction="none")[1]
        grad = torch.randn(t.shape)
        mine = run(lambda x, w, b: ours(layout(x), w, b), (x, w, b), (grad,))  # noqa: B023
        right = run(lambda x, w, b: flat(layout(x).reshape(12, 16), w, b), (x, w, b), (grad.flatten(),))  # noqa: B023
        torch.testing.assert_close(mine[0].flatten(), right[0])
        torch.testing.assert_close(mine[1:], right[1:])


def peak(fn: Callable[[], Any]) -> int:
    """The most bytes that were allocated at once on the CPU while fn ran, by torch's own profiler."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        keep = fn()
    del keep
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"reduction": "none", **FULL}], ids=["mean", "none,all"])
def test_memory_is_bounded_by_chunk_bytes_and_gradients(options: dict[str, Any], dtype: torch.dtype) -> None:
    n, d, v, budget = 512, 4, 1000, 200_000
    (x, w, b), target = make(n, d, v, dtype)
    assert x is not None
    assert w is not None
    ours, theirs = functions(target, chunk_bytes=budget, **options)

    def step(fn: Callable[..., Tensor]) -> Any:
        return torch.autograd.grad(fn(x, w, b).sum(), (x, w, b))

    parameters = v * (d + 1)
    gradients = n * d * 2 * x.element_size() + parameters * (4 + 2 * w.element_size()) + parameters * 4
    rows = n * 4 * 24  # losses, lse, targets, ...
    assert peak(lambda: step(ours)) < budget + gradients + rows < n * v * 4 / 4
    assert peak(lambda: step(theirs)) > n * v * 4, "the measure itself"


def test_chunks_fit_the_budget_and_are_even() -> None:
    x = torch.empty(1000, 8, device="meta")
    assert chunk_rows(x, 100, 12 * 100 * 300) == 256  # aligned
    assert chunk_rows(x, 100, 12 * 100 * 999) == 512  # two even chunks, not 896 and 104
    assert chunk_rows(x, 100, 12 * 100 * 5) == 5
    assert chunk_rows(x, 100, 1) == 1  # a row must do
    assert chunk_rows(x.bfloat16(), 100, 10 * 100 * 5) == 5


def test_the_weights_error_does_not_grow_with_the_number_of_chunks() -> None:
    """In bf16 sums it does: 256 shares of one sign, each rounded."""
    head, target = make(256, 4, 8, torch.bfloat16, bias=False)
    head[0] = head[0].detach().abs()  # type: ignore[union-attr]
    target.fill_(0)
    one = (torch.ones(()),)
    right = run(functions(target, reduction="sum")[1], to_double(head), one)[1]

    def error(chunk_bytes: int) -> float:
        ours = functions(target, reduction="sum", chunk_bytes=chunk_bytes)[0]
        return ((run(ours, head, one)[1] - right).norm() / right.norm()).item()

    assert error(1) <= 1.1 * error(2**20)


def flops(fn: Callable[..., Tensor], head: list[Tensor | None], backward: bool = True) -> int:
    with FlopCounterMode(display=False) as count:
        loss = fn(*head)
        if backward:
            loss.sum().backward()
    return count.get_total_flops()


def test_flops_are_those_of_the_linear_layer(path: str) -> None:
    head, target = make()
    ours, theirs = functions(target)
    assert flops(ours, head) == flops(theirs, head) == 3 * 2 * 8 * 16 * 45
    rows, _ = functions(target, reduction="none")
    assert flops(rows, head) == 4 * 2 * 8 * 16 * 45, "the logits are computed once more"


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_costs_nothing(path: str, frozen: int, reduction: str) -> None:
    head, target = make()
    head[frozen] = head[frozen].detach()  # type: ignore[union-attr]
    ours, theirs = functions(target, reduction=reduction)
    grad = torch.randn(target.shape if reduction == "none" else ())
    torch.testing.assert_close(run(ours, head, (grad,)), run(theirs, head, (grad,)))
    recomputed = 2 * 8 * 16 * 45 * (reduction == "none")
    assert flops(ours, head) == flops(theirs, head) + recomputed


def test_no_gradient_is_made_under_no_grad(path: str) -> None:
    head, target = make()
    with torch.no_grad():
        assert flops(functions(target)[0], head, backward=False) == 2 * 8 * 16 * 45


def test_retained_graphs_repeat_and_inputs_are_left_alone(path: str) -> None:
    head, target = make()
    copies = [t.detach().clone() for t in head if t is not None]
    loss = functions(target)[0](*head)
    first = torch.autograd.grad(loss, head, 3 * torch.ones(()), retain_graph=True)
    again = torch.autograd.grad(loss, head, 3 * torch.ones(()))
    for t, copy, a, b in zip(head, copies, first, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(t, copy)  # type: ignore[arg-type]


def test_accumulation_over_micro_batches_is_the_whole(path: str) -> None:
    head, target = make()
    whole = run(functions(target)[1], head, (torch.ones(()),))[1:]
    kept = (target != -100).sum()
    for half in (slice(0, 4), slice(4, 8)):
        loss = functions(target[half], reduction="sum")[0](head[0][half], *head[1:])  # type: ignore[index]
        (loss / kept).backward()
    for t, right in zip(head, whole, strict=True):
        assert t is not None
        torch.testing.assert_close(t.grad, right)


def test_fp16_gradients_wait_for_the_loss_scale(path: str) -> None:
    """Divided by the number of rows before the loss scale multiplies them they would be lost."""
    (x, w, b), target = make(64, 4, 9, torch.float16)
    ours, theirs = functions(target, chunk_bytes=2**20)

    def scaled(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, w, b: fn(x, w, b) * 2.0**-14 * 2.0**14

    a, right = (run(scaled(fn), (x, w, b), (torch.ones(()),)) for fn in (ours, theirs))
    torch.testing.assert_close(a, right, rtol=2e-2, atol=2e-3)
    assert torch.equal(a[1], run(ours, (x, w, b), (torch.ones(()),))[1])


def test_the_losss_gradient_is_not_rounded_to_bf16(path: str) -> None:
    """It would be off by 0.4 %, all elements alike, which no tolerance for single elements shows."""
    head, target = make(64, 8, 45, torch.bfloat16)
    grad = (torch.tensor(1 + 2**-8),)
    ours, theirs = functions(target, reduction="sum")
    for a, right in zip(run(ours, head, grad), run(theirs, to_double(head), grad), strict=True):
        factor = (a.double() * right).sum() / right.square().sum()
        assert abs(factor - 1) < 2e-3


def test_a_tied_weight_gets_both_gradients(path: str) -> None:
    weight = torch.randn(45, 16, requires_grad=True)
    tokens, target = torch.randint(45, (8,)), torch.randint(45, (8,))

    def grad(loss: Callable[..., Any]) -> Tensor:
        return torch.autograd.grad(loss(F.embedding(tokens, weight), weight, target), weight)[0]

    right = grad(lambda x, w, t: F.cross_entropy(F.linear(x, w), t))
    torch.testing.assert_close(grad(kernels.linear_cross_entropy), right)


def test_autocast_is_that_of_the_linear_layer(path: str) -> None:
    head, target = make()
    ours, _ = functions(target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = run(ours, head, (torch.ones(()),))
    half = [t.detach().bfloat16().requires_grad_() for t in head if t is not None]
    right = run(ours, half, (torch.ones(()),))
    assert [t.dtype for t in mine] == [torch.float32] * 4
    assert all(torch.equal(a, b.float()) for a, b in zip(mine, right, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # backward inside of it, too
        loss = functions(target, reduction="none")[0](*head).sum()
        loss.backward()


def test_recomputed_activations(path: str) -> None:
    head, target = make()
    ours, _ = functions(target)
    again = run(lambda *h: checkpoint(ours, *h, use_reentrant=False), head, (torch.ones(()),))
    for a, b in zip(run(ours, head, (torch.ones(()),)), again, strict=True):
        assert torch.equal(a, b)


def test_hooks_see_and_change_the_gradients(path: str) -> None:
    (x, w, b), target = make()
    assert x is not None
    hidden = x * 1
    hidden.register_hook(lambda grad: 2 * grad)
    functions(target)[0](hidden, w, b).backward()
    once = run(functions(target)[0], (x, w, b), (torch.ones(()),))[1]
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * once)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_second_derivative_is_an_error(path: str, reduction: str) -> None:
    head, target = make()
    loss = functions(target, reduction=reduction)[0](*head).sum()
    with pytest.raises(RuntimeError, match="linear_cross_entropy cannot be differentiated twice.*F.linear"):
        torch.autograd.grad(loss, head[0], create_graph=True)[0].sum().backward()


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"return_lse": True, **FULL}], ids=str)
def test_compiled_in_one_graph_is_the_same(path: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    head, target = make(dtype=torch.bfloat16)
    grads = [torch.randn(8 if "reduction" in options else ()), *[torch.randn(8)] * ("return_lse" in options)]
    ours, _ = functions(target, **options)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for a, b in zip(run(ours, head, grads), run(compiled, head, grads), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rows", [False, True])
def test_opcheck(path: str, rows: bool) -> None:
    (x, w, b), target = make(4, 3, 9)
    options = (-100, 0.1, 0.1, 3.0, "", 12 * 9 * 2)
    if rows:
        arguments: tuple[Any, ...] = (x, w, target, None, torch.rand(9), *options)
        torch.library.opcheck(torch.ops.overlapkit.linear_cross_entropy_rows.default, arguments)
        return
    permuted = torch.randn(3, 4).t().requires_grad_()
    arguments = (permuted, w, target, b, None, *options, True, True, True)
    torch.library.opcheck(torch.ops.overlapkit.linear_cross_entropy.default, arguments)


def test_module_has_torchs_names(path: str) -> None:
    (x, _, _), target = make()
    loss = kernels.LinearCrossEntropyLoss(16, 45, bias=True, weight=torch.rand(45), z_loss=0.1)
    assert sorted(loss.state_dict()) == ["linear.bias", "linear.weight", "weight"]
    right = truth(F.linear(x, loss.linear.weight, loss.linear.bias), target, loss.weight, z_loss=0.1)
    torch.testing.assert_close(loss(x, target), right)
    assert "z_loss=0.1" in repr(loss)
    if hasattr(nn, "LinearCrossEntropyLoss"):  # torch 2.13
        theirs = nn.LinearCrossEntropyLoss(16, 45, bias=True, weight=loss.weight)
        theirs.load_state_dict(loss.state_dict())
        mine = kernels.LinearCrossEntropyLoss(16, 45, bias=True, weight=loss.weight)
        mine.load_state_dict(loss.state_dict())
        torch.testing.assert_close(mine(x, target), theirs(x, target))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.loss = kernels.LinearCrossEntropyLoss(16, 45, bias=True)

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return self.loss(self.body(x), target)


def two_steps(rank: int | None) -> list[Any]:
    """The loss and the gradients of two backward passes, with the head as an FSDP2 unit on each rank."""
    torch.manual_seed(0)
    model = Model()
    if rank is not None:
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model.loss, mesh=mesh)
        fully_shard(model, mesh=mesh)
    x, target = torch.randn(8, 6), torch.randint(45, (8,))
    for _ in range(2):
        loss = model(x, target)
        loss.backward()
    grads = [p.grad for p in model.parameters()]
    return [loss.detach(), *(g if rank is None else g.full_tensor() for g in grads)]  # type: ignore[union-attr]


def test_the_head_as_an_fsdp2_unit() -> None:
    right = two_steps(None)
    for found in run_ranks(2, two_steps):
        torch.testing.assert_close(found, right)


def test_a_sharded_weight_is_an_error_in_words() -> None:
    (x, w, _), target = make()
    with one_rank_group():
        sharded = distribute_tensor(w.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])  # type: ignore[union-attr]
        with pytest.raises(TypeError, match="linear_weight is a DTensor with .*Shard.* inside the forward"):
            kernels.linear_cross_entropy(x, sharded, target)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input": torch.ones(2, 4)}, ValueError, r"input has shape \(2, 4\): linear_weight \(5, 3\) needs"),
        ({"input": torch.ones(2, 3).long()}, ValueError, "input has dtype torch.int64"),
        ({"linear_weight": torch.ones(5, 1, 3)}, ValueError, r"linear_weight has shape \(5, 1, 3\)"),
        (
            {"linear_weight": torch.ones(5, 3).half()},
            ValueError,
            "linear_weight has dtype torch.float16, input",
        ),
        ({"linear_bias": torch.ones(4)}, ValueError, r"linear_bias has shape \(4,\)"),
        ({"weight": torch.ones(4)}, ValueError, r"weight has shape \(4,\): linear_weight needs \(5,\)"),
        ({"weight": torch.ones(5, requires_grad=True)}, ValueError, "weight requires a gradient"),
        ({"target": torch.ones(2, 5)}, ValueError, "target holds class probabilities"),
        ({"target": torch.zeros(3).long()}, ValueError, r"target has shape \(3,\): input of shape \(2, 3\)"),
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes=0: pass a positive number"),
        ({"vocab_group": 3}, TypeError, "vocab_group=3 is a int: pass a ProcessGroup"),
        ({"reduction": "avg"}, ValueError, "reduction='avg'"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {
        "input": torch.ones(2, 3),
        "linear_weight": torch.ones(5, 3),
        "target": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(error, match=message):
        kernels.linear_cross_entropy(**{**arguments, **change})
