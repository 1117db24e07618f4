"""Does reading hide behind the step? A consumer of 20 ms, a producer of 15 ms, one batch after another.

The producer is one matrix product on one core, which releases the GIL; its 5 MB result is the batch. The
consumer waits (as for a GPU), computes on the other core, or runs Python, which holds the GIL. Each is a
fixed amount of work, so that what one takes from the other counts. The goal is the time of the slower of the
two, as measured in the same pass: what each thread computed by its own CPU clock (a waiting consumer: by the
wall's), for the speed of a shared machine drifts by more than the goal allows within seconds. "two threads"
is what two threads that do the two and hand nothing over come to: what the cores and the GIL allow a reader
that is a thread. While another thread holds the GIL, Python makes one that wants it wait 5 ms
(sys.getswitchinterval), here once a batch; beside our reader it is 1 ms.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import median, quantiles
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import overlapkit as ok
from harness import Figure, Measurement, alternate, returned_seconds, time_figure, torch_threads

CONSUMER_S, PRODUCER_S = 0.020, 0.015
GOAL = 1.03
SLOWER = "the slower alone"
WAITS = "consumer waits"
AHEAD = 4
"""Batches behind a pass's last step, so that at its end something is still read beside it."""

Work = Callable[[], Any]


class Produced(Dataset[Tensor]):
    """Item i is a batch that takes `produce` to make."""

    def __init__(self, produce: Work, length: int) -> None:
        self.produce, self.length = produce, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.produce()

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))


def measure(quick: bool, device: torch.device) -> list[Figure]:
    """All figures of this part."""
    with torch_threads(1):  # consumer and producer have a core each
        produce = sized(product, PRODUCER_S)
        steps, rounds = (6, 2) if quick else (10, 40)
        rows = []
        for name, consume in consumers().items():
            turns = variants(produce, consume, steps, device)
            times = 2 if quick else 7
            rows += figures(
                name, alternate(turns, rounds=times, warmup=0 if quick else 1, timer=returned_seconds)
            )
            clock = time.perf_counter if name == WAITS else time.thread_time
            rows.append(goal(name, shares(produce, consume, clock, steps, rounds, device)))
        return rows


def consumers() -> dict[str, Work]:
    """What a step may be to the threads beside it."""
    return {
        WAITS: partial(time.sleep, CONSUMER_S),
        "consumer computes": sized(product, CONSUMER_S),
        "consumer holds the GIL": sized(count, CONSUMER_S),
    }


def product(amount: int) -> Work:
    """One call that computes without the GIL."""
    left, right = torch.randn(amount, 512), torch.randn(512, 512)
    return lambda: torch.mm(left, right)


def count(amount: int) -> Work:
    """Python that never lets go of the GIL by itself."""

    def loop() -> None:
        for _ in range(amount):
            pass

    return loop


def sized(work: Callable[[int], Work], seconds: float) -> Work:
    """The work, of the amount that takes so many seconds on this machine when nothing runs beside it."""
    amount = 100
    for _ in range(5):
        made = work(amount)
        took = median(_repeated(made, 1) for _ in range(7))
        amount = max(1, round(amount * seconds / took))
    return work(amount)


def variants(
    produce: Work, consume: Work, steps: int, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Calling one gives the seconds of a step."""
    dataset = Produced(produce, steps + 1 + AHEAD)
    in_worker: Iterable[Any] = DataLoader(dataset, batch_size=None, num_workers=1)
    sources = {
        "no loader": dataset,
        "ours": ok.DeviceLoader(partial(iter, dataset), device),
        "DataLoader, 1 worker": in_worker,
        "ours over DataLoader, 1 worker": ok.DeviceLoader(in_worker, device),
    }
    turns: dict[str, Callable[[], object]] = {
        "consumer alone": partial(_repeated, consume, steps),
        "producer alone": partial(_repeated, produce, steps),
        "two threads": partial(_side_by_side, consume, produce, steps),
    }
    return turns | {name: partial(step_seconds, one, consume, steps, device) for name, one in sources.items()}


def step_seconds(source: Iterable[Any], consume: Work, steps: int, device: torch.device) -> float:
    """The mean over all steps but the first, whose batch is waited for before the clock starts."""
    batches = iter(source)
    next(batches)
    start = time.perf_counter()
    for _ in range(steps):
        consume()
        next(batches).to(device)
    took = time.perf_counter() - start
    if (left := sum(1 for _ in batches)) != AHEAD:
        raise RuntimeError(f"{left} batches came after {steps + 1} of {steps + 1 + AHEAD}")
    return took / steps


class Clocked:
    """Work that adds up what it takes by a clock."""

    def __init__(self, work: Work, clock: Callable[[], float]) -> None:
        self.work, self.clock = work, clock
        self.seconds, self.calls = 0.0, 0

    def __call__(self) -> Any:
        start = self.clock()
        result = self.work()
        self.seconds += self.clock() - start
        self.calls += 1
        return result


def shares(
    produce: Work, consume: Work, clock: Callable[[], float], steps: int, passes: int, device: torch.device
) -> list[float]:
    """A step of ours over the longer of what the two took themselves, for each pass but a first."""
    consumer, producer = Clocked(consume, clock), Clocked(produce, time.thread_time)
    loader = ok.DeviceLoader(partial(iter, Produced(producer, steps + 1 + AHEAD)), device)
    found = []
    for _ in range(passes + 1):
        for one in (consumer, producer):
            one.seconds, one.calls = 0.0, 0
        took = step_seconds(loader, consumer, steps, device)
        found.append(took / max(one.seconds / one.calls for one in (consumer, producer)))
    return found[1:]  # at first the loader looks whether batches are drawn from global generators


def goal(name: str, shares: list[float]) -> Figure:
    """What a step takes of the slower of the two."""
    low, middle, high = quantiles(shares, n=4, method="inclusive")
    return Figure(f"{name}, a step of ours", middle, "x the slower", "lower", limit=GOAL, spread=(low, high))


def figures(name: str, took: dict[str, Measurement]) -> list[Figure]:
    """All times beside the slower of the two alone."""
    alone = [took.pop(f"{who} alone").samples for who in ("consumer", "producer")]
    slower = Measurement(SLOWER, tuple(map(max, *alone)))
    return [time_figure(f"{name}, {one.name}", one, slower) for one in took.values()]


def _repeated(work: Work, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times


def _side_by_side(consume: Work, produce: Work, times: int) -> float:
    """Both, each in a thread of its own, until both are done."""

    def producing() -> None:
        with torch_threads(1):
            _repeated(produce, times)

    start = time.perf_counter()
    producer = Thread(target=producing)
    producer.start()
    _repeated(consume, times)
    producer.join()
    return (time.perf_counter() - start) / times
