"""A batch made one file at a time, so that what cannot be decoded has a name."""

import torch

from overlapkit.input.images.engine import Engine, Recipe
from overlapkit.input.images.job import IGNORED, Job

PATIENCE = 100
"""How many files in a row may be damaged before the whole data set is taken to be."""


class OneByOne:
    """Makes batches slowly.

    What takes the place of a damaged image depends on its sample alone, not on the batch it is in, so that
    a resumed run, and one of another number of ranks, puts the same there.

    Args:
        recipe: How a batch is made.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._engine: Engine | None = None  # of one image at a time

    def make(self, job: Job) -> tuple[torch.Tensor, list[str]]:
        """The images of a batch, and its damaged files with what is wrong with each.

        Their places are taken by other images and labels; `job` says so.

        Raises:
            RuntimeError: None of many files in a row can be decoded.
        """
        images, damaged = [], []
        for index, sample in enumerate(job.samples.tolist()):
            image = self._decode(job.only(index, sample))
            if image is None:
                damaged.append(_describe(self._recipe.files.paths[sample]))
                job.skipped.append(self._recipe.files.paths[sample])
                image = self._instead(job, index, sample)
            images.append(image)
        return torch.cat(images), damaged

    def _decode(self, job: Job) -> torch.Tensor | None:
        """The image of a batch of one, or None where it cannot be decoded."""
        if self._engine is None:
            self._engine = Engine(self._recipe, batch_size=1, threads=1, ahead=1)
        try:
            self._engine.push(job)
            return self._engine.pull()[1]
        except Exception:
            self._engine = None
            return None

    def _instead(self, job: Job, index: int, sample: int) -> torch.Tensor:
        if not self._recipe.crop.substitutes:
            job.labels[index] = IGNORED
            return self._recipe.black()
        files = self._recipe.files
        for step in range(1, PATIENCE):
            other = (sample + step) % len(files.paths)
            image = self._decode(job.only(index, other))
            if image is not None:
                job.labels[index] = files.labels[other]
                return image
        raise RuntimeError(
            f"cannot decode {PATIENCE} files in a row, from {_describe(files.paths[sample])} on: is the data "
            "set in its place?"
        )


def _describe(path: str) -> str:
    """A file that DALI cannot decode, and what is wrong with it, as far as a look at it tells."""
    try:
        with open(path, "rb") as file:
            reason = "no image that DALI decodes, or a damaged one" if file.read(1) else "empty"
    except OSError as error:
        reason = error.strerror or repr(error)
    return f"{path!r} ({reason})"
