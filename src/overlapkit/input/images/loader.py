"""ImageLoader: images decoded ahead by DALI, in an order and with random crops that are ours to resume."""

import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch

from overlapkit.input.images.engine import Recipe
from overlapkit.input.images.one_by_one import describe
from overlapkit.input.images.schedule import Schedule
from overlapkit.input.images.supply import Supply
from overlapkit.input.progress import Progress
from overlapkit.lane import Lane, Ticket

PATIENCE_S = 120.0
"""How long the first pass waits for DALI to be imported and set up, and `close` for that to end."""

_NAMED = 10
"""Damaged files of which each is logged; more of them are counted."""


class ImageLoader:
    """A re-iterable of (images, labels), made by `train_loader` or `eval_loader`.

    DALI starts in the background when the loader is made, and goes on across the end of an epoch with the
    one that follows; what was made ahead and is not what the next `iter()` asks for is thrown away. There
    is one iterator at a time: a new one makes the old one useless.

    `state_dict()` describes what the latest iterator has yielded. It is one position in the epoch's order,
    and each random crop is a function of (seed, epoch, file): on the CPU a resumed run goes on bitwise, and
    at another number of ranks all ranks together go on with the same images.

    ```python
    for x, y in ok.DeviceLoader(loader):  # moved to the device, and resumed by DeviceLoader's own state
        ...
    nodes.Loader(nodes.Prefetcher(nodes.IterableWrapper(loader), 2))  # in torchdata, likewise
    ```

    A process that is forked off has none of DALI's threads: make the loader there.

    Args:
        recipe: How an image is made.
        schedule: Which batches there are.
        batch_size: Images in a batch.
        threads: Threads of DALI.
        prefetch: Batches made ahead.
        skip: Let something else take the place of a damaged file.

    Attributes:
        batch_size: Images in a batch; the last one of an epoch may hold fewer.
        classes: Names of the classes, by label, where they came from a folder; else None.
        device: Where images are decoded and handed over.
        skipped: Damaged files, and how often each was left out of a batch that was handed over; the first
            ones are logged, too.
    """

    def __init__(
        self, recipe: Recipe, schedule: Schedule, batch_size: int, threads: int, prefetch: int, skip: bool
    ) -> None:
        self.batch_size = batch_size
        self.classes = recipe.files.classes
        self.device = recipe.device
        self.skipped: dict[str, int] = {}
        self._schedule = schedule
        least = batch_size if schedule.order.drop_last else 1
        self._progress = Progress(schedule.order, least, {"files": recipe.files.digest})
        self._passes = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()  # a reader that was left behind may still be in `take`
        self._supply = supply = Supply(recipe, batch_size, threads, prefetch, skip)
        self._lane = Lane("images", kind="thread")
        self._started: Ticket[None] | None = self._lane.submit(lambda: supply.begin(schedule.jobs(0, 0)))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Begin an epoch, or the rest of the one that a loaded state stands in.

        Yields:
            Images (B, 3, size, size), or (B, size, size, 3) in layout "NHWC"; labels int64 (B,). Both are
            on `device`, and the caller's to keep.

        Raises:
            RuntimeError: Files cannot be decoded, and are named, with on_error="raise"; or this is another
                process than the one that made the loader.
        """
        self._refuse_fork()
        self._finish_start()
        with self._lock:
            self._passes += 1
            self._progress.begin()
            epoch, position = self._progress.epoch, self._progress.position
            if self._supply.next_place != (epoch, position, 0):
                self._supply.begin(self._schedule.jobs(epoch, position))
            return self._run(self._passes, position)

    def __len__(self) -> int:
        """Batches of each rank in an epoch."""
        return self._schedule.batches(0)

    @property
    def batches_left(self) -> int:
        """Batches that the latest iterator has not yielded yet, equally many on every rank."""
        return self._schedule.batches(self._progress.position)

    @property
    def epoch(self) -> int:
        """The epoch of the latest iterator, or the one that comes next where it was set."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this epoch: what is left of it where it was resumed, else all of it."""
        self._progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """What the latest iterator has yielded so far: plain values, the same on every rank."""
        return self._progress.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `iter()` go on where `state` was taken, at whatever number of ranks.

        Raises:
            TypeError: It is no dict.
            ValueError: It is damaged, or was saved over other files or in another order.
        """
        self._progress.load_state_dict(state)

    def is_over(self, state: dict[str, Any]) -> bool:
        """Whether the state's epoch has no batch left, so that the next pass is the next epoch."""
        return self._progress.is_over(state["position"])

    def close(self) -> None:
        """Let go of DALI's pipelines and threads. The loader can be used again."""
        if self._pid != os.getpid():
            return  # they are the parent's
        try:
            self._finish_start()
        finally:
            with self._lock:
                self._passes += 1
                self._supply.close()

    def _finish_start(self) -> None:
        """Wait for the background start: what it set up is used by one thread at a time."""
        if self._started is None:
            return
        try:
            self._started.wait(PATIENCE_S)
        finally:
            if self._started.done():
                self._started = None
                self._lane.close(PATIENCE_S)

    def _run(self, number: int, position: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        taken, batches = 0, self._schedule.batches(position)
        for left in range(batches - 1, -1, -1):
            self._refuse_fork()
            with self._lock:
                self._refuse_old(number)
                job, images = self._supply.take()
                taken += len(job.samples)
                self._progress.take(taken) if left else self._progress.finish()
                for path in job.skipped:
                    self._note(path)
            yield images, torch.from_numpy(job.labels).to(self.device, non_blocking=True)

    def _note(self, path: str) -> None:
        new = path not in self.skipped
        self.skipped[path] = self.skipped.get(path, 0) + 1
        count, log = len(self.skipped), logging.getLogger(__name__)
        if new and count <= _NAMED:
            log.warning("cannot decode %s: another file takes its place", describe(path))
        elif new and count.bit_count() == 1:  # at each power of two
            log.warning("cannot decode %d files so far: `skipped` names them", count)

    def _refuse_fork(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(
                f"this image loader was made in process {self._pid}, before the fork; a forked child has "
                "none of DALI's threads: make the loader here"
            )

    def _refuse_old(self, number: int) -> None:
        if number != self._passes:
            raise RuntimeError(
                "this iterator became useless when a newer one was made, or the loader was closed: there "
                "is one iterator at a time. Make a second loader for nested loops"
            )
