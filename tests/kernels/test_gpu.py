"""The compiled kernels, on a GPU: values, devices, streams, sizes, and nothing that waits."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overlapkit import kernels
from tests.kernels.judge import compare, run
from tests.on_gpu import assert_flat, no_waits, spin

pytestmark = pytest.mark.gpu

SIZES = [(5, 37), (1, 3), (127, 255), (4097, 1024), (33, 8192), (65, 16_384), (3, 50_257)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cuda") -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def case(name: str, n: int, d: int, dtype: torch.dtype, device: str = "cuda") -> tuple[Any, ...]:
    """Ours, torch's, inputs and output gradients."""
    x, other, weight = (make(*s, dtype=dtype, device=device) for s in ((n, d), (n, d), (d,)))
    if name == "swiglu":
        return kernels.swiglu, lambda g, u: F.silu(g) * u, (x, other), (torch.randn_like(x),)
    if name == "geglu":
        return kernels.geglu, lambda g, u: F.gelu(g) * u, (x, other), (torch.randn_like(x),)
    if name == "geglu_packed":
        h = make(n, 2 * d, dtype=dtype, device=device)
        return (
            lambda h: kernels.geglu_packed(h, "up_gate", approximate="tanh"),
            lambda h: F.gelu(h[:, d:], approximate="tanh") * h[:, :d],
            (h,),
            (torch.randn_like(x),),
        )
    if name == "rope":
        return rope_case(n, dtype, device)
    if name == "cross_entropy":
        target = torch.randint(d, (n,), device=device)
        target[1::3] = -100
        grad = (torch.randn(n, device=device),)
        return (
            lambda x: kernels.cross_entropy(x, target, reduction="none"),
            lambda x: F.cross_entropy(x if x.dtype == torch.float64 else x.float(), target, reduction="none"),
            (x,),
            grad,
        )
    if name == "cross_entropy_":
        target = torch.randint(d, (n,), device=device)
        return (
            lambda x: kernels.cross_entropy_(x * 1, target),
            lambda x: (
                F.cross_entropy(x if x.dtype == torch.float64 else x.float(), target, reduction="sum")
                / max(n, 1)
            ),
            (x,),
            (torch.randn((), device=device),),
        )
    if name == "linear_cross_entropy":
        target = torch.randint(d, (n,), device=device)
        hidden, head = make(n, 64, dtype=dtype, device=device), make(d, 64, dtype=dtype, device=device)

        def linear(x: Tensor, w: Tensor) -> Tensor:
            logits = F.linear(x, w)
            return F.cross_entropy(
                logits if x.dtype == torch.float64 else logits.float(), target, reduction="sum"
            )

        def chunked(x: Tensor, w: Tensor) -> Any:
            return kernels.linear_cross_entropy(x, w, target, reduction="sum", chunk_bytes=2**20)

        return chunked, linear, (hidden, head), (torch.ones((), device=device),)
    if name == "layer_norm":
        return (
            lambda x, w, b, other: kernels.layer_norm(x, w, b, residual=other),
            lambda x, w, b, other: (F.layer_norm(x + other, (d,), w, b), x + other),
            (x, weight, make(d, dtype=dtype, device=device), other),
            (torch.randn_like(x), torch.randn_like(x)),
        )

    if name == "softmax":
        mask = torch.rand(d, device=device) < 0.9
        mask[0] = True
        return (
            lambda x: kernels.softmax(x, scale=0.5, mask=mask),
            lambda x: F.softmax((x * 0.5).masked_fill(~mask, float("-inf")), -1),
            (x,),
            (torch.randn_like(x),),
        )
    if name == "dropout_add":
        kept = kernels.dropout_add(torch.ones(n, d), torch.zeros(n, d), 0.3, 5).to(device) != 0  # on the CPU
        return (
            lambda x, other: kernels.dropout_add(x, other, 0.3, 5),
            lambda x, other: other + torch.where(kept, x / 0.7, 0.0),
            (x, other),
            (torch.randn_like(x),),
        )

    def norm(x: Tensor, weight: Tensor, other: Tensor) -> Any:
        return F.rms_norm(x + other, (d,), weight, 1e-5), x + other

    def ours(x: Tensor, weight: Tensor, other: Tensor) -> Any:
        return kernels.rms_norm(x, weight, 1e-5, residual=other)

    return ours, norm, (x, weight, other), (torch.randn_like(x), torch.randn_like(x))


def rope_case(n: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """Packed documents, half of each head turned, neighbours as pairs."""
    q, k = make(2, n, 8, 96, dtype=dtype, device=device), make(2, n, 2, 96, dtype=dtype, device=device)
    positions = torch.arange(2 * n, device=device).view(2, n) % 50
    angle = torch.outer(torch.arange(50, device=device), 0.5 ** torch.arange(24, device=device))

    def torchs(*heads: Tensor) -> tuple[Tensor, ...]:
        wide = torch.promote_types(heads[0].dtype, torch.float32)
        turn = torch.polar(torch.ones_like(angle, dtype=wide), angle.to(wide))[positions][:, :, None]
        pairs = [torch.view_as_complex(x[..., :48].to(wide).unflatten(-1, (24, 2))) * turn for x in heads]
        turned = [torch.view_as_real(z).flatten(-2) for z in pairs]
        return tuple(torch.cat((t.to(x.dtype), x[..., 48:]), -1) for t, x in zip(turned, heads, strict=True))

    def ours(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.rope(q, k, angle.cos(), angle.sin(), positions, interleaved=True, rotary_dim=48)

    return ours, torchs, (q, k), (torch.randn_like(q), torch.randn_like(k))


NAMES = [
    "cross_entropy",
    "cross_entropy_",
    "dropout_add",
    "geglu",
    "geglu_packed",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
    "rope",
    "softmax",
    "swiglu",
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "d"), SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_as_good_as_torchs(name: str, n: int, d: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    compare(*case(name, n, d, dtype))


@pytest.mark.parametrize("name", NAMES)
def test_zero_rows(name: str) -> None:
    ours, _, inputs, grads = case(name, 0, 37, torch.bfloat16)
    for tensor in run(ours, inputs, grads):
        assert not tensor.isnan().any()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", NAMES)
def test_a_device_that_is_not_current(name: str) -> None:
    assert torch.cuda.current_device() == 0
    compare(*case(name, 65, 1000, torch.float32, device="cuda:1"))
    assert torch.cuda.current_device() == 0


def without_waiting(fn: Callable[[], Any]) -> Any:
    fn()  # compiles
    torch.cuda.synchronize()
    with no_waits():
        return fn()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits_for_the_device(name: str) -> None:
    ours, _, inputs, grads = case(name, 65, 1000, torch.bfloat16)
    without_waiting(lambda: run(ours, inputs, grads))


def test_cross_entropys_options_and_mean_do_not_wait() -> None:
    x, target, weight = (
        make(65, 1000),
        torch.randint(1000, (65,), device="cuda"),
        torch.rand(1000, device="cuda"),
    )
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0, "return_lse": True}

    def step() -> None:
        loss, lse = kernels.cross_entropy(x, target, weight, **options)
        (loss + lse.mean()).backward()

    without_waiting(step)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_cross_entropy_keeps_to_its_budget(reduction: str) -> None:
    x, w = make(4096, 256, dtype=torch.bfloat16), make(50_257, 256, dtype=torch.bfloat16)
    target, budget = torch.randint(50_257, (4096,), device="cuda"), 2**25

    def step() -> None:
        loss = kernels.linear_cross_entropy(x, w, target, reduction=reduction, chunk_bytes=budget)
        torch.autograd.grad(loss.sum(), (x, w))

    without_waiting(step)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    gradients = 2 * 2 * x.numel() + (4 + 2) * w.numel()
    assert torch.cuda.max_memory_allocated() - before < budget + gradients + 2**22


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_on_the_current_stream_and_nowhere_else(name: str) -> None:
    """Inputs hold NaN until a kernel that comes late; results hold it again once they were copied."""
    ours, _, inputs, grads = case(name, 65, 1000, torch.float32)
    expected = [result.clone() for result in run(ours, inputs, grads)]  # one may be of `grads` itself
    good = [x.detach().clone() for x in inputs]
    side = torch.cuda.Stream()
    with torch.no_grad():
        for x in inputs:
            x.fill_(float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        spin()
        with torch.no_grad():
            for x, value in zip(inputs, good, strict=True):
                x.copy_(value)
        results = run(ours, inputs, grads)
        found = [result.clone() for result in results]
        for result in results:
            result.fill_(float("nan"))
    torch.cuda.current_stream().wait_stream(side)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_memory_is_flat() -> None:
    cases = [case(name, 65, 1000, torch.bfloat16) for name in NAMES]

    def step() -> None:
        for ours, _, inputs, grads in cases:
            run(ours, inputs, grads)

    assert_flat(step)


@pytest.mark.parametrize("name", NAMES)
def test_captured_in_a_cuda_graph(name: str) -> None:
    ours, _, inputs, grads = case(name, 65, 1000, torch.float32)
    eager = run(ours, inputs, grads)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(ours, inputs, grads)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(ours, inputs, grads)
    graph.replay()
    for a, b in zip(eager, captured, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_in_one_graph_is_bitwise_the_same(name: str) -> None:
    torch._dynamo.reset()
    ours, _, inputs, grads = case(name, 65, 1000, torch.bfloat16)
    compiled = torch.compile(ours, fullgraph=True)
    for a, b in zip(run(ours, inputs, grads), run(compiled, inputs, grads), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_agree_bitwise(name: str) -> None:
    ours, _, inputs, grads = case(name, 4097, 1024, torch.bfloat16)
    for a, b in zip(run(ours, inputs, grads), run(ours, inputs, grads), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("seed", [None, "tensor"])
def test_a_captured_graph_drops_other_elements_at_each_replay(seed: str | None) -> None:
    x, key = torch.ones(65, 1000, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    kernels.dropout_add(x, x, 0.5, key)
    with torch.cuda.graph(graph):
        y = kernels.dropout_add(x, x, 0.5, key if seed else None)
        key.add_(1)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y)
    if seed:
        assert torch.equal(y, kernels.dropout_add(x, x, 0.5, 1))


@pytest.mark.parametrize("fn", [kernels.layer_norm, kernels.rms_norm, kernels.softmax])
def test_autocast_is_torchs_own(fn: Callable[..., Tensor]) -> None:
    x = make(5, 37, dtype=torch.bfloat16)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = fn(x)
        assert y.dtype == F.layer_norm(x, (37,)).dtype == torch.float32
    assert torch.autograd.grad(y.sum(), x)[0].dtype == torch.bfloat16


def test_more_than_2_to_31_elements() -> None:
    n, d = 2**31 // 8192 + 1, 8192
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of free device memory")
    x = torch.zeros(n, d, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(d).to(x)
    last = x[-1:].clone()
    assert torch.equal(kernels.rms_norm(x)[-1:], kernels.rms_norm(last))
    assert torch.equal(kernels.layer_norm(x)[-1:], kernels.layer_norm(last))
    assert torch.equal(kernels.softmax(x)[-1:], kernels.softmax(last))
    assert torch.equal(kernels.swiglu(x, x)[-1:], kernels.swiglu(last, last))
    heads, end = x.view(1, n, 64, 128), last.view(1, 1, 64, 128)
    angle, third = torch.rand(4, 64, device="cuda"), torch.full((n,), 3, device="cuda")
    for interleaved in (False, True):
        tables = {"cos": angle.cos(), "sin": angle.sin(), "interleaved": interleaved}
        turned, k = kernels.rope(heads, heads[:, :, :1], positions=third, **tables)
        expected = kernels.rope(end, end[:, :, :1], positions=third[:1], **tables)
        assert torch.equal(turned[:, -1:], expected[0])
        assert torch.equal(k[:, -1:], expected[1])
    packed = kernels.geglu_packed(x, "gate_up")
    assert torch.equal(packed[-1:], kernels.geglu_packed(last, "gate_up"))
    x.requires_grad_()
    last.requires_grad_()
    target = torch.zeros(n, dtype=torch.int64, device="cuda")
    kernels.cross_entropy(x, target, reduction="sum").backward()
    kernels.cross_entropy(last, target[-1:], reduction="sum").backward()
    assert x.grad is not None
    assert last.grad is not None
    assert torch.equal(x.grad[-1:], last.grad)


def test_autotune_measures_here_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(import_module("overlapkit.kernels.autotune"), "_cache", None)
    x = make(4096, 4096, dtype=torch.bfloat16)
    before = kernels.rms_norm(x)
    found = kernels.autotune(lambda: kernels.rms_norm(x).sum().backward(), directory=tmp_path)
    assert [one.name.split()[0] for one in found] == ["norm_forward.forward", "norm_backward.backward"]
    for one in found:
        assert one.by_rule is not None
        assert one.seconds is not None
        assert 0 < one.seconds <= one.by_rule < 0.1
    again = kernels.autotune(lambda: kernels.rms_norm(x), directory=tmp_path)
    assert [(one.choice, one.seconds) for one in again] == [(found[0].choice, None)]
    torch.testing.assert_close(kernels.rms_norm(x), before)
