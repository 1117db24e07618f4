"""The memory that the head of a language model takes: linear_cross_entropy and its peers.

Peak of what is allocated during forward and backward, beside inputs and their gradients. On the CPU it is the
profiler's account of torch's allocations, on a GPU the caching allocator's.
"""

import gc
from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from figure import Figure
from harness import alternate, time_figure, timer_for
from kernel_cases import liger, nbytes
from overlapkit import kernels

HEAD = "linear_cross_entropy"


def head_figures(quick: bool, device: torch.device) -> list[Figure]:
    """The peak in MiB; the goal is the chunk, and the weight's gradient in float32 before it is rounded."""
    if device.type == "cuda":
        n, d, v, chunk = 8192, 4096, 128_256, 2**29
    else:
        n, d, v, chunk = (64, 32, 32_768, 2**20) if quick else (256, 64, 32_768, 2**22)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, w = (torch.randn(s, device=device).to(dtype).requires_grad_() for s in ((n, d), (v, d)))
    target = torch.randint(v, (n,), device=device)
    variants: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: kernels.linear_cross_entropy(x, w, target, chunk_bytes=chunk),
        "torch": lambda: F.cross_entropy(F.linear(x, w).float(), target),
    }
    if device.type == "cuda":
        variants["torch.compile"] = torch.compile(variants["torch"], dynamic=False)
    if device.type == "cuda" and hasattr(F, "linear_cross_entropy"):  # torch 2.13
        variants["torch's own"] = lambda: F.linear_cross_entropy(x, w, target)
    if find_spec("liger_kernel") and device.type == "cuda":
        variants["liger"] = lambda: liger("fused_linear_cross_entropy", "FusedLinearCrossEntropy")(
            x, w, target
        )[0]
    took = {name: extra_bytes(fn, [x, w], device) / 2**20 for name, fn in variants.items()}
    limit = (chunk + 4 * w.numel() + 4 * x.numel()) / 2**20 * 1.05
    logits = n * v * dtype.itemsize / 2**20
    times = [] if device.type != "cuda" else head_times(variants, 3 if quick else 10, device)
    title = f"{HEAD} peak beside inputs and gradients, {n:,} x {d:,} x {v:,}, logits {logits:,.0f} MiB"
    return times + [
        Figure(
            f"{title}, against {peer}",
            took["ours"],
            "MiB",
            "lower",
            peer,
            took[peer],
            limit=limit,
            ratio_limit=1.0,
        )
        for peer in took
        if peer != "ours"
    ]


def head_times(variants: dict[str, Callable[[], Tensor]], rounds: int, device: torch.device) -> list[Figure]:
    """Forward and backward, launched from Python: beside such matrix products launches weigh nothing."""
    calls: dict[str, Callable[[], object]] = {
        n: (lambda fn=fn: fn().backward()) for n, fn in variants.items()
    }
    took = alternate(calls, rounds=rounds, warmup=2, timer=timer_for(device))
    ours = took.pop("ours")
    return [
        time_figure(f"{HEAD} forward + backward against {peer}", ours, other, ratio_limit=1.0)
        for peer, other in took.items()
    ]


def extra_bytes(fn: Callable[[], Tensor], leaves: list[Tensor], device: torch.device) -> int:
    """The peak during fn and its backward, less the gradients."""
    fn().backward()  # what is made once
    for x in leaves:
        x.grad = None
    gc.collect()
    gradients = nbytes(*leaves)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fn().backward()
        return torch.cuda.max_memory_allocated(device) - before - gradients
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        fn().backward()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak - gradients
