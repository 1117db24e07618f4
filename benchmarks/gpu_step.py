"""Is a whole training step on a GPU ahead of torch.compile's, and does all but its compute hide?

    python benchmarks/gpu_step.py [--quick] [--json PATH] [--png PATH] [--device cuda] [--budget SECONDS]

The model of examples/train_gpt.py with GPT-2's vocabulary and a tied head, at 124 million and at a thousand
million parameters, in bf16 autocast over windows of 1,024 random tokens. Four variants, one after the
other, each freed before the next: plain PyTorch as `train_gpt.py --baseline` has it (DataLoader with two
workers and page-locked memory, fused AdamW, clip_grad_norm_), and ours as train_gpt.py has it (TokenShards
through DeviceLoader, swap and swiglu, AdamW with max_norm, StepMeter), each eager and under torch.compile.
At 124M the whole model is compiled; at 1B its blocks are, as is usual at that size, and the baseline's norm
and loss, too.

Steps are timed by two events around a run of them. Each variant takes turns with its own compute: the same
model and optimizer over a batch that stays on the device, without loader and meter. MFU is beside the
datasheet's peak, and beside a matrix product in the same run. Peak memory is the caching allocator's while
steps run. No checkpoint is saved here: gpu_checkpoint.py measures what that costs.

Goals: ours under torch.compile is ahead of torch.compile alone, ours eager of eager, and each within 5 % of
its own compute. It takes about two minutes, of which torch.compile has most; what does not fit is left out.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ceilings
from budget import Budget, add_budget
from gpu_jobs import Job, Size, write_tokens
from harness import (
    Figure,
    Measurement,
    alternate,
    finish,
    new_file,
    parser,
    returned_seconds,
    time_figure,
    timer_for,
)
from overlapkit.device import as_device
from overlapkit.extras import require
from overlapkit.measure.device_peaks import peak_of

COMPUTE = 1.05
EAGER, COMPILE, OURS, BOTH = "eager", "torch.compile", "ours", "ours + torch.compile"
VARIANTS = {COMPILE: (False, True), BOTH: (True, True), EAGER: (False, False), OURS: (True, False)}
"""Whether the parts are ours, and whether the model is compiled; what matters most comes first."""
BESIDE = {OURS: EAGER, BOTH: COMPILE}
"""What each of ours has to be ahead of."""
EAGER_S, WHOLE_S, BLOCK_S = 5.0, 30.0, 15.0
"""About what a variant takes in all: eager, compiled whole, and compiled by block."""

SIZES = (
    Size("124M", 768, 12, 12, 50_304, 1024, 16, whole=True, steps=10),
    Size("1B", 2048, 18, 16, 50_304, 1024, 8, whole=False, steps=6),
)
SMALL = (
    Size("tiny", 32, 2, 4, 256, 64, 4, whole=True, steps=2),
    Size("tiny by block", 32, 2, 4, 256, 64, 4, whole=False, steps=2),
)
TOKENS = 2**25  # 64 MiB


def main() -> int:
    args = _arguments()
    device, budget = as_device(args.device), Budget(args.budget)
    small = device.type == "cpu"
    ceiling = matmul_rate(device)
    figures, reports = [Figure("bf16 matmul", ceiling / 1e12, "TFLOP/s")], {}
    with tempfile.TemporaryDirectory(prefix="gpu-step-") as folder:
        data = Path(folder)
        write_tokens(data, 2**16 if small else TOKENS, (SMALL if small else SIZES)[0].vocab)
        for size in SMALL if small else SIZES:
            rows, told = measure(size, data, device, 2 if args.quick else 5, budget, ceiling)
            figures += rows
            reports |= told
    code = finish(figures, args, {name: report.to_dict() for name, report in reports.items()})
    for name, report in reports.items():  # when the figures are safe
        print(name, report, sep="\n", flush=True)
    if args.png is not None and reports:
        list(reports.values())[-1].plot(args.png)
    return code


def measure(
    size: Size, data: Path, device: torch.device, rounds: int, budget: Budget, ceiling: float
) -> tuple[list[Figure], dict[str, Any]]:
    """All variants of one size: figures, and the reports of ours."""
    took: dict[str, dict[str, Measurement]] = {}
    figures: list[Figure] = []
    reports: dict[str, Any] = {}
    for name, (_, compiled) in VARIANTS.items():
        title = f"{size.name}, {name}"

        def one(title: str = title, name: str = name) -> list[Figure]:
            ours, compiled = VARIANTS[name]
            began = time.perf_counter()
            took[name], peak, report, flops = run(size, ours, compiled, data, device, rounds)
            if report is not None:
                reports[title] = report
            found = speed_figures(size, name, took, flops, device, ceiling)
            found += peak_figure(title, peak) + exposed_figure(title, report)
            return [*found, Figure(f"{title}: all of it", time.perf_counter() - began, "s")]

        needed = (WHOLE_S if size.whole else BLOCK_S) if compiled else EAGER_S
        stuck = max(2 * needed, budget.left() / 2)
        figures += budget.attempt(needed, title, one, at_most=stuck)
    return figures, reports


def run(
    size: Size, ours: bool, compiled: bool, data: Path, device: torch.device, rounds: int
) -> tuple[dict[str, Measurement], float | None, Any, float]:
    """Whole steps and their compute in turns; the peak in bytes, the report, and FLOPs of a step."""
    on_gpu = device.type == "cuda"
    job = Job(size, ours, compiled, data, device)
    try:
        job.settle()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        turns: dict[str, Callable[[], object]] = {"whole": job.whole, "compute": job.compute}
        took = alternate(turns, rounds=rounds, timer=returned_seconds)
        peak = float(torch.cuda.max_memory_allocated(device)) if on_gpu else None
        report = job.meter.report() if ours else None
        if peak is not None and report is not None and report.peak_memory is not None:
            peak = max(peak, float(report.peak_memory))  # the meter sets the allocator's back as it looks
        return took, peak, report, size.flops_per_token(job.parameters) * size.tokens
    finally:
        job.close()
        torch._dynamo.reset()  # compiled graphs hold memory, which the next variant needs


def speed_figures(
    size: Size,
    name: str,
    took: dict[str, dict[str, Measurement]],
    flops: float,
    device: torch.device,
    ceiling: float,
) -> list[Figure]:
    """Tokens a second beside the peer's, the step beside its compute, and MFU."""
    whole, compute = took[name]["whole"], took[name]["compute"]
    ours, title = name in BESIDE, f"{size.name}, {name}"
    peer = BESIDE.get(name)
    beside = None if peer is None or peer not in took else size.tokens / took[peer]["whole"].median
    rate = size.tokens / whole.median
    figures = [
        Figure(title, rate, "tokens/s", "higher", peer, beside, ratio_limit=1.0 if ours else None),
        time_figure(
            f"{title}: step",
            whole,
            Measurement("its compute", compute.samples),
            ratio_limit=COMPUTE if ours else None,
        ),
        Figure(f"{title}: of the matrix product", 100 * flops / whole.median / ceiling, "%", "higher"),
    ]
    sheet = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if sheet is not None:
        mfu = 100 * flops / whole.median / (sheet.half * 1e12)
        figures.append(Figure(f"{title}: MFU of the datasheet's {sheet.half:g}", mfu, "%", "higher"))
    return figures


def peak_figure(title: str, peak: float | None) -> list[Figure]:
    return [] if peak is None else [Figure(f"{title}: peak memory", peak / 2**30, "GiB", "lower")]


def exposed_figure(title: str, report: Any) -> list[Figure]:
    """What the meter says; None where it could not tell."""
    if report is None:
        return []
    share = None if report.exposed_share is None else 100 * report.exposed_share
    return [Figure(f"{title}: exposed, by the meter", share, "%", "lower")]


def matmul_rate(device: torch.device) -> float:
    """FLOPs a second of a large bf16 product of random matrices."""
    side = 256 if device.type == "cpu" else 8192
    product = {"product": ceilings.matmul(side, device)}
    took = alternate(product, rounds=10, warmup=2, timer=timer_for(device))
    return 2 * side**3 / took["product"].median


def _arguments() -> argparse.Namespace:
    options = parser("Is a whole training step on a GPU ahead of torch.compile's?")
    options.add_argument("--png", type=new_file, metavar="PATH", help="draw the lanes of ours here")
    add_budget(options)
    args = options.parse_args()
    if args.png is not None:
        require("matplotlib", "viz")  # not after two minutes
    return args


if __name__ == "__main__":
    sys.exit(main())
