"""How near is a step of AdamW to the memory's bandwidth, and how much faster than torch's own?

    python benchmarks/optim.py [--quick] [--json PATH] [--device cpu] [--budget SECONDS]

On a GPU: a thousand million parameters (as far as memory goes) as one tensor, as the layers of a 7B model
and as 5,000 small tensors in 200 groups; ours, torch's fused and foreach, in turns, without and with
clipping by the global norm, and every form of ours that keeps weights and moments in fewer bits. The
share of bandwidth is that of a device copy, measured in the same turns: bytes that a step must move
over its time. On the CPU: fp32 beside torch's fused kernel, in turns; the other forms inform.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from budget import Budget, add_budget
from harness import Figure, Measurement, alternate, finish, parser, time_figure, timer_for
from overlapkit.device import as_device
from overlapkit.optim import AdamW

GOAL_BANDWIDTH = 90.0
GOAL_CPU = 1 / 0.98
FORMS: dict[str, tuple[torch.dtype, dict[str, Any], float]] = {
    "bf16 moments": (torch.float32, {"moments": "bf16"}, 20),
    "bf16_master": (torch.bfloat16, {}, 26),
    "bf16_sr": (torch.bfloat16, {"precision": "bf16_sr"}, 22),
    "bf16_kahan, bf16 moments": (torch.bfloat16, {"precision": "bf16_kahan", "moments": "bf16"}, 18),
    "bf16_sr, int8 moments": (torch.bfloat16, {"precision": "bf16_sr", "moments": "int8"}, 10.125),
}
"""dtype of the weights and gradients, options, and the bytes a parameter that a step reads and writes."""

FP32_BYTES = 28
SET_S, FORM_S = 8.0, 3.0
"""About what one set takes beside its peers, and one form alone, its kernels' compilation included."""


@dataclass
class Model:
    """Parameters with gradients, in groups; each optimizer in turn steps the same ones."""

    shapes: list[tuple[int, ...]]
    groups: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    params: list[nn.Parameter] = field(default_factory=list)

    def __post_init__(self) -> None:
        for shape in self.shapes:
            param = nn.Parameter(torch.randn(shape, dtype=self.dtype, device=self.device))
            param.grad = torch.randn_like(param).mul_(1e-3)
            self.params.append(param)

    @property
    def size(self) -> int:
        return sum(param.numel() for param in self.params)

    def grouped(self) -> list[dict[str, Any]]:
        return [
            {"params": self.params[g :: self.groups], "weight_decay": 1e-2 * (g % 2)}
            for g in range(self.groups)
        ]


def main() -> int:
    options = parser("How near is a step of AdamW to the memory's bandwidth?")
    add_budget(options)
    args = options.parse_args()
    budget, device = Budget(args.budget), as_device(args.device)
    figures = on_cpu(args.quick, budget) if device.type == "cpu" else on_gpu(device, args.quick, budget)
    return finish(figures, args)


def on_cpu(quick: bool, budget: Budget) -> list[Figure]:
    figures = []
    side = 500 if quick else 1500
    sets = {"4 large": [(side, side)] * 4, "1,000 small": [(100,)] * 1000}
    for name, shapes in sets.items():
        one = partial(beside_fused, name, shapes, 6 if quick else 40)
        figures += budget.attempt(SET_S, f"fp32, {name}", one)
    for form in FORMS:
        one = partial(form_on_cpu, form, side, 2 if quick else 5)
        figures += budget.attempt(FORM_S, form, one)
    return figures


def beside_fused(name: str, shapes: list[tuple[int, ...]], rounds: int) -> list[Figure]:
    """Ours and torch's fused kernel for CPUs, without and with clipping."""
    figures = []
    for title, max_norm in ((f"fp32, {name}", None), (f"fp32 and clipping, {name}", 1e-3)):
        variants = against_torch(Model(shapes, 1, torch.device("cpu")), ["fused"], max_norm=max_norm)
        took = alternate(variants, rounds=rounds)
        figures.append(time_figure(title, took["ours"], took["fused"], ratio_limit=GOAL_CPU))
    return figures


def form_on_cpu(form: str, side: int, rounds: int) -> list[Figure]:
    dtype, options, _ = FORMS[form]
    optimizer = AdamW(Model([(side, side)], 1, torch.device("cpu"), dtype).params, **options)
    return [time_figure(f"{form}, 1 large", alternate({"ours": optimizer.step}, rounds=rounds)["ours"])]


def on_gpu(device: torch.device, quick: bool, budget: Budget) -> list[Figure]:
    free = torch.cuda.mem_get_info(device)[0]
    # 8 bytes for a parameter and its gradient, 16 for the moments of two optimizers, and foreach's copies
    size = min(10**7 if quick else 10**9, int(0.7 * free) // 40)
    sets = {
        "one tensor": ([(size // 1024, 1024)], 1),
        "7B layers": (layers_of_7b(size), 2),
        "5,000 small in 200 groups": ([(size // 5000,)] * 5000, 200),
    }
    figures, rounds = [], 5 if quick else 20
    for name, (shapes, groups) in sets.items():
        one = partial(beside_torch, name, shapes, groups, device, rounds)
        figures += budget.attempt(SET_S, name, one)
    for form in FORMS:
        figures += budget.attempt(FORM_S, form, partial(form_on_gpu, form, size, device, rounds))
    return figures


def form_on_gpu(form: str, size: int, device: torch.device, rounds: int) -> list[Figure]:
    dtype, options, nbytes = FORMS[form]
    model = Model(layers_of_7b(size), 2, device, dtype)
    took = in_turns({"ours": AdamW(model.grouped(), **options).step}, model, rounds)
    named = f"{form}, share of copy bandwidth"
    return [time_figure(f"{form}, ms", took["ours"]), share(named, took, model.size, nbytes)]


def beside_torch(
    name: str, shapes: list[tuple[int, ...]], groups: int, device: torch.device, rounds: int
) -> list[Figure]:
    """Ours, torch's fused and foreach; then ours and torch's fused with clipping."""
    figures = []
    model = Model(shapes, groups, device)
    for peer in ("fused", "foreach"):
        took = in_turns(against_torch(model, [peer]), model, rounds)
        figures.append(time_figure(f"{name} beside {peer}, ms", took["ours"], took[peer], ratio_limit=1.0))
        if peer == "fused":
            figures.append(share(f"{name}, share of copy bandwidth", took, model.size, FP32_BYTES))
        torch.cuda.empty_cache()
    took = in_turns(against_torch(model, ["fused"], max_norm=1e-3), model, rounds)
    goal = 1 / 3 if groups > 2 else 1.0
    clipped = time_figure(f"{name} with clipping, ms", took["ours"], took["fused"], ratio_limit=goal)
    figures += [
        clipped,
        share(f"{name} with clipping, share of copy bandwidth", took, model.size, FP32_BYTES + 4),
    ]
    return figures


def against_torch(
    model: Model, peers: list[str], max_norm: float | None = None
) -> dict[str, Callable[[], object]]:
    """Our step and torch's, of the same parameters and gradients."""
    variants: dict[str, Callable[[], object]] = {"ours": AdamW(model.grouped(), max_norm=max_norm).step}
    for peer in peers:
        optimizer = torch.optim.AdamW(model.grouped(), **{peer: True})

        def step(optimizer: torch.optim.Optimizer = optimizer) -> None:
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.params, max_norm)
            optimizer.step()

        variants[peer] = step
    return variants


def in_turns(variants: dict[str, Callable[[], object]], model: Model, rounds: int) -> dict[str, Measurement]:
    """With a copy of as many bytes as the parameters have, whose bandwidth is the ceiling."""
    source = torch.empty(model.size, device=model.device)
    target: Tensor = torch.empty_like(source)
    timed = {**variants, "copy": lambda: target.copy_(source)}
    return alternate(timed, rounds=rounds, warmup=3, timer=timer_for(model.device))


def share(name: str, took: dict[str, Measurement], size: int, nbytes: float) -> Figure:
    """The bytes that a step must move over its time, in percent of the copy's."""
    copied = 8 * size / took["copy"].median
    value = 100 * nbytes * size / took["ours"].median / copied
    return Figure(name, value, "%", "higher", limit=GOAL_BANDWIDTH)


def layers_of_7b(size: int) -> list[tuple[int, ...]]:
    """The parameters of a 7B Llama, as many whole layers as `size` holds, at least one."""
    layer: list[tuple[int, ...]] = (
        [(4096, 4096)] * 4 + [(11_008, 4096)] * 2 + [(4096, 11_008), (4096,), (4096,)]
    )
    numel = sum(torch.Size(shape).numel() for shape in layer)
    if size < numel:
        return [tuple(max(1, n // 16) for n in shape) for shape in layer]
    return layer * (size // numel)


if __name__ == "__main__":
    sys.exit(main())
