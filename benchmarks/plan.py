"""Does a simulated step take as long as a real one, and is the chosen plan the best there is?

    sudo python benchmarks/plan.py [--quick] [--json PATH] [--png PATH]      (make bench-plan)

In the network lab (netlab.py; root and iproute2): two hosts profile a model alone and probe their link, then
train it under DDP and FSDP2 with several prefetch depths, in turns. Each measured step and its exposed share
stand beside what was simulated from profile and link. Then the plan that `choose` makes is trained in turns
with the default one and with a grid of others. A block's compute is a sleep (two cores hold no more), so the
simulation of communication is what is judged.

And a public run: from torchtitan's Llama 3.1 8B on 8 GPUs its throughput on 128 is predicted (llama.py). How
much ranks differ is fitted to one of its three pairs (torch.compile); the other two are predicted.

About ten minutes on two cores, --quick one.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import Figure, finish, parser
from llama import A100, A100_S, COMPILED, EAGER, FLOAT8, H100, H100_S, OPTIMIZER_S, TOKENS, Pair, llama
from netlab import Lab, missing
from overlapkit.extras import require
from overlapkit.parallel import ShardPlan
from overlapkit.plan import LinkTable, Profile, Scaling, choose, scale, simulate
from overlapkit.plan.setting import Job
from overlapkit.plan.simulation import play

RANK = Path(__file__).with_name("plan_rank.py")


@dataclass(frozen=True)
class Shape:
    """A model of the lab: blocks of so many elements, whose forward takes so long."""

    name: str
    blocks: int
    elements: int
    seconds: float


@dataclass(frozen=True)
class Variant:
    """A way to train it."""

    name: str
    wrapper: str
    plan: ShardPlan | None


SHAPES = (
    Shape("8 blocks of 4 MiB", 8, 1 << 20, 0.040),
    Shape("4 blocks of 16 MiB", 4, 1 << 22, 0.080),
)
RATES = (500.0, 1000.0)
VARIANTS = (
    Variant("replicate", "replicate", None),
    Variant("shard", "shard", None),
    Variant("shard, no prefetch", "shard", ShardPlan(forward_prefetch=0, backward_prefetch=0)),
)


def main() -> int:
    options = parser("Does a simulated step take as long as a real one?")
    options.add_argument("--png", type=Path, help="draw Llama 8B on 2 to 16,384 GPUs here (needs matplotlib)")
    options.add_argument("--rounds", type=int, default=6, help="timed steps of each variant")
    options.add_argument("--mbit", type=float, nargs="+", default=RATES, help="bandwidths of the lab")
    args = options.parse_args()
    figures = [*published(), *at_any_scale(args.png)]
    if lacks := missing():
        print(f"not measured: {lacks}", file=sys.stderr)
    else:
        figures += in_the_lab(args)
    return finish(figures, args)


def published() -> list[Figure]:
    """Throughput on 128 GPUs from that on 8."""
    spread = fit_spread(COMPILED)
    figures = [Figure("spread of ranks, fitted to the run with torch.compile", 100 * spread, "% of compute")]
    for pair in (EAGER, FLOAT8):
        predicted = 100 * (1 - predict(pair, spread) / pair.eight)
        published = 100 * pair.loss
        figures += [
            Figure(
                f"{pair.name}: loss from 8 to 128 GPUs",
                predicted,
                "%",
                peer="published",
                peer_value=published,
            ),
            Figure(
                f"{pair.name}: error of it", abs(predicted - published), "points", better="lower", limit=1.0
            ),
        ]
    return figures


def predict(pair: Pair, spread: float) -> float:
    """Tokens a second and GPU on 128 GPUs."""
    target, low, high = TOKENS / pair.eight, 0.1, 10.0
    while high - low > 1e-6:  # the compute time that gives the step of 8 GPUs
        middle = (low + high) / 2
        low, high = (low, middle) if _step_s(middle, 8, spread) > target else (middle, high)
    return TOKENS / _step_s(low, 128, spread)


def fit_spread(pair: Pair) -> float:
    """How much ranks differ, if nothing else than what is simulated costs the difference."""
    low, high = 0.0, 0.2
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (low, middle) if predict(pair, middle) < pair.many else (middle, high)
    return low


def _step_s(compute_s: float, ranks: int, spread: float) -> float:
    job = Job(llama(compute_s), H100, ranks, param_bytes=2, reduce_bytes=4, spread=spread)
    return play(job, ShardPlan(), "shard").end + OPTIMIZER_S / ranks


def at_any_scale(png: Path | None) -> list[Figure]:
    """Llama 8B, two sequences a GPU, from 2 to 16,384 GPUs of two published fabrics."""
    worlds = [2**power for power in range(1, 15)]
    figures: list[Figure] = []
    scaled = {}
    for name, fabric, compute_s in (("H100, 400 Gb/s", H100, H100_S), ("A100, 200 Gb/s", A100, A100_S)):
        scaled[name] = scale(
            llama(compute_s),
            fabric,
            worlds,
            param_bytes=2,
            spread=fit_spread(COMPILED),
            optimizer_s=OPTIMIZER_S,
        )
        for row in scaled[name].rows():
            if row["ranks"] in (8, 128, 2048, 16384):
                where = f"Llama 8B on {row['ranks']:,} {name}"
                figures += [
                    Figure(f"{where}: step", row["step_ms"], "ms"),
                    Figure(f"{where}: exposed", 100 * row["exposed_share"], "%"),
                    Figure(f"{where}: break-even", float(row["break_even_tokens"]), "tokens"),
                ]
    if png is not None:
        draw_scaling(png, scaled)
    return figures


def draw_scaling(path: Path, scaled: Mapping[str, Scaling]) -> None:
    """Step time, and the exposed share, against the number of ranks."""
    figure = require("matplotlib.figure", "viz").Figure(figsize=(9, 3.6), dpi=130, layout="constrained")
    step, share = figure.subplots(1, 2)
    for name, found in scaled.items():
        ranks = [row["ranks"] for row in found.rows()]
        step.plot(ranks, [row["step_ms"] / 1e3 for row in found.rows()], "o-", label=name)
        share.plot(ranks, [100 * row["exposed_share"] for row in found.rows()], "o-", label=name)
    for axes, title in ((step, "seconds a step"), (share, "exposed communication, % of it")):
        axes.set_xscale("log", base=2)
        axes.set(xlabel="ranks", title=title, ylim=(0, None))
        axes.legend(fontsize=8)
    figure.savefig(path, format="png")


def in_the_lab(args: argparse.Namespace) -> list[Figure]:
    """Measured beside simulated, and the chosen plan beside others."""
    figures: list[Figure] = []
    shapes = [replace(shape, blocks=4, seconds=0.02) for shape in SHAPES[:1]] if args.quick else SHAPES
    with Lab(hosts=2) as lab:
        for rate in args.mbit[-1:] if args.quick else args.mbit:
            lab.set_rate(rate)
            for shape in shapes:
                profile, link = measure(lab, shape)
                variants = [*VARIANTS, *([] if args.quick else plans(shape, profile, link))]
                figures += compare(lab, shape, profile, link, variants, 2 if args.quick else args.rounds)
    return figures


def measure(lab: Lab, shape: Shape) -> tuple[Profile, LinkTable]:
    """What the simulation starts from."""
    (answer, *_) = _run(lab, shape, {"task": "profile"})
    return Profile.from_json(answer["profile"]), LinkTable.from_json(answer["link"])


def plans(shape: Shape, profile: Profile, link: LinkTable) -> list[Variant]:
    """The chosen plan, and a grid of others."""
    names = [unit.modules for unit in profile.units[:-1]]
    grid = [Variant("chosen", "shard", choose(profile, link))]
    for merged in (1, 2):
        units = tuple(
            tuple(name for one in names[start : start + merged] for name in one)
            for start in range(0, len(names), merged)
        )
        for depth in (0, 1, 2):
            for kept in (False, True):
                plan = ShardPlan(
                    units=units,
                    reshard=(not kept,) * len(units),
                    forward_prefetch=depth,
                    backward_prefetch=depth,
                )
                title = f"grid: {merged} a unit, prefetch {depth}{', kept' if kept else ''}"
                grid.append(Variant(title, "shard", plan))
    return grid


def compare(
    lab: Lab,
    shape: Shape,
    profile: Profile,
    link: LinkTable,
    variants: Sequence[Variant],
    rounds: int,
) -> list[Figure]:
    """Train every variant in turns."""
    wanted = [
        {"name": one.name, "wrapper": one.wrapper, "plan": None if one.plan is None else one.plan.to_json()}
        for one in variants
    ]
    answers = _run(lab, shape, {"task": "train", "variants": wanted, "rounds": rounds})
    where = f"{shape.name}, {lab.mbit:.0f} Mbit/s"
    took = {one.name: max(answer[one.name]["step_s"] for answer in answers) for one in variants}
    figures: list[Figure] = []
    for one in VARIANTS:
        report = simulate(profile, link, 2, plan=one.plan, wrapper=one.wrapper)  # type: ignore[arg-type]
        assert report.period_ms is not None
        assert report.exposed_share is not None
        step_ms = took[one.name] * 1e3
        off = abs(report.period_ms / step_ms - 1)
        exposed = max(answer[one.name]["exposed"] for answer in answers)
        apart = 100 * abs(report.exposed_share - exposed)
        figures += [
            Figure(f"{where}, {one.name}: step", report.period_ms, "ms", peer="measured", peer_value=step_ms),
            Figure(f"{where}, {one.name}: step, off by", 100 * off, "%", better="lower", limit=10.0),
            Figure(
                f"{where}, {one.name}: exposed share, off by", apart, "points", better="lower", limit=10.0
            ),
        ]
    if "chosen" in took:
        best = min(step for name, step in took.items() if name.startswith("grid"))
        figures += [
            Figure(
                f"{where}: chosen plan",
                took["chosen"] * 1e3,
                "ms",
                better="lower",
                peer="default",
                peer_value=took["shard"] * 1e3,
                ratio_limit=1.02,
            ),
            Figure(
                f"{where}: chosen plan beside the grid's best",
                took["chosen"] * 1e3,
                "ms",
                better="lower",
                peer="best of 12",
                peer_value=best * 1e3,
                ratio_limit=1.05,
            ),
        ]
    return figures


def _run(lab: Lab, shape: Shape, task: dict[str, Any]) -> list[dict[str, Any]]:
    model = {"blocks": shape.blocks, "elements": shape.elements, "seconds": shape.seconds}
    said = lab.run(RANK, [json.dumps({**task, **model})])
    return [json.loads(text.splitlines()[-1]) for text in said]


if __name__ == "__main__":
    sys.exit(main())
