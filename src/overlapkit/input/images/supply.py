"""Batches in order, made ahead, and made one file at a time where a file is damaged.

DALI names no file when one cannot be decoded: it fails the whole batch, and every batch after it.
"""

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from overlapkit.input.images.engine import Engine, Recipe
from overlapkit.input.images.job import Job
from overlapkit.input.images.one_by_one import OneByOne, describe


class Supply:
    """Makes the batches that an endless iterator of jobs asks for.

    Invariants:
        * Used by one thread at a time.
        * Jobs come out in the order in which they came in, each once, whatever became of their files.
        * Each failure of DALI takes at least one job out, so a damaged file cannot make it run in circles.

    Args:
        recipe: How a batch is made.
        batch_size: Images in the largest batch.
        threads: Threads of DALI.
        ahead: Batches read, and batches decoded, ahead.
        skip: Let something else take the place of an image that cannot be decoded, rather than raise.
    """

    def __init__(self, recipe: Recipe, batch_size: int, threads: int, ahead: int, skip: bool) -> None:
        self._recipe = recipe
        self._shape = batch_size, threads, ahead
        self._skip = skip
        self._jobs: Iterator[Job] = iter(())
        self._pending: deque[Job] = deque()  # those that were under way when a damaged file was found
        self._engine: Engine | None = None
        self._one_by_one = OneByOne(recipe)
        self._suspects: deque[Job] = deque()
        self._failure: Exception | None = None

    @property
    def next_place(self) -> tuple[int, int, int] | None:
        """The place of the job that comes out next, or None where none is under way."""
        under_way = self._suspects or (self._engine.jobs if self._engine is not None else None)
        return under_way[0].place if under_way else None

    def begin(self, jobs: Iterator[Job]) -> None:
        """Let these jobs be what comes next."""
        with self._whole_or_closed():
            self._jobs = jobs
            self._suspects.clear()
            self._pending.clear()
            try:
                if self._engine is not None:
                    self._engine.drain()
            except Exception:  # of files that nobody asks for any more
                self._engine = None
            self._fill()

    def take(self) -> tuple[Job, torch.Tensor]:
        """The next batch: its job, and images.

        Raises:
            RuntimeError: Files cannot be decoded, and are named; or DALI fails though each of them can.
        """
        with self._whole_or_closed():
            if self._suspects:
                return self._take_suspect()
            assert self._engine is not None
            try:
                taken = self._engine.pull()
            except Exception as error:
                self._suspect(error)
                return self._take_suspect()
            # DALI's threads begin the next batch now, each its part, and all wait for the last of them: one
            # must not queue for a core behind the milliseconds of Python that feed what comes later
            os.sched_yield()
            self._fill()
            return taken

    def close(self) -> None:
        """Throw away what is under way, and the pipelines."""
        self._engine = None
        self._one_by_one.close()
        self._suspects.clear()
        self._pending.clear()
        self._jobs = iter(())

    @contextmanager
    def _whole_or_closed(self) -> Iterator[None]:
        """Whatever was raised, an interrupt too: what is half done must not come out under another's name."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _fill(self) -> None:
        if self._engine is None:
            self._engine = Engine(self._recipe, *self._shape)
        while not self._engine.full:
            job = self._pending.popleft() if self._pending else next(self._jobs)
            if self._skip:
                self._one_by_one.mend(job)  # else it would fail all that is under way, each time it comes
            try:
                self._engine.push(job)
            except Exception as error:
                self._suspect(error)
                return

    def _suspect(self, failure: Exception) -> None:
        """One of the batches under way is damaged; DALI does not say which."""
        assert self._engine is not None
        self._suspects, self._engine = self._engine.jobs, None
        self._failure = failure.with_traceback(None)  # its frames would keep the pipelines, and their threads

    def _take_suspect(self) -> tuple[Job, torch.Tensor]:
        job = self._suspects.popleft()
        images, damaged = self._one_by_one.make(job)
        if damaged and not self._skip:
            raise RuntimeError(
                f"cannot decode {_listed(damaged)}. Take what is damaged out of the data set, or "
                "let something else take its place with on_error='skip'"
            ) from self._failure
        if damaged:
            self._pending.extendleft(reversed(self._suspects))
            self._suspects.clear()
            self._fill()
        elif not self._suspects:
            raise RuntimeError(
                "DALI failed, though each image of the batches under way can be decoded by itself"
            ) from self._failure
        return job, images


def _listed(paths: list[str]) -> str:
    shown = ", ".join(map(describe, paths[:8]))
    return shown if len(paths) <= 8 else f"{shown} and {len(paths) - 8} more"
