"""What does StepMeter cost a step?

    python benchmarks/meter.py [--quick] [--json PATH] [--device cpu] [--budget SECONDS]

The meter's own hooks are called directly, in a step whose model and optimizer do nothing: comparing a real
step with and without the meter cannot resolve some tens of microseconds on a machine that others use (it is
shown beside; on a GPU, where its step takes about as long as the goal's, its goal is 0.5 %, too). Around the
hooks the components publish what they do in a step of DDP with eight buckets: a batch that was waited for, a
copy, the buckets and their tail. Every round takes the same steps; of each step the least over the rounds
counts, as in timeit (what others take comes on top); of these the mean.

"always on" are steps that are not looked at closely; the goal is 0.2 % of a step of 20 ms. "all" are 1009
steps: those that are looked at closely, with 32 blocks recomputed, and the one whose 2,000 operators are
counted; the goal is 0.5 %. Steps are worked out when somebody reads them: "a report" is that, for the last
hundred. Synchronisations are counted on a GPU, where one is an error.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import overlapkit as ok
from budget import Budget, add_budget
from harness import Figure, alternate, finish, parser, returned_seconds, time_figure
from overlapkit.device import as_device
from overlapkit.span import Span, SpanLog

STEP_S = 0.020
BUCKETS, BLOCKS, OPERATORS = 8, 32, 2_000
FIRST, LAST = 16, 1025  # steps of a round that are timed
COUNTED = (10, 1009)  # steps whose operators are counted


class Component:
    """Publishes spans, as the loader and the wrappers do."""

    def __init__(self) -> None:
        self.log = SpanLog()

    def timings(self) -> list[Span]:
        return self.log.take()

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class HooksOnly:
    """Steps of what torch would call of a meter; calling it takes a round of them.

    Args:
        device: Of the parameters.
        measured: Whether there is a meter.
        close: Whether it may look closely, and there is something to see.
    """

    def __init__(self, device: torch.device, measured: bool, close: bool) -> None:
        self.model = nn.ModuleList(nn.Linear(2, 2) for _ in range(BLOCKS)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader, self.wrapper = Component(), Component()
        self.model.__dict__["timings"] = self.wrapper.timings
        self.output = nn.Parameter(torch.ones(3, device=device))
        self.batch = torch.ones(2, 2, device=device)
        self.close, self.index = close, 0
        self.looked_at = {*range(8), *range(0, LAST, 16), *COUNTED}
        self.meter = ok.StepMeter(self.model, self.optimizer, self.loader) if measured else None

    def __call__(self) -> list[float]:
        """The seconds of each step, after the first ones."""
        with self.seldom():
            return [self.step() for _ in range(LAST)][FIRST:]

    @contextmanager
    def seldom(self) -> Iterator[None]:
        """No step is looked at closely, where none is to be."""
        if self.close:
            yield
            return
        if self.meter is not None:
            self.meter._closeup._count_at = LAST
        with (
            patch("overlapkit.measure.closeup.looks_closely", lambda step: False),
            patch("overlapkit.measure.memory.looks_closely", lambda step: False),
        ):
            yield

    def step(self) -> float:
        """One step: the seconds of what the meter does in it, and of what it is called for."""
        loss = (self.output * 2).sum()
        self.publish()
        around: AbstractContextManager[None] = nullcontext() if self.meter is None else self.meter.step(4096)
        start = time.perf_counter()
        with around:
            for before in self.model._forward_pre_hooks.values():
                before(self.model, ())
            for after in self.model._forward_hooks.values():
                after(self.model, (), loss)
            if self.meter is not None:
                self.meter._phases._gradient_hook(None)
            if self.close and self.index in self.looked_at:
                self.recompute()
            for begin in self.optimizer._optimizer_step_pre_hooks.values():
                begin(self.optimizer, (self.optimizer,), {})
            for end in self.optimizer._optimizer_step_post_hooks.values():
                end(self.optimizer, (self.optimizer,), {})
        took = time.perf_counter() - start
        self.index += 1
        return took

    def recompute(self) -> None:
        """Forward again, inside backward; and a step's operators, where they are counted."""
        with torch.no_grad():
            for block in self.model:
                block(self.batch)
            for _ in range(OPERATORS if self.index in COUNTED else 0):
                self.batch.add_(0)

    def publish(self) -> None:
        """A wait for the batch, its copy, the buckets and their tail."""
        now = time.perf_counter_ns()
        self.loader.log.add(Span("input", "wait", now - 9_000, now, exposed=True))
        self.loader.log.add(Span("transfer", "copy", now - 5_000, now, 1 << 20))
        for number in range(BUCKETS):
            name, start = f"all_reduce {number}", now + number
            self.wrapper.log.add(
                Span("communication", name, start, start + 1, 1 << 20, ready=now, parameters=("w", "b"))
            )
        self.wrapper.log.add(Span("communication", "all_reduce tail", now, now + 9, exposed=True))


class RealStep:
    """Steps of a small model, on a GPU about as long as the goal's; calling it gives the mean seconds."""

    def __init__(self, device: torch.device, measured: bool) -> None:
        torch.manual_seed(0)
        width, layers, rows = (4096, 12, 8192) if device.type == "cuda" else (384, 8, 256)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        parts = (nn.Linear(width, width, device=device, dtype=dtype) for _ in range(layers))
        self.model, self.rows = nn.Sequential(*parts), rows
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.x = torch.randn(rows, width, device=device, dtype=dtype)
        self.meter = ok.StepMeter(self.model, self.optimizer) if measured else None

    def __call__(self) -> float:
        start = time.perf_counter()
        for _ in range(10):
            with nullcontext() if self.meter is None else self.meter.step(self.rows):
                self.model(self.x).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        if self.x.is_cuda:
            torch.cuda.synchronize(self.x.device)
        return (time.perf_counter() - start) / 10


def hooks(
    name: str, device: torch.device, close: bool, rounds: int, share: float, limit_s: float = math.inf
) -> Figure:
    """The cost of the hooks in one setting: with them, less the same calls without."""
    times: dict[str, list[list[float]]] = {"ours": [], "bare": []}

    def round_of(label: str) -> float:
        times[label].append(HooksOnly(device, label == "ours", close)())
        return fmean(times[label][-1])

    turns: dict[str, Callable[[], object]] = {label: partial(round_of, label) for label in times}
    alternate(turns, rounds=rounds, warmup=0, timer=returned_seconds, limit_s=limit_s)
    least = {label: [min(step) for step in zip(*all, strict=True)] for label, all in times.items()}
    added = fmean(least["ours"]) - fmean(least["bare"])
    return Figure(name, added * 1e6, "us", better="lower", limit=share * STEP_S * 1e6)


def syncs(device: torch.device) -> Figure:
    """How often the meter makes the host wait for the device; the first time is an error there."""
    loop = HooksOnly(device, measured=True, close=True)
    value = None
    if device.type == "cuda":
        loop()  # what happens once
        torch.cuda.set_sync_debug_mode("error")
        try:
            loop()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        value = 0.0
    limit = None if value is None else 0.0
    return Figure("host synchronisations of the meter", value, "a step", better="lower", limit=limit)


def report(device: torch.device, rounds: int) -> Figure:
    """A report over a hundred steps that nobody has read before."""
    loop = HooksOnly(device, measured=True, close=False)

    def seconds() -> float:
        with loop.seldom():
            for _ in range(100):
                loop.step()
        start = time.perf_counter()
        assert loop.meter is not None
        loop.meter.report()
        return time.perf_counter() - start

    took = alternate({"ours": seconds}, rounds=rounds, timer=returned_seconds)
    return time_figure("a report over 100 steps", took["ours"], unit="ms")


def real_step(device: torch.device, rounds: int, limit_s: float) -> Figure:
    """A step of a model with the meter, beside one without."""
    real: dict[str, Callable[[], object]] = {
        "with the meter": RealStep(device, True),
        "without": RealStep(device, False),
    }
    took = alternate(real, rounds=rounds, timer=returned_seconds, limit_s=0.9 * limit_s)
    limit = 1.005 if device.type == "cuda" else None
    return time_figure("a real step", took["with the meter"], took["without"], ratio_limit=limit)


def main() -> int:
    options = parser("What does the meter cost a step?")
    add_budget(options)
    args = options.parse_args()
    budget, device = Budget(args.budget), as_device(args.device, "--device")
    rounds = 5 if args.quick else 25
    parts: dict[str, Callable[[], Figure]] = {
        "always on": lambda: hooks("always on", device, False, rounds, 0.002, budget.left() / 4),
        "all, on average": lambda: hooks("all, on average", device, True, rounds, 0.005, budget.left() / 3),
        "a report": lambda: report(device, rounds),
        "synchronisations": lambda: syncs(device),
        "a real step": lambda: real_step(device, 2 * rounds, budget.left()),
    }
    figures = []
    for name, part in parts.items():  # on a GPU one that fails must not cost the others
        figures += budget.attempt(0.0, name, lambda part=part: [part()])  # type: ignore[misc]
    return finish(figures, args)


if __name__ == "__main__":
    sys.exit(main())
