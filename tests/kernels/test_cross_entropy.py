import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlapkit import kernels
from tests.kernels.judge import judge, run, to_double

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(5, 37), (1, 1), (1, 3), (7, 255), (300, 8), (3, 4097), (2, 9000)]


def truth(logits: Tensor, target: Tensor, weight: Tensor | None, **options: Any) -> Any:
    """Every option written out from its definition, in the dtype that the logits have."""
    softcap, smoothing = options.get("softcap"), options.get("label_smoothing", 0.0)
    x = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = F.log_softmax(x, dim=-1)
    w = torch.ones_like(x[0]) if weight is None else weight.to(x.dtype)
    kept = target != options.get("ignore_index", -100)
    index = target.where(kept, 0)
    hard = -log_p.gather(1, index[:, None])[:, 0] * w[index]
    soft = -(log_p * w).sum(-1) / x.shape[-1]
    lse = torch.logsumexp(x, dim=-1)
    loss = (1 - smoothing) * hard + smoothing * soft + options.get("z_loss", 0.0) * lse**2
    loss = loss.where(kept, 0)
    reduction = options.get("reduction", "mean")
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / w[index].where(kept, 0).sum()
    return (loss, lse) if options.get("return_lse") else loss


def functions(target: Tensor, weight: Tensor | None, **options: Any) -> tuple[Callable[..., Any], ...]:
    """Ours; the truth; and torch's in the same dtype, whose loss is rounded no more than ours (fp32)."""

    def ours(x: Tensor) -> Any:
        return kernels.cross_entropy(x, target, weight, **options)

    return (
        ours,
        lambda x: truth(x, target, weight, **options),
        lambda x: truth(x.float(), target, weight, **options),
    )


def check(x: Tensor, target: Tensor, weight: Tensor | None = None, grads: Any = None, **options: Any) -> None:
    ours, exact, torchs = functions(target, weight, **options)
    outputs = exact(x.detach())
    shapes = [out.shape for out in (outputs if isinstance(outputs, tuple) else (outputs,))]
    grads = grads or [torch.randn(shape) for shape in shapes]
    true = run(exact, to_double((x,)), to_double(grads))
    for mine, other, right in zip(run(ours, (x,), grads), run(torchs, (x,), grads), true, strict=True):
        judge(mine, other, right)


def make(n: int, v: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    target = torch.randint(v, (n,))
    target[1::3] = -100
    return (3 * torch.randn(n, v)).to(dtype).requires_grad_(), target


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_as_good_as_torchs(
    path: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    check(*make(*shape, dtype=dtype))


OPTIONS: list[dict[str, Any]] = [
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"z_loss": 1e-2},
    {"softcap": 5.0},
    {"return_lse": True},
    {"ignore_index": 3},
    {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "return_lse": True},
]


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o))
def test_every_option_with_every_reduction(
    path: str, options: dict[str, Any], weighted: bool, reduction: str
) -> None:
    torch.manual_seed(1)
    x, target = make(7, 45)
    if "ignore_index" in options:
        target[target == -100] = options["ignore_index"]
    weight = torch.rand(45) if weighted else None
    check(x, target, weight, reduction=reduction, **options)


@pytest.mark.parametrize("path_dtype", [torch.bfloat16], ids=str)
def test_all_options_over_several_tiles_in_half_precision(path: str, path_dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x, target = make(3, 9000, path_dtype)
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 20.0, "return_lse": True}
    check(x, target, torch.rand(9000), **options)


def test_agrees_with_torchs_function(path: str) -> None:
    torch.manual_seed(3)
    x, target = make(7, 45)
    for reduction in ("none", "sum", "mean"):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.2}
        weight = torch.rand(45)
        mine, theirs = (
            kernels.cross_entropy(x, target, weight, **options),
            F.cross_entropy(x, target, weight, **options),
        )
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("shape", [(), (4,), (4, 2, 3)], ids=str)
def test_torchs_shapes(path: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(4)
    x = torch.randn(*shape[:1], 9, *shape[1:], requires_grad=True)
    target = torch.randint(9, shape)
    grad = torch.randn(shape)
    mine = run(lambda x: kernels.cross_entropy(x, target, reduction="none"), (x,), (grad,))
    theirs = run(lambda x: F.cross_entropy(x, target, reduction="none"), (x,), (grad,))
    torch.testing.assert_close(mine, theirs)
    loss, lse = kernels.cross_entropy(x, target, return_lse=True)
    torch.testing.assert_close(loss, F.cross_entropy(x, target))
    torch.testing.assert_close(lse, x.logsumexp(1 if shape else 0))


@pytest.mark.parametrize("n", [0, 4])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("extra", [{}, {"z_loss": 0.1, "label_smoothing": 0.1}], ids=["bare", "extras"])
def test_the_mean_over_nothing_is_zero(path: str, extra: dict[str, float], weighted: bool, n: int) -> None:
    x = torch.randn(n, 9, requires_grad=True)
    weight = torch.rand(9) if weighted else None
    loss = kernels.cross_entropy(x, torch.full((n,), -100), weight, **extra)
    loss.backward()
    assert loss.item() == 0.0
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros(n, 9))


def test_a_true_nan_is_not_hidden(path: str) -> None:
    x = torch.randn(4, 9)
    x[2, 3] = float("nan")
    assert kernels.cross_entropy(x, torch.zeros(4, dtype=torch.int64)).isnan()


def test_masked_logits(path: str) -> None:
    """-inf over whole tiles, and a row whose target alone is left."""
    x = torch.randn(2, 9000)
    x[0, :8999] = float("-inf")
    x[1, :5000] = float("-inf")
    x.requires_grad_()
    target = torch.tensor([8999, 8000])
    grad = torch.ones(2)
    mine = run(lambda x: kernels.cross_entropy(x, target, reduction="none"), (x,), (grad,))
    theirs = run(lambda x: F.cross_entropy(x, target, reduction="none"), (x,), (grad,))
    torch.testing.assert_close(mine, theirs)
    assert mine[0][0] == 0.0


def test_huge_logits_stay_finite(path: str) -> None:
    x = torch.tensor([[3e4, -3e4, 3e4]], requires_grad=True)
    check(x, torch.tensor([0]))


def test_ignored_rows_are_not_read(interpreted: None) -> None:
    x = torch.randn(3, 9)
    x[1] = float("nan")
    x.requires_grad_()
    kernels.cross_entropy(x, torch.tensor([1, -100, 2])).backward()
    assert x.grad is not None
    assert torch.equal(x.grad[1], torch.zeros(9))
    assert not x.grad.isnan().any()


def test_a_target_out_of_range_tells_of_itself(interpreted: None) -> None:
    x = torch.randn(4, 9, requires_grad=True)
    loss = kernels.cross_entropy(x, torch.tensor([1, 9, -1, 2]), torch.rand(9), reduction="none")
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, True, False]
    assert x.grad is not None
    assert x.grad.isnan().all(dim=1).tolist() == [False, True, True, False]
    assert kernels.cross_entropy(x, torch.tensor([1, 9, -1, 2])).isnan()


def test_a_target_out_of_range_raises_without_triton() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        kernels.cross_entropy(torch.randn(1, 9), torch.tensor([9]))


def test_any_strides(path: str) -> None:
    torch.manual_seed(5)
    target = torch.randint(9, (12,))[::2]
    weight = torch.rand(18)[::2]
    for x in (
        torch.randn(9, 6).t(),
        torch.randn(6, 20)[:, 3:12],
        torch.randn(12, 9)[::2],
        torch.randn(1, 9).expand(6, 9),
    ):
        for grad in (torch.randn(6), torch.randn(12)[::2], torch.randn(()).expand(6)):
            check(x.requires_grad_(), target, weight, [grad, grad], reduction="none", return_lse=True)


def test_bytes_are_class_indices_too(path: str) -> None:
    logits, target = torch.randn(6, 9), torch.tensor([0, 8, 3, 3, 1, 7], dtype=torch.uint8)
    torch.testing.assert_close(kernels.cross_entropy(logits, target), F.cross_entropy(logits, target))


def test_class_probabilities(path: str) -> None:
    x, soft, weight = torch.randn(4, 9, 2), torch.rand(4, 9, 2).softmax(1), torch.rand(9)
    for options in ({}, {"ignore_index": -1}, {"label_smoothing": 0.1, "weight": weight}):  # -1 is no class
        mine, theirs = kernels.cross_entropy(x, soft, **options), F.cross_entropy(x, soft, **options)
        torch.testing.assert_close(mine, theirs)
    lse = (3 * torch.tanh(x / 3)).logsumexp(1)
    for reduction in ("none", "sum", "mean"):
        right = F.cross_entropy(3 * torch.tanh(x / 3), soft, reduction="none") + 0.1 * lse**2
        right = right if reduction == "none" else getattr(right, reduction)()
        more = {"z_loss": 0.1, "softcap": 3.0, "return_lse": True}
        torch.testing.assert_close(kernels.cross_entropy(x, soft, reduction=reduction, **more), (right, lse))
    assert kernels.cross_entropy(x[:0], soft[:0]) == 0


def test_inputs_are_left_alone_and_gradients_repeat(interpreted: None) -> None:
    x, target = make(7, 45)
    copy = x.detach().clone()
    loss = kernels.cross_entropy(x, target)
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    again = torch.autograd.grad(loss, x)[0]
    assert torch.equal(first, again)
    assert torch.equal(x, copy)
    assert x._version == 0


def test_accumulation_over_halves_is_the_whole(path: str) -> None:
    x, target = make(8, 45)
    kernels.cross_entropy(x, target, reduction="sum").backward()
    whole, x.grad = x.grad, None
    for half in (slice(0, 4), slice(4, 8)):
        kernels.cross_entropy(x[half], target[half], reduction="sum").backward()
    assert x.grad is not None
    assert torch.equal(x.grad, whole)


def test_gradcheck_of_the_plain_form() -> None:
    target = torch.tensor([1, -100, 3])
    x = torch.randn(3, 5).double().requires_grad_()
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 2.0, "return_lse": True}
    assert torch.autograd.gradcheck(
        lambda x: kernels.cross_entropy(x, target, torch.rand(5).fill_(0.5), **options), x
    )


def test_a_second_derivative_is_an_error_not_a_wrong_number(interpreted: None) -> None:
    x, target = make(3, 5)
    (first,) = torch.autograd.grad(kernels.cross_entropy(x, target), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cross_entropy cannot be differentiated twice"):
        first.sum().backward()


@pytest.mark.parametrize("case", range(3))
def test_opcheck(interpreted: None, case: int) -> None:
    x, target = make(4, 9)
    permuted = torch.randn(9, 4).t().requires_grad_()
    arguments = [
        (x, target, None, -100, 0.0, 0.0, 0.0, ""),
        (permuted, target, torch.rand(9), -100, 0.1, 0.1, 3.0, ""),
        (torch.randn(0, 9, requires_grad=True), target[:0], None, -100, 0.0, 0.0, 0.0, ""),
    ]
    torch.library.opcheck(torch.ops.overlapkit.cross_entropy.default, arguments[case])


@pytest.mark.parametrize("options", [{}, OPTIONS[-1]], ids=["bare", "all"])
def test_compiled_in_one_graph_is_the_same(path: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    x, target = make(7, 45)
    grads = [torch.randn(()), torch.randn(7)][: 2 if options else 1]
    ours = functions(target, None, **options)[0]
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for a, b in zip(run(ours, (x,), grads), run(compiled, (x,), grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("default::DeprecationWarning")  # some of inductor's own
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_with_symbolic_sizes_and_by_inductor(path: str, backend: str) -> None:
    """All three functions in one graph, which holds for every number of rows."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    torch._dynamo.reset()
    target = torch.tensor([1, -100, 36, 0, 5, 7, 9, 30])

    def model(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        y, total = kernels.rms_norm(x, weight, 1e-5, residual=residual)
        loss = kernels.cross_entropy(
            kernels.swiglu(y, total), target[: len(x)], label_smoothing=0.1, z_loss=0.1
        )
        assert isinstance(loss, Tensor)
        return loss

    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for n in (5, 8):
        inputs = [torch.randn(s, requires_grad=True) for s in ((n, 37), (37,), (n, 37))]
        grads = (torch.ones(()),)
        torch.testing.assert_close(
            run(compiled, inputs, grads), run(model, inputs, grads), rtol=1e-5, atol=1e-6
        )


def test_module_is_a_drop_in(path: str) -> None:
    x, target = make(7, 45)
    weight = torch.rand(45)
    theirs = nn.CrossEntropyLoss(weight, label_smoothing=0.1)
    mine = kernels.CrossEntropyLoss(weight, label_smoothing=0.1)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    torch.testing.assert_close(mine(x, target), theirs(x, target))
    loss, lse = kernels.CrossEntropyLoss(z_loss=0.1, softcap=3.0, return_lse=True)(x, target)
    torch.testing.assert_close((loss, lse), truth(x, target, None, z_loss=0.1, softcap=3.0, return_lse=True))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"target": torch.zeros(3, dtype=torch.int64)},
            ValueError,
            r"target has shape \(3,\): .* need \(2,\)",
        ),
        ({"target": torch.zeros(2, dtype=torch.int32)}, ValueError, "target has dtype torch.int32"),
        ({"target": [0, 1]}, TypeError, "target is a list"),
        ({"target": torch.zeros(2, dtype=torch.int64, device="meta")}, ValueError, "target is on meta"),
        ({"logits": torch.ones(2, 4, dtype=torch.int64)}, ValueError, "logits has dtype torch.int64"),
        ({"logits": torch.ones(2, 0)}, ValueError, "at least one class"),
        ({"weight": torch.ones(2)}, ValueError, r"weight has shape \(2,\): logits needs \(4,\)"),
        ({"weight": torch.ones(4, requires_grad=True)}, ValueError, "weight requires a gradient"),
        ({"reduction": "avg"}, ValueError, "reduction='avg': allowed are 'mean', 'sum' and 'none'"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing=1.5: allowed is 0 to 1"),
        ({"label_smoothing": "a"}, TypeError, "label_smoothing='a' is a str: pass a float"),
        ({"ignore_index": 1.0}, TypeError, "ignore_index=1.0 is a float: pass an int"),
        ({"z_loss": -0.1}, ValueError, "z_loss=-0.1"),
        ({"z_loss": "a"}, TypeError, "z_loss='a' is a str: pass a float"),
        ({"softcap": "a"}, TypeError, "softcap='a' is a str"),
        (
            {"target": torch.ones(2, 4), "ignore_index": 0},
            ValueError,
            "ignore_index=0: target holds class prob",
        ),
        ({"softcap": 0.0}, ValueError, "softcap=0.0 leaves no logits"),
    ],
)
def test_bad_input(path: str, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kernels.cross_entropy(
            **{"logits": torch.ones(2, 4), "target": torch.zeros(2, dtype=torch.int64), **arguments}
        )
