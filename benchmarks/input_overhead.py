"""What wrapping costs: microseconds a batch, and the time to go on after a million batches.

The batches of the first are a list, so that reading them costs nothing; the loop does nothing with them.
For the second each kind of source is gone through for real, up to the batch whose state is taken; a new
loader then loads the state, and the clock runs until it has handed over the next batch. There is no goal
for a shuffled DataLoader: its sampler must draw the whole epoch's order again.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import overlapkit as ok
from harness import Figure, alternate, returned_seconds, time_figure

DEEP = 16
WINDOW = 8  # tokens a batch where batches are counted in millions
RESUME_MS = 100.0


def measure(quick: bool, device: torch.device) -> list[Figure]:
    """All figures of this part."""
    return wrapping(5_000 if quick else 20_000, 3 if quick else 9, device) + resuming(
        10_000 if quick else 1_000_000, 3 if quick else 7, device
    )


def wrapping(count: int, rounds: int, device: torch.device) -> list[Figure]:
    """Microseconds a batch, ours beside a thread and a queue of the same depth."""
    batches = [torch.zeros(8) for _ in range(count)]
    variants: dict[str, Iterable[Any]] = {
        "no loader": batches,
        "ours, depth 2": ok.DeviceLoader(batches, device, depth=2),
        f"ours, depth {DEEP}": ok.DeviceLoader(batches, device, depth=DEEP),
        "thread and queue of 2": Queued(batches, 2),
        f"thread and queue of {DEEP}": Queued(batches, DEEP),
    }
    turns: dict[str, Callable[[], object]] = {
        name: partial(batch_seconds, source, count) for name, source in variants.items()
    }
    took = alternate(turns, rounds=rounds, timer=returned_seconds)
    peer = took["thread and queue of 2"]
    return [time_figure(f"wrapping a list, {name}", one, peer, unit="us") for name, one in took.items()]


class Queued:
    """The least that reads ahead: a thread that fills a queue."""

    def __init__(self, batches: Iterable[Any], depth: int) -> None:
        self.batches, self.depth = batches, depth

    def __iter__(self) -> Iterator[Any]:
        queue: Queue[Any] = Queue(self.depth)
        end = object()

        def fill() -> None:
            for batch in self.batches:
                queue.put(batch)
            queue.put(end)

        thread = Thread(target=fill)
        thread.start()
        yield from iter(queue.get, end)
        thread.join()


def batch_seconds(batches: Iterable[Any], count: int) -> float:
    """Mean seconds a batch of a whole pass."""
    start = time.perf_counter()
    taken = sum(1 for _ in batches)
    took = time.perf_counter() - start
    if taken != count:
        raise RuntimeError(f"{taken} batches came of {count}")
    return took / count


def resuming(taken: int, rounds: int, device: torch.device) -> list[Figure]:
    """Milliseconds to the next batch after `taken`, for each kind of source."""
    with tempfile.TemporaryDirectory(prefix="resume-") as folder:
        turns: dict[str, Callable[[], object]] = {
            name: Resume(build, taken) for name, build in loaders(Path(folder), taken + 2, device).items()
        }
        took = alternate(turns, rounds=rounds, timer=returned_seconds)
    return [
        time_figure(
            f"resume after {taken:,} batches, ours over {name}",
            one,
            limit=None if name == "a shuffled DataLoader" else RESUME_MS,
        )
        for name, one in took.items()
    ]


class Resume:
    """Calling it gives the seconds from loading a state to the batch that follows.

    Args:
        build: Makes the loader, the same each time.
        taken: Batches before the state.
    """

    def __init__(self, build: Callable[[], ok.DeviceLoader], taken: int) -> None:
        self.build = build
        loader = build()
        batches = iter(loader)
        for _ in islice(batches, taken):
            pass
        self.state = loader.state_dict()
        self.expected = next(batches)
        loader.close()

    def __call__(self) -> float:
        loader = self.build()
        start = time.perf_counter()
        loader.load_state_dict(self.state)
        batch = next(iter(loader))
        took = time.perf_counter() - start
        loader.close()
        if not torch.equal(torch.as_tensor(batch), torch.as_tensor(self.expected)):
            raise RuntimeError(f"resumed at {batch}, not at {self.expected}")
        return took


def loaders(folder: Path, count: int, device: torch.device) -> dict[str, Callable[[], ok.DeviceLoader]]:
    """The kinds of sources, each of `count` batches of one sample."""
    samples = range(count)
    ok.write_token_shards([np.arange(count * WINDOW + 1)], folder / "shards", dtype="uint32")
    sources: dict[str, Callable[[], Any]] = {
        "a list": lambda: samples,
        "ElasticSampler": lambda: DataLoader(samples, sampler=ok.ElasticSampler(samples, seed=0)),  # type: ignore[arg-type]
        "TokenShards": lambda: ok.TokenShards(folder / "shards", WINDOW, 1, seed=0),
        "a shuffled DataLoader": lambda: DataLoader(samples, shuffle=True),  # type: ignore[arg-type]
    }
    return {name: partial(_wrapped, source, device) for name, source in sources.items()}


def _wrapped(source: Callable[[], Any], device: torch.device) -> ok.DeviceLoader:
    return ok.DeviceLoader(source(), device)
