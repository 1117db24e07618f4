"""Batches made one file at a time, so that what cannot be decoded has a name, and something in its place."""

import errno
import re

import torch

from overlapkit.input.images.engine import Engine, Recipe
from overlapkit.input.images.job import Job
from overlapkit.input.targets import IGNORED

PATIENCE = 100
"""How many files in a row may be damaged before the whole data set is taken to be."""

_SHORTAGE = re.compile("out of memory|bad_alloc|allocation failed|can't allocate|too many open files", re.I)
"""How DALI, whose errors are all of one class, says that the machine is at fault and not the file."""


class OneByOne:
    """Decodes slowly, and remembers which files could not be.

    What takes the place of a damaged image depends on its sample alone, not on the batch it is in nor on
    what is remembered, so that a resumed run, and one of another number of ranks, puts the same there.

    Args:
        recipe: How a batch is made.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._engine: Engine | None = None  # of one image at a time
        self._damaged: set[int] = set()  # samples; another crop of one may be sound

    def make(self, job: Job) -> tuple[torch.Tensor, list[str]]:
        """The images of a batch, and the damaged files found in it.

        Their places are taken by other files; `job` says so.

        Raises:
            RuntimeError: None of many files in a row can be decoded.
        """
        before = len(job.skipped)
        images = [self._settle(job, index) for index in range(len(job.samples))]
        return torch.cat(images), job.skipped[before:]

    def mend(self, job: Job) -> None:
        """Let other files take the places of those known to be damaged, where they still are.

        Raises:
            RuntimeError: None of many files in a row can be decoded.
        """
        if self._damaged:
            for index, sample in enumerate(job.samples.tolist()):
                if sample in self._damaged:
                    self._settle(job, index)

    def close(self) -> None:
        """Throw away the pipelines; the names stay."""
        self._engine = None

    def _settle(self, job: Job, index: int) -> torch.Tensor:
        """One image of a batch, by the first file that can be decoded from its own on."""
        files, sample = self._recipe.files, int(job.samples[index])
        tries = min(PATIENCE, len(files.paths))
        for step in range(tries):
            other = (sample + step) % len(files.paths)
            image = self._decode(job.only(index, other))
            if image is None:
                self._damaged.add(other)
                continue
            if step:
                job.skipped.append(files.paths[sample])
                job.samples[index] = other
                job.labels[index] = files.labels[other] if self._recipe.crop.substitutes else IGNORED
            return image
        raise RuntimeError(
            f"cannot decode {tries} files in a row, from {describe(files.paths[sample])} on: is the data set "
            "in its place?"
        )

    def _decode(self, job: Job) -> torch.Tensor | None:
        """The image of a batch of one, or None where it cannot be decoded."""
        path = self._recipe.files.paths[job.samples[0]]
        if not _readable(path):
            return None
        if self._engine is None:
            self._engine = Engine(self._recipe, batch_size=1, threads=1, ahead=1)
        try:
            self._engine.push(job)
            return self._engine.pull()[1]
        except BaseException as error:
            self._engine = None
            shortage = isinstance(error, torch.OutOfMemoryError) or _SHORTAGE.search(str(error))
            if isinstance(error, RuntimeError) and not shortage:
                return None
            error.add_note(f"while {path!r} was decoded by itself")
            raise


def describe(path: str) -> str:
    """A file that DALI cannot decode, and what is wrong with it, as far as a look at it tells."""
    try:
        with open(path, "rb") as file:
            reason = "no image that DALI decodes, or a damaged one" if file.read(1) else "empty"
    except OSError as error:
        reason = error.strerror or repr(error)
    return f"{path!r} ({reason})"


def _readable(path: str) -> bool:
    """Whether there is anything in a file.

    Raises:
        OSError: It is the process that can open no more files, or the machine that is short of memory.
    """
    try:
        with open(path, "rb") as file:
            return bool(file.read(1))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        return False
