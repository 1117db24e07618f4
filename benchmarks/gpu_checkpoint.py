"""What does saving 10 GB of a GPU's state cost the training beside it?

    python benchmarks/gpu_checkpoint.py [--quick] [--json PATH] [--budget SECONDS] [--folder DIR]

The state is parameters under AdamW with both moments, of random values. Ours and
torch.distributed.checkpoint's async_save, as it comes and with one stager that it keeps, save twice in a
loop of steps; the second save is reported, as every later one costs as much, and the stall of our first
beside it. Where no time is left for a second the first is reported, and a figure says so. A step computes for
as long as a model of that size takes for some 32,000 tokens, 0.4 s for 10 GB: that is what a copy of the
state has to hide behind.

Stall is how long the call took and what the optimizer's step then waited. Exposed is that and what the
steps until the save was durable took longer than those before it ("slowdown" is the difference). Goals: a
stall of less than 5 ms, and a tenth of what dcp.async_save exposes.

State is scaled down to what fits: into the GPU, into memory, and onto the disk in the time that there is.
Where /dev/shm holds more of it than the disk takes, files go there; the first figure says how much it was,
and where. About 85 s on one H200.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import ceilings
from budget import Budget, add_budget
from harness import Figure, alternate, finish, parser, timer_for
from overlapkit.device import as_device
from savers import SAVERS, Saver
from saving import Setting, build, exposed, work

GB = 10**9
STATE, STEP_S = 10 * GB, 0.4
TENSORS = 800  # 200 parameters, each with two moments and a step
STALL_MS, SHARE = 5.0, 0.1
OURS, PEER = "ours", "dcp.async_save"
WAYS = (OURS, PEER, "dcp.async_save, one stager")
SAVES = 2 * len(WAYS)
STEPS_S = 10.0
"""About what one way takes beside writing: to build the state, to prepare, and the steps around two saves."""
SHM = Path("/dev/shm")


class Place(NamedTuple):
    """Where to save, and how many bytes."""

    folder: Path
    nbytes: int
    why: str


def main() -> int:
    options = parser("What does saving 10 GB of a GPU's state cost the training beside it?")
    options.add_argument(
        "--folder", type=Path, help="on the disk that is measured (default: the temporary one)"
    )
    add_budget(options)
    args = options.parse_args()
    device, budget = as_device(args.device), Budget(args.budget)
    wanted = STATE // 200 if args.quick or device.type == "cpu" else STATE
    place = choose(args.folder or Path(tempfile.gettempdir()), wanted, device, min(budget.left(), 120.0))
    step_s = max(0.02, STEP_S * place.nbytes / STATE)
    folders = tempfile.TemporaryDirectory(
        dir=place.folder, prefix="gpu-checkpoint-", ignore_cleanup_errors=True
    )  # a save that the budget ended may still write
    with folders as folder, one_rank():
        setting = Setting("small", place.nbytes, TENSORS, 1, step_s, Path(folder), str(device))
        taken: dict[str, dict[str, float]] = {}
        figures = [Figure(f"state, {place.why}", place.nbytes / GB, "GB")]
        for name in WAYS:
            longest = max((sample["seconds"] for sample in taken.values()), default=0.0)
            needed = longest / 2 if name == PEER else longest  # without it there is nothing to compare with

            def one(name: str = name) -> list[Figure]:
                taken[name] = measure(setting, name, Path(folder), budget)
                return []

            figures += budget.attempt(needed, name, one)
        return finish([*figures, *figures_of(taken), *staging_rate(taken, device)], args)


def measure(setting: Setting, name: str, folder: Path, budget: Budget) -> dict[str, float]:
    """Two saves by one way: stall and exposed seconds of the second, of the first where no time is left."""
    began = time.perf_counter()
    compute, state = work(setting), build(setting)
    randomise(state)
    saver: Saver = SAVERS[name][1](folder, state)
    start = time.perf_counter()
    saver.prepare()
    prepared = time.perf_counter() - start
    start = time.perf_counter()
    first, cost = exposed(compute, saver)
    stall, saves = first, 1
    took = time.perf_counter() - start
    if budget.left() > (3 if name == OURS else 1) * took:  # after ours the peer has to save, too
        stall, cost = exposed(compute, saver)
        saves = 2
    found = {"first": first, "stall": stall, "exposed": cost, "prepare": prepared, "saves": float(saves)}
    if name == OURS:
        found["staging"] = copy_rate_of(saver)
    saver.close()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    if setting.device != "cpu":
        del state, saver
        torch.cuda.empty_cache()
    return found | {"seconds": time.perf_counter() - began}


def randomise(state: dict[str, Any]) -> None:
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.normal_()
            moments = state["optimizer"].state[parameter]
            moments["exp_avg"].normal_()
            moments["exp_avg_sq"].normal_().square_()


def copy_rate_of(saver: Any) -> float:
    """GB/s of our copies to the host beside the steps; not a number where none was timed."""
    rates = [
        span.bytes / (span.end - span.start)
        for span in saver.checkpointer.timings()
        if span.name == "stage" and span.bytes and span.end > span.start
    ]
    return median(rates) if rates else float("nan")


def figures_of(taken: dict[str, dict[str, float]]) -> list[Figure]:
    """Ours beside each peer, stall, slowdown and both together."""
    peer = taken.get(PEER)
    found = []
    for name, sample in taken.items():
        ours = name == OURS
        stall = 1e3 * sample["stall"]
        found.append(Figure(f"stall, {name}", stall, "ms", "lower", limit=STALL_MS if ours else None))
        slower = 1e3 * (sample["exposed"] - sample["stall"])
        found.append(Figure(f"slowdown, {name}", slower, "ms", "lower"))
        beside = (PEER, 1e3 * peer["exposed"] if peer else None) if ours else (None, None)
        cost, goal = 1e3 * sample["exposed"], SHARE if ours else None
        found.append(Figure(f"exposed, {name}", cost, "ms", "lower", *beside, ratio_limit=goal))
        if sample["saves"] < 2:
            found.append(Figure(f"all of {name} are of its first save, for want of time", 1, "save"))
    if OURS in taken:
        first = 1e3 * taken[OURS]["first"]
        found.append(Figure("stall of the first save, ours", first, "ms", "lower", limit=STALL_MS))
        found.append(Figure("what ours prepared ahead of it", taken[OURS]["prepare"], "s", "lower"))
    return found


def staging_rate(taken: dict[str, dict[str, float]], device: torch.device) -> list[Figure]:
    """What our copies reach beside the steps, and what a copy reaches alone."""
    rate = taken.get(OURS, {}).get("staging", float("nan"))
    if device.type != "cuda" or rate != rate:
        return []
    moves, sizes = ceilings.copies(2**28, device)
    name = "device to host"
    took = alternate({name: moves[name]}, rounds=5, timer=timer_for(device))
    alone = sizes[name] / took[name].median / GB
    return [Figure("copies of ours, beside the steps", rate, "GB/s", "higher", "a copy alone", alone)]


def choose(folder: Path, wanted: int, device: torch.device, seconds: float) -> Place:
    """The folder that takes most of the state, and how much it takes.

    A folder holds two saves at a time. The GPU holds gradients beside the state. In memory there are
    page-locked buffers or what dcp stages and, with /dev/shm, the files.
    """
    if device.type == "cuda":
        wanted = min(wanted, int(torch.cuda.mem_get_info(device)[0] * 0.6))
    wanted = min(wanted, available_memory() // 3)
    rate = write_rate(folder)
    writing = max(0.2 * seconds, seconds - STEPS_S * len(WAYS))
    disk = min(wanted, int(shutil.disk_usage(folder).free / 2.5), int(rate * writing / SAVES))
    shm = 0
    if SHM.is_dir() and os.access(SHM, os.W_OK):
        shm = min(wanted, int(shutil.disk_usage(SHM).free / 2.5), available_memory() // 5)
    if shm > disk:
        return Place(SHM, shm, f"in {SHM}, for the disk writes {rate / GB:.2f} GB/s")
    return Place(folder, disk, f"on a disk that writes {rate / GB:.2f} GB/s")


def write_rate(folder: Path, nbytes: int = 2**28) -> float:
    """Bytes a second of writing and syncing a file of random bytes."""
    data = memoryview(os.urandom(2**24))
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(nbytes // len(data)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return nbytes / (time.perf_counter() - start)


def available_memory() -> int:
    """Bytes that Linux says can be had."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise SystemExit("/proc/meminfo has no MemAvailable: this benchmark needs Linux")


@contextmanager
def one_rank() -> Iterator[None]:
    """The process group without which async_save warns at every call."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
