from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from overlapkit import kernels
from tests.kernels.judge import judge, run, to_double
from tests.kernels.test_cross_entropy import make, truth

FULL: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "return_lse": True}


def through(layout: Callable[[Tensor], Tensor], target: Tensor, *args: Any, **options: Any) -> Any:
    """cross_entropy_ of a leaf's copy: of the leaf itself it would destroy the values."""
    return lambda x: kernels.cross_entropy_(layout(x.clone()), target, *args, **options)


def check(x: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any) -> None:
    lse = options.get("return_lse", False)
    grads = [torch.randn(target.shape if options.get("reduction") == "none" else ()), *[None] * lse]
    ours = through(lambda x: x, target, weight, **options)
    exact = [run(lambda x: truth(x, target, weight, **options), to_double((x,)), to_double(grads))]
    exact.append(run(lambda x: truth(x.float(), target, weight, **options), (x,), grads))
    for mine, true, torchs in zip(run(ours, (x,), grads), *exact, strict=True):
        judge(mine, torchs, true)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (127, 8), (3, 4097), (2, 33_000)], ids=str)
def test_values_and_gradients_are_as_good_as_torchs(
    path: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    check(*make(*shape, dtype=dtype))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("options", [FULL, {"z_loss": 1e-2}, {"ignore_index": 3}], ids=lambda o: ",".join(o))
def test_every_option_with_every_reduction(path: str, options: dict[str, Any], reduction: str) -> None:
    x, target = make(7, 45)
    if "ignore_index" in options:
        target[target == -100] = options["ignore_index"]
    check(x, target, torch.rand(45), reduction=reduction, **options)


def test_all_options_over_several_tiles(path: str) -> None:
    check(*make(3, 9000, torch.bfloat16), torch.rand(9000), **FULL)


def test_the_gradient_takes_the_logits_place(path: str) -> None:
    x, target = make(5, 37)
    logits = x * 1.0
    before = logits._version
    kernels.cross_entropy_(logits, target, reduction="sum").backward()
    assert logits._version > before
    assert x.grad is not None
    assert torch.equal(logits, x.grad)


def test_the_targets_entry_is_rounded_once(path: str) -> None:
    """Subtracting 1 from a probability that was rounded to bf16 would leave nothing of it."""
    x = torch.tensor([[8.0, 0.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    kernels.cross_entropy_(x * 1, torch.tensor([0])).backward()
    assert x.grad is not None
    right = x.detach().double().softmax(-1)[0, 0] - 1
    assert abs(x.grad[0, 0].double() / right - 1) < 2**-8


@pytest.mark.parametrize("requires_grad", [False, True])
def test_nothing_is_written_where_no_gradient_is_asked_for(path: str, requires_grad: bool) -> None:
    x, target = make(5, 37)
    logits = x.detach().clone().requires_grad_(requires_grad)
    with torch.no_grad():
        loss, lse = kernels.cross_entropy_(logits, target, return_lse=True)
    assert torch.equal(logits, x)
    assert logits._version == 0
    torch.testing.assert_close((loss, lse), truth(x.detach(), target, None, return_lse=True))


def test_autograd_notices_who_needed_the_logits(path: str) -> None:
    x, target = make(5, 37)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kernels.cross_entropy_(x.exp(), target).backward()  # exp keeps its output


def test_autograd_notices_a_gradient_that_was_changed(path: str) -> None:
    x, target = make(5, 37)
    logits = x * 1.0
    loss = kernels.cross_entropy_(logits, target)
    with torch.no_grad():
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_backward_is_an_error_in_words(path: str) -> None:
    x, target = make(5, 37)
    loss = kernels.cross_entropy_(x * 1.0, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward only.*use cross_entropy"):
        loss.backward()


def test_a_second_derivative_is_an_error(path: str) -> None:
    x, target = make(5, 37)
    loss = kernels.cross_entropy_(x * 1.0, target)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(loss, x, create_graph=True)


LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "view": ((2, 3, 9), lambda x: x.view(-1, 9), (6,)),
    "slice": ((6, 20), lambda x: x[:, 3:12], (6,)),
    "every other row": ((12, 9), lambda x: x[::2], (6,)),
    "a chunk": ((6, 18), lambda x: x.chunk(2, 1)[1], (6,)),
    "transposed": ((9, 6), lambda x: x.t(), (6,)),
    "one row": ((9,), lambda x: x, ()),
    "classes in the middle": ((2, 9, 3), lambda x: x, (2, 3)),
    "no rows": ((0, 9), lambda x: x, (0,)),
}


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_layout(path: str, layout: str, reduction: str) -> None:
    shape, view, rows = LAYOUTS[layout]
    target = torch.randint(9, rows)
    grad = torch.randn(rows if reduction == "none" else ())
    x = torch.randn(shape, requires_grad=True)
    ours = through(view, target, reduction=reduction)
    mine = run(ours, (x,), (grad,))
    theirs = run(lambda x: kernels.cross_entropy(view(x), target, reduction=reduction), (x,), (grad,))
    torch.testing.assert_close(mine, theirs)


def test_the_mean_over_nothing_is_zero(path: str) -> None:
    x = torch.randn(4, 9, requires_grad=True)
    loss = kernels.cross_entropy_(x * 1.0, torch.full((4,), -100), torch.rand(9), **FULL)[0]
    loss.backward()
    assert x.grad is not None
    assert loss.item() == 0.0
    assert torch.equal(x.grad, torch.zeros(4, 9))


def test_a_target_out_of_range(path: str) -> None:
    x, target = torch.randn(3, 9, requires_grad=True), torch.tensor([1, 9, 2])
    if path == "plain":
        with pytest.raises(IndexError, match="Target 9 is out of bounds"):
            kernels.cross_entropy_(x * 1.0, target)
        return
    loss = kernels.cross_entropy_(x * 1.0, target, reduction="none")
    loss.sum().backward()
    assert x.grad is not None
    assert loss.isnan().tolist() == [False, True, False]
    assert x.grad.isnan().all(dim=1).tolist() == [False, True, False]


@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch's own, about autograd.Function
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_compiled_in_one_graph_is_the_same(path: str, reduction: str) -> None:
    torch._dynamo.reset()
    x, target = make(7, 45, torch.bfloat16)
    grad = torch.randn(7 if reduction == "none" else ())
    ours = through(lambda x: x, target, reduction=reduction)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for a, b in zip(run(ours, (x,), (grad,)), run(compiled, (x,), (grad,)), strict=True):
        assert torch.equal(a, b)


def test_opcheck(path: str) -> None:
    x, target = make(4, 9)
    options = (-100, 0.1, 0.1, 3.0, "")
    sliced = torch.randn(4, 20)[:, 3:12]
    arguments = (sliced, target, torch.rand(9), torch.rand(()), *options)
    torch.library.opcheck(torch.ops.overlapkit.cross_entropy_.default, arguments)
    torch.library.opcheck(torch.ops.overlapkit.scale_rows_.default, (x.detach(), torch.rand(4)))


def test_recomputed_activations(path: str) -> None:
    x, target = make(7, 45)
    head = torch.randn(45, 45)

    def loss(x: Tensor) -> Any:
        return kernels.cross_entropy_(x @ head, target)

    grad = (torch.randn(()),)
    plain = run(loss, (x,), grad)
    again = run(lambda x: checkpoint(loss, x, use_reentrant=False), (x,), grad)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_autocast_on_the_cpu_rounds_nothing(path: str) -> None:
    """The logits' dot with the weights, which smoothing needs, is a product that autocast would round."""
    (x, target), weight = make(5, 37), torch.rand(37)
    right = truth(x.double(), target, weight.double(), label_smoothing=0.9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = kernels.cross_entropy_(x * 1.0, target, weight, label_smoothing=0.9)
    torch.testing.assert_close(loss.double(), right, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.ones(2, 4, requires_grad=True)}, ValueError, "logits is a leaf that requires grad"),
        (
            {"logits": torch.ones(1, 2, 4, requires_grad=True).view(-1, 4)},
            ValueError,
            "logits is a view of a leaf that requires grad",
        ),
        (
            {"logits": (torch.ones(1, 4, requires_grad=True) * 1).expand(2, 4)},
            ValueError,
            r"logits has strides \(0, 1\)",
        ),
        (
            {"logits": (torch.ones(5, requires_grad=True) * 1).unfold(0, 4, 1)},
            ValueError,
            r"logits has strides \(1, 1\)",
        ),
        ({"target": torch.ones(2, 4)}, ValueError, "target has dtype torch.float32: pass int64"),
        ({"softcap": -1.0}, ValueError, "softcap=-1.0"),
        ({"weight": torch.ones(4, requires_grad=True)}, ValueError, "weight requires a gradient"),
        ({"vocab_group": "tp"}, TypeError, "vocab_group='tp' is a str: pass a ProcessGroup"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {
        "logits": torch.ones(2, 4, requires_grad=True) * 1,
        "target": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(error, match=message):
        kernels.cross_entropy_(**{**arguments, **change})
