"""How much of communication is still exposed, and does it take fewer seconds than torch's own ways?

    sudo python benchmarks/comm.py [--quick] [--json PATH] [--figure PATH.png] [--only TEXT]

On hosts that benchmarks/netlab.py makes of one machine, over gloo, in fp32: plain fully_shard, the recipe of
large pretraining code (the embedding, each block, [norm, head] kept, explicit prefetch), DDP's defaults, and
ours ("2 ahead" is forward_prefetch=2), in turns in one run; a step is forward and backward, the slowest
rank's. A block computes by sleeping (benchmarks/comm_rank.py says why). Each term of a goal is measured in
the same run:

* compute: the same step of one rank that talks to nobody; forward: that of it;
* bandwidth: a plain socket from each host to the next, all at once; the fastest that was seen, once a round;
* bytes: what crosses the wire of one host, (hosts - 1) / hosts of each collective's, twice for an all-reduce;
* the first bucket: when `replicate` had its first bucket ready, after backward began.

The goals: `replicate` within 1.10 of max(compute, forward + first bucket + bytes / bandwidth); `shard` within
1.4 of max(compute, all-gathers / bandwidth) + reduce-scatters / bandwidth, as if those could not overlap; and
the better of ours at least 0.98 times as fast as the best of torch's. "all beside" is the bound of `shard` if
everything overlaps: max(compute, all bytes / bandwidth). Needs root and iproute2.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import netlab
from bars import draw
from harness import Figure, Measurement, finish, new_file, parser, time_figure

RANK = Path(__file__).with_name("comm_rank.py")
GOAL_DDP, GOAL_FSDP, GOAL_PEER = 1.10, 1.4, 1 / 0.98
OURS = ("ours, shard", "ours, shard, 2 ahead", "ours, replicate", "ours, replicate, 8 MiB")
PEERS = ("fully_shard", "fully_shard, recipe", "DDP")
ALONE = "compute alone"
_PARAMETERS_MB = 8.4, 8.2  # of a block; of embedding and head


@dataclass(frozen=True)
class Setting:
    """Hosts, each host's Mbit/s, and compute in units of the time in which the parameters cross the wire."""

    hosts: int
    mbit: float
    compute: float
    depth: int
    rounds: int

    @property
    def name(self) -> str:
        # shard moves the parameters almost three times, replicate twice
        bound = "compute" if self.compute >= 3 else "wire"
        return f"{self.hosts} hosts {self.mbit:g} Mbit/s {bound}-bound"

    @property
    def compute_s(self) -> float:
        block, rest = _PARAMETERS_MB
        crossing = (self.depth * block + rest) * (self.hosts - 1) / self.hosts
        return self.compute * crossing * 8 / self.mbit


SETTINGS = (
    Setting(2, 1000, 4.0, depth=12, rounds=4),
    Setting(2, 1000, 0.5, depth=12, rounds=6),
    Setting(2, 2000, 0.5, depth=12, rounds=6),
    Setting(2, 300, 0.5, depth=8, rounds=3),
    Setting(4, 300, 0.5, depth=6, rounds=3),
    Setting(4, 500, 4.0, depth=6, rounds=3),
)
QUICK = (Setting(2, 1000, 0.5, depth=4, rounds=2),)


def main() -> int:
    options = parser("How much of communication is still exposed?")
    options.add_argument("--figure", type=new_file, metavar="PATH", help="draw the steps here, as PNG")
    options.add_argument("--only", default="", metavar="TEXT", help="only settings whose name has this in it")
    args = options.parse_args()
    if lacks := netlab.missing():
        print(f"not measured: {lacks}", file=sys.stderr)
        return 1
    figures = measure([one for one in (QUICK if args.quick else SETTINGS) if args.only in one.name])
    if args.figure is not None:
        drawn = [figure for figure in figures if figure.unit == "s" and " CPU" not in figure.name]
        draw(args.figure, drawn, args.question)
    return finish(figures, args)


def measure(settings: list[Setting]) -> list[Figure]:
    """All figures, setting after setting."""
    figures: list[Figure] = []
    for setting in settings:
        print(f"{setting.name} ...", file=sys.stderr, flush=True)
        figures += figures_of(setting, run(setting))
    return figures


def run(setting: Setting) -> list[dict[str, Any]]:
    """Each rank's numbers."""
    probe = round(setting.mbit * 1e6 / 8 * 0.3)
    numbers = [setting.depth, setting.rounds, probe, setting.compute_s]
    with netlab.Lab(setting.hosts, setting.mbit) as lab, tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        lab.run(RANK, [*map(str, numbers), str(report)], timeout=400)
        return json.loads(report.read_text())


def figures_of(setting: Setting, ranks: list[dict[str, Any]]) -> list[Figure]:
    """The setting's figures: steps beside their bounds, and what they sent and computed."""
    steps = {name: Measurement(name, slowest(ranks, name)) for name in ranks[0]["steps"]}
    bounds = bounds_of(ranks)
    figures = [bounded(setting, steps, OURS[0], bounds["shard"], GOAL_FSDP)]
    figures.append(bounded(setting, steps, OURS[3], bounds["replicate"], GOAL_DDP))
    figures.append(best_figure(setting, steps))
    for name in (*PEERS, *OURS[1:3], ALONE):
        figures.append(time_figure(f"{setting.name}, {name}", steps[name], unit="s"))
    all_beside = Measurement("all beside", (bounds["all beside"],))
    figures.append(time_figure(f"{setting.name}, all beside", all_beside, unit="s"))
    rate = rate_of(ranks)
    figures.append(Figure(f"{setting.name} socket, plain", rate * 8 / 1e6, "Mbit/s"))
    for name in (*PEERS, *OURS):
        sent = median(count for rank in ranks for count in rank["sent"][name])
        figures.append(Figure(f"{setting.name} sent, {name}", sent / 1e6, "MB"))
        cpu = median(seconds for rank in ranks for seconds in rank["cpu"][name])
        figures.append(Figure(f"{setting.name} CPU, {name}", cpu, "s"))
    return figures


def slowest(ranks: list[dict[str, Any]], name: str) -> tuple[float, ...]:
    """The slowest rank's seconds of each step."""
    return tuple(max(step) for step in zip(*(rank["steps"][name] for rank in ranks), strict=True))


def bounds_of(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """What a step could take, in seconds."""
    crossing = (len(ranks) - 1) / len(ranks)
    rate = rate_of(ranks)
    compute = median(slowest(ranks, ALONE))
    forward = median(seconds for rank in ranks for seconds in rank["forward"])
    gather, reduce = (ranks[0][kind] * crossing / rate for kind in ("gathered", "reduced"))
    first = max(rank["first_ready"] for rank in ranks)
    whole = 2 * ranks[0]["parameters"] * crossing / rate
    return {
        "shard": max(compute, gather) + reduce,
        "all beside": max(compute, gather + reduce),
        "replicate": max(compute, forward + first + whole),
    }


def rate_of(ranks: list[dict[str, Any]]) -> float:
    """Bytes a second of the slowest link, each at its fastest: a bound must not profit from a slow moment."""
    return min(max(rank["rates"]) for rank in ranks)


def bounded(setting: Setting, steps: dict[str, Measurement], name: str, bound: float, goal: float) -> Figure:
    """A step of ours beside its bound."""
    peer = Measurement("the bound", (bound,))
    return time_figure(f"{setting.name}, {name}", steps[name], peer, unit="s", ratio_limit=goal)


def best_figure(setting: Setting, steps: dict[str, Measurement]) -> Figure:
    """The better of ours beside the best of torch's."""
    ours, peer = (min((steps[name] for name in names), key=lambda one: one.median) for names in (OURS, PEERS))
    name = f"{setting.name}, ours at best"
    return time_figure(name, ours, peer, unit="s", ratio_limit=GOAL_PEER)


if __name__ == "__main__":
    sys.exit(main())
