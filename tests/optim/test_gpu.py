"""The compiled optimizer, on a GPU: torch's results, no waits, CUDA graphs, sizes."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import overlapkit as ok
from overlapkit.optim import clip_grad_norm_, optimizer_in_backward
from tests.on_gpu import assert_flat, no_waits, spin

pytestmark = pytest.mark.gpu

FORMS: list[tuple[dict[str, Any], torch.dtype]] = [
    ({}, torch.float32),
    ({"amsgrad": True, "moments": "bf16"}, torch.float32),
    ({"moments": "int8"}, torch.float32),
    ({}, torch.bfloat16),
    ({"precision": "bf16_kahan", "moments": "bf16"}, torch.bfloat16),
    ({"precision": "bf16_sr", "moments": "int8"}, torch.bfloat16),
]


def parameters(dtype: torch.dtype = torch.float32, device: str = "cuda") -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(1000, 300), (4097,), (), (0, 3), (33, 65), (64, 256)]
    made = [torch.randn(shape).to(dtype) for shape in shapes]
    made.append(torch.randn(2051).to(dtype))  # of which all but three, at an address that 16 does not divide
    memory = torch.zeros(2051, dtype=dtype, device=device)
    memory.copy_(made[-1])
    return [*(nn.Parameter(x.to(device)) for x in made[:-1]), nn.Parameter(memory[3:])]


def give(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_torchs_results_without_a_wait(max_norm: float | None) -> None:
    ours, theirs = parameters(), parameters()
    a = ok.AdamW(ours, lr=torch.tensor(1e-2, device="cuda"), max_norm=max_norm)
    b = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for step in range(5):
        give(ours, step)
        give(theirs, step)
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        b.step()
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step compiles
        try:
            a.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if max_norm is not None:
            torch.testing.assert_close(a.grad_norm, norm, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("options", "dtype"), FORMS, ids=str)
def test_every_form_is_that_of_the_cpu_and_repeats_bitwise(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    first, second, there = parameters(dtype), parameters(dtype), parameters(dtype, "cpu")
    for params in (first, second, there):
        optimizer = ok.AdamW(params, lr=1e-2, **options)
        for step in range(4):
            give(params, step)
            optimizer.step()
    for p, q, cpu in zip(first, second, there, strict=True):
        assert torch.equal(p, q)
        differ = (p.cpu().float() - cpu.float()).abs() > 1e-5 + 1e-5 * cpu.float().abs()
        assert differ.float().mean().nan_to_num() <= 0.02  # an ulp before it is rounded at random


@pytest.mark.parametrize(("options", "dtype"), FORMS[:4], ids=str)
def test_captured_in_a_cuda_graph(options: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    lr = torch.tensor(1e-2, device="cuda")
    a = ok.AdamW(ours, lr=lr, max_norm=1.0, capturable=True, **options)
    b = ok.AdamW(theirs, lr=lr, max_norm=1.0, **options)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        give(ours, 0)
        a.step()
    torch.cuda.current_stream().wait_stream(side)
    give(theirs, 0)
    b.step()
    graph = torch.cuda.CUDAGraph()
    static = [param.grad.clone() for param in ours]
    for param, grad in zip(ours, static, strict=True):
        param.grad = grad
    with torch.cuda.graph(graph):
        a.step()
    for step in range(1, 4):
        give(theirs, step)
        for grad, param in zip(static, theirs, strict=True):
            grad.copy_(param.grad)
        lr.fill_(1e-2 / step)
        graph.replay()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
    give(ours, 9)  # eager steps go on beside the graph, at other addresses
    a.step()
    assert a.state[ours[0]]["step"].item() == 5


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize(("options", "dtype"), FORMS, ids=str)
def test_no_form_waits_for_the_device(
    options: dict[str, Any], dtype: torch.dtype, max_norm: float | None
) -> None:
    params = parameters(dtype)
    optimizer = ok.AdamW(params, max_norm=max_norm, **options)
    give(params, 0)
    optimizer.step()  # compiles
    for step in range(1, 4):
        give(params, step)  # new gradients, at other addresses
        with no_waits():
            spin()
            optimizer.step()
            optimizer.zero_grad()
    assert all(param.isfinite().all() for param in params)


def test_a_step_reads_gradients_and_writes_parameters_in_the_order_of_its_stream() -> None:
    """Gradients hold NaN until a kernel that comes late, and again right after the step."""
    ours, theirs = parameters(), parameters()
    a, b = ok.AdamW(ours, max_norm=0.5), ok.AdamW(theirs, max_norm=0.5)
    for params in (ours, theirs):
        give(params, 0)
    a.step()
    b.step()
    side = torch.cuda.Stream()
    for step in range(1, 4):
        give(theirs, step)
        fresh = [param.grad.clone() for param in theirs]
        b.step()
        for param in ours:
            param.grad.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            spin()
            for param, grad in zip(ours, fresh, strict=True):
                param.grad.copy_(grad)
            a.step()
            for param in ours:
                param.grad.fill_(float("nan"))
        torch.cuda.current_stream().wait_stream(side)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("options", "dtype"), FORMS, ids=str)
def test_memory_is_flat(options: dict[str, Any], dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = ok.AdamW(params, max_norm=0.5, **options)

    def step() -> None:
        for param in params:
            param.grad = torch.full_like(param, 1e-3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    assert_flat(step)


def test_steps_within_backward_are_those_after_it_and_wait_for_nothing() -> None:
    models = [nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(8, 64, device="cuda")
    within = optimizer_in_backward(models[0], lr=1e-2)
    after = ok.AdamW(models[1].parameters(), lr=1e-2)
    for step in range(4):
        with no_waits() if step else nullcontext():  # the first one compiles
            spin()
            models[0](x).square().mean().backward()
            within.step()
        assert all(param.grad is None for param in models[0].parameters())
        models[1](x).square().mean().backward()
        after.step()
        after.zero_grad()
    torch.testing.assert_close(list(models[0].parameters()), list(models[1].parameters()), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # refused before anything is captured
def test_a_capture_without_capturable_is_refused() -> None:
    params = parameters()
    optimizer = ok.AdamW(params)
    give(params, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="capturable=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_clip_grad_norm_is_torchs(kind: float) -> None:
    ours, theirs = parameters(), parameters()
    give(ours, 0)
    give(theirs, 0)
    a = clip_grad_norm_(ours, 0.3, kind)
    b = torch.nn.utils.clip_grad_norm_(theirs, 0.3, kind)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close([p.grad for p in ours], [q.grad for q in theirs])


def test_grad_scaler_unscales_and_skips_in_the_kernel() -> None:
    ours, theirs = parameters(), parameters()
    a, b = ok.AdamW(ours, max_norm=0.5), ok.AdamW(theirs, max_norm=0.5)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step in range(3):
        give(ours, step)
        give(theirs, step)
        scaler.scale(torch.zeros((), device="cuda"))
        for param in ours:
            param.grad.mul_(1024.0)
        scaler.step(a)
        scaler.update()
        b.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    before = [param.clone() for param in ours]
    ours[0].grad[0, 0] = float("inf")
    scaler.step(a)
    assert all(torch.equal(p, q) for p, q in zip(ours, before, strict=True))
    assert a.state[ours[0]]["step"].item() == 3


def test_more_than_2_to_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of free device memory")
    n = 2**31 + 1024
    param = nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device="cuda"))
    optimizer = ok.AdamW([param], precision="bf16_sr", moments="bf16")
    param.grad = torch.ones_like(param)
    optimizer.step()
    last = nn.Parameter(torch.zeros(1024, dtype=torch.bfloat16, device="cuda"))
    other = ok.AdamW([last])
    last.grad = torch.ones_like(last)
    other.step()
    assert (param[-1024:].float() - last.float()).abs().max() <= 2**-8 * 1e-3
    assert param[: n - 1024 : 2**20].float().abs().min() > 0.9e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices() -> None:
    here, there = parameters(), parameters(device="cuda:1")
    alone = parameters()
    both, one = ok.AdamW(here + there), ok.AdamW(alone)
    for params in (here, there, alone):
        give(params, 0)
    both.step()
    one.step()
    for p, q, r in zip(here, there, alone, strict=True):
        assert torch.equal(p, r)
        assert torch.equal(q.to("cuda:0"), r)
