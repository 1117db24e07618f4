"""Does the way of a batch to the GPU hide behind the step?

    python benchmarks/gpu_input.py [--quick] [--json PATH] [--device cuda] [--budget SECONDS]

A step of 20 ms of matrix products takes a batch of 256 photographs of 224 x 224, 39 MB of random bytes that
are in host memory already, and normalises them to bf16 on the device. Only how they come there differs:
copied in the loop from pageable or from page-locked memory, by DataLoader's workers and its pinning thread,
by a prefetcher like timm's over that (the next batch is copied and normalised on a side stream while the
loop has the one before), or by DeviceLoader. Every batch's sum is compared with that of the same batch made
before: a copy that came too late or too early ends the run. A peer that fails is reported with its error.

"exposed" is how long the loop's stream had nothing of the step to do: from one step's last kernel to the
moment at which the stream has the next batch, by two CUDA events a step; medians. A step's time is the mean
over a run, beside the same steps over batches that stay on the device. The goal is 1 % of the step for
both. It takes about 40 s.
"""

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import ceilings
import overlapkit as ok
from budget import Budget, add_budget, not_measured, said
from harness import Figure, Measurement, alternate, finish, parser, returned_seconds, time_figure, timer_for
from marks import mark, seconds_between
from overlapkit.device import as_device

STEP_S, GOAL = 0.020, 0.01
DISTINCT = 4  # batches, taken in turns: together far larger than any cache
SETTLE = 5  # steps of each run that are not timed: the loaders fill their queues
ALONE = "compute only"
OURS = ("ours", "ours over DataLoader")

Batches = Callable[[], Iterable[Tensor]]


class Step:
    """What consumes a batch: its sum, and products of random matrices for so many seconds.

    Attributes:
        sums: Of the batches since the run began, on the device.
    """

    def __init__(self, device: torch.device, seconds: float, side: int) -> None:
        self.device = device
        self.left, self.right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
        self.out = torch.empty_like(self.left)
        self.sums: list[Tensor] = []
        timer = timer_for(device)
        once = median(timer(lambda: self.multiply(20)) for _ in range(5)) / 20
        self.times = max(1, round(seconds / once))

    def multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self.left, self.right, out=self.out)

    def __call__(self, batch: Tensor) -> None:
        self.sums.append(batch.sum(dtype=torch.float32))
        self.multiply(self.times)


class Loop:
    """A run of steps over one way to bring batches; calling it gives the mean seconds of a step.

    Attributes:
        exposed: Seconds, of every timed step of every run.
    """

    def __init__(self, step: Step, batches: Batches, expected: list[Tensor]) -> None:
        self.step, self.batches, self.expected = step, batches, torch.stack(expected)
        self.exposed: list[float] = []

    def __call__(self) -> float:
        device, steps = self.step.device, []
        self.step.sums.clear()
        for batch in self.batches():
            begin = mark(device)
            self.step(batch)
            steps.append((begin, mark(device)))
        self._compare(torch.stack(self.step.sums))
        ends = [end for _, end in steps[SETTLE:]]
        self.exposed += [seconds_between(end, steps[SETTLE + 1 + i][0]) for i, end in enumerate(ends[:-1])]
        return seconds_between(ends[0], ends[-1]) / (len(ends) - 1)

    def _compare(self, sums: Tensor) -> None:
        wrong = (sums != self.expected[torch.arange(len(sums)) % DISTINCT]).nonzero().flatten().tolist()
        if wrong:
            raise RuntimeError(f"steps {wrong} of {len(sums)} did not get the batch that was meant for them")


class Fresh(Dataset[Tensor]):
    """Item i is a copy of its batch, as a batch that was just read is: workers cannot share it twice."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index].clone()


class Normalise:
    """Bytes (B, 3, H, W) to bf16, by ImageNet's means and deviations; runs where the batch is."""

    def __init__(self, device: torch.device) -> None:
        mean, deviation = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        self.mean, self.deviation = (
            torch.tensor(of, device=device).mul(255).bfloat16().view(1, 3, 1, 1) for of in (mean, deviation)
        )

    def __call__(self, batch: Tensor) -> Tensor:
        return batch.to(torch.bfloat16).sub_(self.mean).div_(self.deviation)


def moved(source: Iterable[Tensor], device: torch.device, normalise: Normalise) -> Iterator[Tensor]:
    """In the loop; without waiting for it where the source is page-locked."""
    for batch in source:
        yield normalise(batch.to(device, non_blocking=True))


def prefetched(source: Iterable[Tensor], device: torch.device, normalise: Normalise) -> Iterator[Tensor]:
    """On a side stream, one batch ahead."""
    side, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    ahead: Tensor | None = None
    for batch in source:
        with torch.cuda.stream(side):
            following = normalise(batch.to(device, non_blocking=True))
        if ahead is not None:
            yield ahead
        current.wait_stream(side)
        following.record_stream(current)
        ahead = following
    if ahead is not None:
        yield ahead


def ways(
    batches: list[Tensor], count: int, device: torch.device, normalise: Normalise
) -> tuple[dict[str, Batches], ok.DeviceLoader]:
    """Each way by name, and our loader."""
    sequence = [batches[i % DISTINCT] for i in range(count)]
    there = [batch.to(device) for batch in batches]
    on_gpu = device.type == "cuda"

    def workers(pin: bool) -> DataLoader[Any]:
        return DataLoader(
            Fresh(sequence), batch_size=None, num_workers=2, pin_memory=pin, persistent_workers=True
        )

    ours = ok.DeviceLoader(sequence, device, transform=normalise)
    over = ok.DeviceLoader(workers(False), device, transform=normalise)
    found: dict[str, Batches] = {
        ALONE: lambda: (normalise(there[i % DISTINCT]) for i in range(count)),
        "pageable": lambda: moved(sequence, device, normalise),
    }
    if on_gpu:
        pinned = [batch.pin_memory() for batch in batches]
        locked = [pinned[i % DISTINCT] for i in range(count)]
        for_timm = workers(True)
        found["pinned"] = lambda: moved(locked, device, normalise)
        found["timm-style prefetcher"] = lambda: prefetched(for_timm, device, normalise)
    loader = workers(on_gpu)
    found["DataLoader"] = lambda: moved(loader, device, normalise)
    return found | {"ours": lambda: ours, "ours over DataLoader": lambda: over}, ours


def measure(quick: bool, device: torch.device, budget: Budget) -> list[Figure]:
    small = device.type == "cpu"
    images, side, seconds = (4, 64, 0.002) if small else (256, 4096, STEP_S)
    steps, rounds = (6, 2) if quick else (40, 6)
    batches = [torch.randint(256, (images, 3, 224, 224), dtype=torch.uint8) for _ in range(DISTINCT)]
    normalise = Normalise(device)
    expected = [normalise(batch.to(device)).sum(dtype=torch.float32) for batch in batches]
    found, ours = ways(batches, SETTLE + 1 + steps, device, normalise)
    step = Step(device, seconds, side)
    loops = {name: Loop(step, way, expected) for name, way in found.items()}
    failed = {name: why for name, loop in loops.items() if (why := why_not(loop, budget.left() / 3))}
    turns: dict[str, Callable[[], object]] = {n: loop for n, loop in loops.items() if n not in failed}
    limit_s = 0.8 * budget.left()
    if ALONE in failed or len(turns) == 1:
        return [failure(name, why) for name, why in failed.items()]
    took = alternate(turns, rounds=rounds, warmup=0, timer=returned_seconds, limit_s=limit_s)
    rows = [time_figure(f"step, {ALONE}", took[ALONE])]
    for name in turns:
        if name != ALONE:
            rows += figures_of(name, loops[name], took)
    rows += [failure(name, why) for name, why in failed.items()]
    if small:
        absent = ("pinned", "timm-style prefetcher")
        return rows + [Figure(f"exposed, {name}: needs a GPU", None, "ms") for name in absent]
    return rows + budget.attempt(0.0, "copies of ours", lambda: copy_rate(ours, device))


def why_not(loop: Loop, seconds: float) -> str | None:
    """A run that is not counted: what it raises or that it hangs, which must not cost the others' figures."""
    try:
        with Budget(seconds).ended():
            loop()
    except Exception as error:
        traceback.print_exc()
        return said(error)
    loop.exposed.clear()
    return None


def failure(name: str, why: str) -> Figure:
    """In place of what could not be measured; of ours it is a missed goal."""
    title = f"exposed, {name}: {why}"
    return not_measured(title, "error") if name in (ALONE, *OURS) else Figure(title, None, "ms")


def figures_of(name: str, loop: Loop, took: dict[str, Measurement]) -> list[Figure]:
    """What was exposed, and the step beside that which has its batch."""
    alone, ours = took[ALONE], name in OURS
    limit = 1e3 * GOAL * alone.median if ours else None
    exposed = Figure(f"exposed, {name}", 1e3 * median(loop.exposed), "ms", better="lower", limit=limit)
    return [exposed, time_figure(f"step, {name}", took[name], alone, ratio_limit=1 + GOAL if ours else None)]


def copy_rate(ours: ok.DeviceLoader, device: torch.device) -> list[Figure]:
    """What our copies reach beside the steps, and what a copy reaches alone."""
    torch.cuda.synchronize(device)
    copies = [span for span in ours.timings() if span.name == "copy" and span.bytes]
    rate = median(span.bytes / (span.end - span.start) for span in copies if span.bytes)
    moves, sizes = ceilings.copies(2**28, device)
    name = "host to device"
    took = alternate({name: moves[name]}, rounds=5, timer=timer_for(device))
    alone = sizes[name] / took[name].median / 1e9
    return [Figure("copies of ours, beside the steps", rate, "GB/s", "higher", "a copy alone", alone)]


def main() -> int:
    options = parser("Does the way of a batch to the GPU hide behind the step?")
    add_budget(options)
    args = options.parse_args()
    budget = Budget(args.budget)
    return finish(measure(args.quick, as_device(args.device), budget), args)


if __name__ == "__main__":
    sys.exit(main())
