"""How often does the report name the one fault in a run, and how often another?

    python benchmarks/faults.py [--runs 100] [--seed 0] [--quick] [--json PATH]      (make bench-faults)

Each run trains on two or four real ranks with one fault or none (fault_lab.py), drawn by the seed, as are
how much it costs a step (120 to 300 ms) and the number of ranks. Found: every rank's report names lane,
component, setting and rank, with a number within 15 % of what was planted, and nothing else. Missed: it does
not name it. False: it names something that was not planted as well, or instead. Off: it names nothing else,
but another number or rank. About ten minutes for 100 runs.
"""

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

import torch._dynamo  # noqa: F401 # DDP and optimizers import it; here once, and not in each rank
from rich.progress import track

from fault_lab import FAULTS, HEALTHY, Fault, mistakes, train
from harness import Figure, finish, parser

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.ranks import run_ranks


def main() -> int:
    options = parser("Does the report name the one fault in a run?")
    options.add_argument("--runs", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    kinds = (HEALTHY, *FAULTS)
    outcomes: dict[str, Counter[str]] = {fault.name: Counter() for fault in kinds}
    draw = random.Random(args.seed)
    for number in track(range(len(kinds) if args.quick else args.runs), "runs", transient=True):
        fault = kinds[number] if args.quick else draw.choice(kinds)
        world, seconds = draw.choice((2, 4)), draw.uniform(0.12, 0.30)
        outcomes[fault.name].update(outcome(fault, world, seconds))
    return finish(figures(outcomes, args), args)


def outcome(fault: Fault, world: int, seconds: float) -> list[str]:
    """What became of one run."""
    answers = run_ranks(world, train, world, fault, seconds)
    wrong = mistakes(fault, seconds, world, answers)
    for line in wrong:
        print(f"{fault.name}, {world} ranks, {seconds * 1e3:.0f} ms: {line}", file=sys.stderr)
    if not wrong:
        return ["runs", "found"]
    lanes = [[one[0] for one in answer["findings"]] for answer in answers]
    planted = [] if fault.lane is None else [fault.lane]
    what = ["false"] if any(len(one) > len(planted) or not {*one} <= {*planted} for one in lanes) else []
    what += [] if all({*planted} <= {*one} for one in lanes) else ["missed"]
    return ["runs", *(what or ["off"])]


def figures(outcomes: dict[str, Counter[str]], args: argparse.Namespace) -> list[Figure]:
    """A row for each fault, and the sums."""
    rows: list[Figure] = []
    for name, counted in outcomes.items():
        if counted["runs"]:
            for what in ("found", "missed", "false", "off"):
                rows.append(
                    Figure(f"{name}: {what}", counted[what], "runs", peer="runs", peer_value=counted["runs"])
                )
    total = sum(outcomes.values(), Counter())
    rows.append(
        Figure(
            "all: found",
            total["found"],
            "runs",
            better="higher",
            peer="runs",
            peer_value=total["runs"],
            ratio_limit=0.95,
        )
    )
    return rows


if __name__ == "__main__":
    sys.exit(main())
