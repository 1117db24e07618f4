"""Run one of the JPEG variants in this process, and print what it took as one line of JSON.

    python benchmarks/jpeg_run.py VARIANT --folder FOLDER --later 6 [--work 0.5]

benchmarks/input.py runs it: each measurement is a fresh process.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jpeg_variants import VARIANTS, Job, Open
from memory import PeakMemory

ABSENT = 4
"""Exit code: what the variant needs is not installed."""


def main() -> int:
    args = _arguments()
    torch.set_num_threads(1)  # an image is no work for two: threads and workers take one each
    files = sorted(map(str, args.folder.glob("*.jpg")))
    epochs = 1 + args.later + 1  # the first, those that are timed, and one to watch the memory in
    job = Job(files, args.batch, args.size, args.threads, epochs, torch.device(args.device))
    start = time.perf_counter()
    try:
        open_ = VARIANTS[args.variant][0](job)
    except ImportError as error:
        print(error, file=sys.stderr)
        return ABSENT
    imports = time.perf_counter() - start
    found = start_up(job, open_, args.work) if args.work else run(job, open_, args.later)
    found["imported_s"] = imports + found["first_batch_s"]
    print(json.dumps(found))
    return 0


def run(job: Job, open_: Open, later: int) -> dict[str, Any]:
    """The first batch, the first epoch and the later ones, from the constructor's call."""
    labels: list[Tensor] = []
    shape: list[int] = []
    each = len(job.files) // job.batch

    def take(batches: Iterator[tuple[Tensor, Tensor]], count: int) -> float:
        for _ in range(count):
            images, label = next(batches)
            images = images.to(job.device, non_blocking=True)
            labels.append(label.flatten().clone())
            shape[:] = images.shape
        if job.device.type == "cuda":
            torch.cuda.synchronize(job.device)
        return time.perf_counter()

    began = time.perf_counter()
    batches = open_()
    first_batch = take(batches, 1)
    first_epoch = take(batches, each - 1)
    end = take(batches, each * later)
    with PeakMemory() as memory:
        take(batches, each)
    _check(labels, len(job.files))
    return {
        "first_batch_s": first_batch - began,
        "first_rate": len(job.files) / (first_epoch - began),
        "later_rate": later * len(job.files) / (end - first_epoch) if later else None,
        "memory": memory.nbytes,
        "images": sum(map(len, labels)),
        "shape": shape,
    }


def start_up(job: Job, open_: Open, seconds: float) -> dict[str, Any]:
    """The time to the first batch that does not hide behind what a script does before its first step.

    The work is a fixed amount, timed alone first: a start-up that takes the cores away from it pays too.
    """
    step = _model_building()
    began = time.perf_counter()
    steps = 0
    while time.perf_counter() - began < seconds:
        step()
        steps += 1
    alone = time.perf_counter() - began
    began = time.perf_counter()
    batches = open_()
    for _ in range(steps):
        step()
    next(batches)[0].to(job.device)
    return {"first_batch_s": time.perf_counter() - began - alone, "work_s": alone}


def _model_building() -> Callable[[], object]:
    """A millisecond or two of what a script does there: weights are drawn at random, on one core."""
    weight = torch.empty(2**18)
    return lambda: torch.nn.init.normal_(weight)


def _check(labels: list[Tensor], count: int) -> None:
    """Each epoch must have held each photograph once."""
    for number, epoch in enumerate(torch.cat(labels).cpu().view(-1, count)):
        if not torch.equal(epoch.sort().values, torch.arange(count)):
            raise SystemExit(f"epoch {number} did not give each of the {count} photographs once")


def _arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("variant", choices=VARIANTS)
    options.add_argument("--folder", type=Path, required=True, help="with the JPEG files")
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--size", type=int, default=224)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--device", default="cpu")
    options.add_argument("--later", type=int, default=1, help="epochs after the first")
    options.add_argument("--work", type=float, help="measure the start-up beside this many seconds of work")
    return options.parse_args()


if __name__ == "__main__":
    sys.exit(main())
