"""What does a save cost the training, how long until it is durable, and what does a load take?

    python benchmarks/checkpoint.py [--quick] [--json PATH] [--png PATH] [--folder DIR]

The state is 1 GiB, as 32 large tensors and as 5,000 small ones (1,250 parameters under AdamW), on 1 rank
and, under FSDP2, on 2. Each way to save takes its turn, each in processes of its own with one compute
thread: a loop of steps of 100 ms, and every now and then a save.

The exposed cost of a save is its stall (how long the call took, and what the optimizer's step then waited)
and what the steps until it was durable took longer than those before it. It is that of the second save of a
run, for all; the stall of the first, and what ran ahead of it (prewarming), are figures of their own. Time
until durable is that of a third save with nothing beside it (all but the last are deleted before each, which
counts for nobody), against a plain write and fsync of the same bytes; a load is measured with nothing in
the page cache, against a plain read into new memory, in five turns of all. Peak memory is that of the process
over what it held before it made the state, in units of the state. Planning is measured on one rank of up to
4,096 of torch's fake process group (benchmarks/planning.py).

Peers that are not installed are reported as not measured: pip install torchsnapshot torch_checkpointing.
The whole run takes 10 to 15 minutes on two cores, and 5 GiB of disk and memory. --quick saves 32 MiB, on
one rank, and leaves out what starts processes of its own; its times say little.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp  # here, so that what is forked need not

from harness import Figure, alternate, finish, parser, returned_seconds
from planning import plan_times
from savers import SAVERS, installed
from saving import Setting, load, raw, sample

SLOW = "dcp.async_save, process"  # takes its turn once only: 20 s and more, far behind all others
OWN_PROCESSES = (SLOW, "torch_checkpointing")
DURABLE = {"large": 1.15, "small": 1.3}
MiB = 1 << 20

Samples = dict[str, list[dict[str, float]]]


def measure(setting: Setting, names: list[str], rounds: int) -> Samples:
    """Every way to save, the plain calls and the loads, in turns."""
    taken: Samples = {}

    def once(name: str, run: Callable[[], dict[str, float]]) -> float:
        if name != SLOW or name not in taken:
            taken.setdefault(name, []).append(run())
        return 0.0

    variants = {name: partial(once, name, partial(sample, setting, name)) for name in names}
    variants["raw"] = partial(once, "raw", partial(raw, setting))
    variants["loads"] = partial(once, "loads", partial(load, setting))
    alternate(variants, rounds=rounds, warmup=0, timer=returned_seconds)
    return taken


def figures_of(setting: Setting, taken: Samples) -> list[Figure]:
    """What the samples of one setting say."""
    where = f"{setting.kind}, {setting.ranks} rank{'s' if setting.ranks > 1 else ''}"
    peers = [name for name in taken if name not in ("ours", "raw", "loads")]
    first, stall = (_figure(taken, "ours", key, where, "ms", limit=1.0) for key in ("first", "stall"))
    found = [first, stall]
    found += [
        _figure(taken, name, "prepare", where, "s", named=name)
        for name in ("ours", *peers)
        if _median(taken, name, "prepare") > 1e-3
    ]
    exposed = {name: _median(taken, name, "exposed") for name in peers}
    if exposed:
        best = min(exposed, key=lambda name: exposed[name])
        if "dcp.async_save" in exposed:
            found.append(_exposed(taken, where, "dcp.async_save", 0.2, "against dcp"))
        found.append(_exposed(taken, where, best, 1.0, "against the best"))
    raw_write, limit = _median(taken, "raw", "write"), DURABLE[setting.kind]
    found.append(_figure(taken, "ours", "first exposed", where, "s"))
    found.append(
        _figure(taken, "ours", "durable", where, "s", peer=("write + fsync", raw_write), ratio_limit=limit)
    )
    loads = [("read", _median(taken, "loads", "read")), ("dcp.load", _median(taken, "loads", "dcp"))]
    found.append(_figure(taken, "loads", "load", where, "s", peer=loads[0], ratio_limit=1.15))
    found.append(_figure(taken, "loads", "again", where, "s", peer=loads[1]))
    share = setting.nbytes / setting.ranks
    found.append(_figure(taken, "ours", "memory", where, "x state", scale=1 / share, limit=2.1))
    for name in peers:
        found += [
            _figure(taken, name, key, where, "s", named=name) for key in ("stall", "exposed", "durable")
        ]
        found.append(_figure(taken, name, "memory", where, "x state", scale=1 / share, named=name))
    found += [_figure(taken, "raw", key, where, "s", named="raw") for key in ("write", "direct")]
    return found


TITLES = {
    "first": "stall, first save",
    "stall": "stall",
    "prepare": "prewarming",
    "first exposed": "exposed cost, first save",
    "exposed": "exposed cost",
    "durable": "until durable",
    "load": "first load",
    "again": "second load",
    "memory": "peak memory",
    "write": "write + fsync",
    "direct": "the same with O_DIRECT",
}


def _figure(
    taken: Samples,
    name: str,
    key: str,
    where: str,
    unit: str,
    *,
    scale: float | None = None,
    limit: float | None = None,
    peer: tuple[str, float] | None = None,
    ratio_limit: float | None = None,
    named: str = "",
) -> Figure:
    factor = scale or (1e3 if unit == "ms" else 1.0)
    values = sorted(sample[key] * factor for sample in taken[name])
    title = f"{where}: {TITLES[key]}" + (f", {named}" if named else "")
    other, other_value = peer or (None, None)
    spread = (values[0], values[-1]) if len(values) > 1 else None
    return Figure(title, median(values), unit, "lower", other, other_value, limit, ratio_limit, spread)


def _exposed(taken: Samples, where: str, peer: str, limit: float, note: str) -> Figure:
    other = (peer, _median(taken, peer, "exposed"))
    return _figure(taken, "ours", "exposed", where, "s", peer=other, ratio_limit=limit, named=note)


def _median(taken: Samples, name: str, key: str) -> float:
    return median(sample[key] for sample in taken[name])


def planning(worlds: list[int], tensors: int, many: list[int]) -> tuple[list[Figure], dict[str, Any]]:
    """Planning against ranks, DCP's global plan where that takes no minutes; and against tensors."""
    found, curve = [], dict[str, Any](ranks=worlds, tensors=tensors, ms={})
    times = {world: plan_times(world, tensors, world <= 512) for world in worlds}
    for key in ("first save", "save", "commit", "load", "dcp, global plan"):
        curve["ms"][key] = [times[world][key] for world in worlds]
        for world in worlds:
            title = f"planning, {world} ranks: {key}"
            value = times[world][key]
            limit = None
            if key == "save" and world == worlds[-1]:  # flat, up to a timer's noise
                limit = max(1.0, 2 * (times[worlds[0]][key] or 0.0))
            found.append(Figure(title, value, "ms", "lower", limit=limit))
    for count in many:
        taken = plan_times(8, count, False)
        found += [
            Figure(f"planning, {count} tensors, 8 ranks: {key}", taken[key], "ms")
            for key in ("first save", "save")
        ]
    return found, curve


def draw(curve: dict[str, Any], path: Path) -> None:
    """Planning against ranks."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, values in curve["ms"].items():
        axes.plot(curve["ranks"], [v if v else float("nan") for v in values], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks")
    axes.set_ylabel("ms on one rank")
    axes.set_title(f"Planning with {curve['tensors']} tensors on every rank")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def options() -> argparse.Namespace:
    made = parser("What does a save cost the training, and how long does it take?")
    made.add_argument("--folder", type=Path, help="a folder on the disk that is measured (default: the cwd)")
    made.add_argument("--mib", type=int, help="MiB of state (1024; 32 with --quick)")
    made.add_argument("--tensors", type=int, help="how many small tensors (5000; 400 with --quick)")
    made.add_argument("--rounds", type=int, help="turns of each (3; 1 with --quick)")
    made.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks (1 2; 1 with --quick)")
    made.add_argument("--only", nargs="+", choices=list(SAVERS), help="these ways to save, beside ours")
    made.add_argument("--png", type=Path, help="draw planning against ranks here (needs matplotlib)")
    args = made.parse_args()
    defaults = {"mib": 32, "tensors": 400, "rounds": 1, "ranks": [1]} if args.quick else {}
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking CUDA itself would spoil the fork
    device = "cuda" if torch.cuda.is_available() else "cpu"
    full = {"mib": 1024, "tensors": 5000, "rounds": 3, "ranks": [1] if device == "cuda" else [1, 2]}
    defaults = full | defaults | {"device": device}
    for key, value in defaults.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    if min(args.mib, args.rounds, *args.ranks) < 1 or args.tensors < 4:
        made.error("--mib, --rounds and --ranks are at least 1, --tensors at least 4")
    return args


def main() -> int:
    args = options()
    torch.set_num_threads(1)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(dir=args.folder or Path.cwd()) as folder:
        for ranks in args.ranks:
            names = [
                name
                for name, (package, made) in SAVERS.items()
                if installed(package)
                and ranks <= made.ranks
                and (name == "ours" or args.only is None or name in args.only)
                and not (args.quick and name in OWN_PROCESSES)
            ]
            for kind in ("large", "small"):
                step_s, size = 0.02 if args.quick else 0.1, args.mib * MiB
                setting = Setting(kind, size, args.tensors, ranks, step_s, Path(folder), args.device)
                figures += figures_of(setting, measure(setting, names, args.rounds))
    absent = [name for name, (package, _) in SAVERS.items() if not installed(package)]
    figures += [Figure(f"{name}: not installed", None, "s") for name in absent]
    worlds, many = ([8, 64], [200]) if args.quick else ([8, 64, 512, 4096], [1000, 10_000, 100_000])
    planned, curve = planning(worlds, 20 if args.quick else 100, many)
    if args.png is not None:
        draw(curve, args.png)
    return finish([*figures, *planned], args)


if __name__ == "__main__":
    sys.exit(main())
