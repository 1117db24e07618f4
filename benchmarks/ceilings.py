"""What can this machine do at best? The ceilings beside which every other figure is read.

Device copy, host-to-device and device-to-host copies of page-locked memory, and a bf16 matmul, each
on random data far larger than any cache, in turns; medians.

    python benchmarks/ceilings.py [--quick] [--json PATH] [--device cuda] [--budget SECONDS]
"""

import sys
from collections.abc import Callable

import torch

from budget import Budget, add_budget
from harness import Figure, Measurement, alternate, finish, parser, timer_for
from overlapkit.device import as_device

HOST_BYTES = 2**28


def main() -> int:
    options = parser("What can this machine do at best?")
    add_budget(options)
    args = options.parse_args()
    budget, device = Budget(args.budget), as_device(args.device)
    small = args.quick or device.type == "cpu"
    nbytes, side = (2**26, 512) if small else (2**30, 8192)
    moves, sizes = copies(nbytes, device)
    variants = moves | {"bf16 matmul": matmul(side, device)}
    rounds = 4 if small else 20
    timer, limit_s = timer_for(device), budget.left()
    took = alternate(variants, rounds=rounds, warmup=2, timer=timer, limit_s=limit_s)
    figures = [rate(took[name], moved / 1e9, "GB/s") for name, moved in sizes.items()]
    figures.append(rate(took["bf16 matmul"], 2 * side**3 / 1e12, "TFLOP/s"))
    return finish(figures, args)


def copies(nbytes: int, device: torch.device) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """The copies, and the bytes that each moves: a copy within one memory reads and writes all of them."""
    source = torch.randint(256, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    variants: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    sizes = {"copy": 2 * nbytes}
    if device.type == "cuda":
        part = min(nbytes, HOST_BYTES)  # page-locking more would take longer than measuring it
        host = source[:part].cpu().pin_memory()
        variants["host to device"] = lambda: target[:part].copy_(host, non_blocking=True)
        variants["device to host"] = lambda: host.copy_(source[:part], non_blocking=True)
        sizes |= {"host to device": part, "device to host": part}
    return variants, sizes


def matmul(side: int, device: torch.device) -> Callable[[], object]:
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.matmul(left, right, out=out)


def rate(took: Measurement, amount: float, unit: str) -> Figure:
    low, high = took.quartiles
    spread = (amount / high, amount / low)
    return Figure(took.name, amount / took.median, unit, better="higher", spread=spread)


if __name__ == "__main__":
    sys.exit(main())
