"""Does training lose anything by keeping weights and moments in fewer bits?

    python benchmarks/optim_convergence.py [--quick] [--json PATH] [--figure PNG] [--steps N]

Trains the GPT of examples/train_gpt.py, made small, on the Python standard library's sources, once for each
form that AdamW keeps weights and moments in, from the same weights on the same batches. The model
computes in fp32; where weights are bf16 its weights are theirs after every step, and they get bf16
gradients. Beside ours stands what torch.optim.AdamW does with bf16 weights: it rounds to the nearest.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness import Figure, finish, new_file, parser
from machine import ROOT
from overlapkit.extras import require
from overlapkit.optim import AdamW

sys.path.insert(0, str(ROOT / "examples"))

from gpt import GPT, plain_swiglu
from text import standard_library

WINDOW, BATCH, WIDTH, LAYERS = 128, 8, 64, 2
SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
CLOSE = 1.01  # goal: at most this times the loss of fp32
FORMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp32, bf16 moments": (torch.float32, {"moments": "bf16"}),
    "fp32, int8 moments": (torch.float32, {"moments": "int8"}),
    "bf16_master": (torch.bfloat16, {}),
    "bf16_kahan, bf16 moments": (torch.bfloat16, {"precision": "bf16_kahan", "moments": "bf16"}),
    "bf16_sr": (torch.bfloat16, {"precision": "bf16_sr"}),
    "bf16_sr, int8 moments": (torch.bfloat16, {"precision": "bf16_sr", "moments": "int8"}),
}
TORCH = "torch.optim.AdamW, bf16"


def main() -> int:
    options = parser("Does training lose anything by keeping weights and moments in fewer bits?")
    options.add_argument("--steps", type=int, default=600, help="default: %(default)s")
    options.add_argument("--figure", type=new_file, metavar="PNG", help="draw the losses here")
    args = options.parse_args()
    steps = 20 if args.quick else args.steps
    text, held_out = standard_library()
    curves: dict[str, list[float]] = {}
    figures = []
    for name in [*FORMS, TORCH]:
        dtype, ours = FORMS.get(name, (torch.bfloat16, None))

        def make(params: list[Tensor], ours: dict[str, Any] | None = ours) -> torch.optim.Optimizer:
            return (
                torch.optim.AdamW(params, **SETTINGS) if ours is None else AdamW(params, **SETTINGS, **ours)
            )

        curves[name], loss = train(text, held_out, make, dtype, steps)
        print(f"{name}: {loss:.4f}", flush=True)
        fp32 = figures[0].value if figures else loss
        goal = None if name in ("fp32", TORCH) or args.quick else CLOSE
        peer = (None, None) if name == "fp32" else ("fp32", fp32)
        figures.append(Figure(f"held-out loss, {name}", loss, "nats", "lower", *peer, ratio_limit=goal))
    if args.figure:
        draw(curves, args.figure)
    return finish(figures, args)


def train(
    text: Tensor,
    held_out: Tensor,
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    dtype: torch.dtype,
    steps: int,
) -> tuple[list[float], float]:
    """Losses of all steps, and the loss on text that was not trained on."""
    torch.manual_seed(0)
    model: Any = GPT(256, WIDTH, LAYERS, 4, WINDOW, False, plain_swiglu)
    inside = list(model.parameters())
    params: list[Tensor] = inside
    if dtype != torch.float32:
        params = [nn.Parameter(p.detach().to(dtype)) for p in inside]
        torch._foreach_copy_([p.data for p in inside], [p.data for p in params])
    optimizer = make(params)
    losses, places = [], torch.Generator().manual_seed(1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = SETTINGS["lr"] * min(
                (step + 1) / 20, 0.55 + 0.45 * math.cos(math.pi * step / steps)
            )
        loss = model(*batch(text, places))
        loss.backward()
        losses.append(loss.item())
        if dtype != torch.float32:
            for param, p in zip(params, inside, strict=True):
                param.grad, p.grad = p.grad.to(dtype), None
        optimizer.step()
        optimizer.zero_grad()
        if dtype != torch.float32:
            torch._foreach_copy_([p.data for p in inside], [p.data for p in params])
    with torch.no_grad():
        places.manual_seed(2)
        held = [model(*batch(held_out, places)).item() for _ in range(20)]
    return losses, sum(held) / len(held)


def batch(text: Tensor, places: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows: inputs and the bytes after them, (BATCH, WINDOW) int64."""
    starts = torch.randint(len(text) - WINDOW, (BATCH, 1), generator=places)
    windows = text[starts + torch.arange(WINDOW + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """The losses, and below how far each is from fp32's; both are means over 25 steps."""
    figure = require("matplotlib.figure", "viz").Figure(figsize=(9, 7), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    smooth = {name: mean_of_25(torch.tensor(losses)) for name, losses in curves.items()}
    for name, losses in smooth.items():
        style = {"linestyle": "--", "color": "black"} if name == TORCH else {}
        steps = range(25, 25 + len(losses))
        above.plot(steps, losses, linewidth=1, label=name, **style)
        below.plot(steps, losses - smooth["fp32"], linewidth=1, **style)
    above.set_ylabel("loss, nats a byte")
    above.legend(fontsize=8)
    below.set_ylabel("difference to fp32")
    below.set_xlabel("step")
    figure.savefig(path, format="png")


def mean_of_25(values: Tensor) -> Tensor:
    return values.unfold(0, min(25, len(values)), 1).mean(1)


if __name__ == "__main__":
    sys.exit(main())
