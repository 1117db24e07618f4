"""Logits and heads sharded over a process group along the classes: on every rank the whole's numbers."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from overlapkit import kernels
from tests.interpreter import interpreter
from tests.kernels.judge import run, to_double
from tests.kernels.test_cross_entropy import truth
from tests.ranks import one_rank_group, run_ranks

N, D, V = 6, 4, 12
FULL: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0}
OPTIONS: list[dict[str, Any]] = [
    {"reduction": "mean"},
    {"reduction": "none"},
    {"reduction": "sum", "ignore_index": 2, "z_loss": 1e-2},
    {"reduction": "mean", **FULL},
    {"reduction": "none", "return_lse": True, **FULL},
    {"reduction": "sum", "label_smoothing": 0.1},
]
DTYPES = [torch.float32, torch.bfloat16]


def make(dtype: torch.dtype, ignored: int = -100) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """input, head, logits, target: the same on every rank."""
    torch.manual_seed(0)
    x, w, logits = torch.randn(N, D), torch.randn(V, D), 3 * torch.randn(N, V)
    target = torch.tensor([7, 0, 11, ignored, 5, 6])
    return *(t.to(dtype).requires_grad_() for t in (x, w, logits)), target


def gradients(options: dict[str, Any], name: str) -> list[Tensor | None]:
    """Those of loss and lse; in place the lse has none."""
    torch.manual_seed(1)
    grad = torch.randn(N if options["reduction"] == "none" else ())
    return [grad, *[None if name == "logits_" else torch.randn(N)] * ("return_lse" in options)]


def weights(options: dict[str, Any]) -> Tensor | None:
    return torch.linspace(0.1, 1, V) if "label_smoothing" in options else None


def forms(options: dict[str, Any], shard: Callable[[Tensor], Tensor], target: Tensor, **given: Any) -> Any:
    """Each function of the whole tensors, which shards its arguments itself, and those arguments."""
    weight = weights(options)

    def from_logits(logits: Tensor) -> Any:
        return kernels.cross_entropy(shard(logits), target, weight, **options, **given)

    def in_place(logits: Tensor) -> Any:
        return kernels.cross_entropy_(shard(logits) * 1, target, weight, **options, **given)

    def head(x: Tensor, w: Tensor) -> Any:
        step = {"chunk_bytes": 2 * 12 * V}
        return kernels.linear_cross_entropy(
            x, shard(w.t()).t(), target, weight=weight, **step, **options, **given
        )

    return {"logits": from_logits, "logits_": in_place, "head": head}


def on_a_rank(rank: int, interpreted: bool) -> list[list[Tensor]]:
    def shard(t: Tensor) -> Tensor:
        return t.chunk(dist.get_world_size(), dim=-1)[rank]

    found = []
    with interpreter() if interpreted else contextlib.nullcontext():
        for dtype in DTYPES:
            for options in OPTIONS:
                x, w, logits, target = make(dtype, options.get("ignore_index", -100))
                for name, fn in forms(options, shard, target, vocab_group=dist.group.WORLD).items():
                    inputs = (x, w) if name == "head" else (logits,)
                    found.append(run(fn, inputs, gradients(options, name)))
    return found


@pytest.mark.parametrize("interpreted", [False, True], ids=["plain", "interpreted"])
def test_two_ranks_have_what_one_would_have(interpreted: bool) -> None:
    first, second = (iter(found) for found in run_ranks(2, on_a_rank, interpreted))
    for dtype in DTYPES:
        for options in OPTIONS:
            x, w, logits, target = make(dtype, options.get("ignore_index", -100))
            for name in ("logits", "logits_", "head"):
                inputs = (x, w) if name == "head" else (logits,)
                grads = gradients(options, name)

                def whole(*inputs: Tensor, options: Any = options, target: Tensor = target) -> Any:
                    x = inputs[0] if len(inputs) == 1 else F.linear(*inputs)
                    return truth(x, target, weights(options), **options)

                right = run(whole, to_double(inputs), to_double(grads))
                a, b = next(first), next(second)
                same = len(grads) + (name == "head")  # outputs, and the gradient of input
                assert all(torch.equal(p, q) for p, q in zip(a[:same], b[:same], strict=True))
                mine = [*a[:same], a[-1] + b[-1]]  # each rank has zeros outside of its classes
                for ours, true in zip(mine, right, strict=True):
                    eps = torch.finfo(dtype if name == "head" else ours.dtype).eps
                    size = true.square().mean().sqrt().item()
                    torch.testing.assert_close(ours.double(), true, rtol=8 * eps, atol=8 * eps * size)


def edges(rank: int) -> tuple[Any, ...]:
    """A row that one rank has nothing of, a target out of range by kernel and by torch, and collectives."""
    whole = torch.randn(2, 6)
    whole[0, :3] = -torch.inf
    x, group = whole.chunk(2, 1)[rank].requires_grad_(), dist.group.WORLD
    loss = kernels.cross_entropy(x, torch.tensor([4, 1]), reduction="none", vocab_group=group)
    loss.sum().backward()
    bad = {"target": torch.tensor([5, 6]), "reduction": "none", "vocab_group": group}
    with interpreter():
        nan = kernels.cross_entropy(x, **bad).isnan().tolist()
    with pytest.raises(IndexError, match="Target 6 is out of bounds"):
        kernels.cross_entropy(x, **bad)
    return whole, loss.detach(), x.grad, nan, collectives(rank)


def collectives(rank: int) -> list[tuple[int, int]]:
    calls: list[str] = []

    def counted(name: str) -> None:
        former = getattr(dist, name)
        setattr(dist, name, lambda *args, **options: (calls.append(name), former(*args, **options)))

    counted("all_gather")
    counted("all_reduce")
    counts = []
    x, w, logits, target = make(torch.float32)
    given = {"vocab_group": dist.group.WORLD}
    for name, fn in forms({"reduction": "mean"}, lambda t: t.chunk(2, -1)[rank], target, **given).items():
        calls.clear()
        run(fn, (x, w) if name == "head" else (logits,), [torch.ones(())])
        counts.append((calls.count("all_gather"), calls.count("all_reduce")))
    return counts


def test_padding_bad_targets_and_the_number_of_collectives() -> None:
    found = run_ranks(2, edges)
    whole = found[0][0].requires_grad_()
    right = F.cross_entropy(whole, torch.tensor([4, 1]), reduction="none")
    right[0].backward()  # the other row's target has -inf on no rank
    right = right.detach()
    for rank, (_, loss, grad, nan, counts) in enumerate(found):
        torch.testing.assert_close(loss, right)
        assert whole.grad is not None
        torch.testing.assert_close(grad[0], whole.grad[0].chunk(2)[rank])
        assert nan == [False, True]
        chunks = 2  # of four rows
        assert counts == [(1, 0), (1, 0), (chunks, 1)]


def unequal(rank: int) -> None:
    """Shards as Tensor.chunk and DTensor make them of five classes for two ranks."""
    logits = torch.zeros(2, 5).chunk(2, 1)[rank]
    message = r"the ranks of vocab_group have \[3, 2\] classes: all need as many"
    with pytest.raises(ValueError, match=message):
        kernels.cross_entropy(logits, torch.tensor([0, 3]), vocab_group=dist.group.WORLD)


def test_shards_of_unequal_sizes_are_an_error_on_every_rank() -> None:
    run_ranks(2, unequal)


@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch's own, about autograd.Function
@pytest.mark.parametrize("form", ["logits", "logits_", "head"])
def test_compiled_in_one_graph_is_the_same(path: str, form: str) -> None:
    torch._dynamo.reset()
    x, w, logits, target = make(torch.float32)
    with one_rank_group():
        fn = forms({"reduction": "mean", **FULL}, lambda t: t, target, vocab_group=dist.group.WORLD)[form]
        inputs = (x, w) if form == "head" else (logits,)
        compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
        eager = run(fn, inputs, [torch.ones(())])
        for a, b in zip(run(compiled, inputs, [torch.ones(())]), eager, strict=True):
            assert torch.equal(a, b)


def test_class_probabilities_and_odd_classes_are_errors() -> None:
    target = torch.zeros(2).long()
    with one_rank_group():
        with pytest.raises(ValueError, match="vocab_group=.*target holds class probabilities"):
            kernels.cross_entropy(torch.ones(2, 4), torch.ones(2, 4), vocab_group=dist.group.WORLD)
        with pytest.raises(ValueError, match=r"weight has shape \(3,\): logits needs \(4,\)"):
            kernels.cross_entropy(torch.ones(2, 4), target, torch.ones(3), vocab_group=dist.group.WORLD)
