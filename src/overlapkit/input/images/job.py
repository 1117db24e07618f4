"""One batch to be made: which samples, and everything that chance has to say about them."""

from dataclasses import dataclass, field, replace

import numpy as np


@dataclass
class Job:
    """A batch on its way.

    Attributes:
        place: Epoch, position where its pass began, and number in that pass.
        samples: Indices of files, int64 (n,).
        labels: int64 (n,).
        draws: Random numbers of each sample, float64 (n, d).
        skipped: Files that could not be decoded and have something else in their place.
    """

    place: tuple[int, int, int]
    samples: np.ndarray
    labels: np.ndarray
    draws: np.ndarray
    skipped: list[str] = field(default_factory=list)

    def only(self, index: int, sample: int) -> "Job":
        """A batch of one: what this one holds at `index`, with the file of `sample`."""
        one = slice(index, index + 1)
        return replace(self, samples=np.array([sample]), labels=self.labels[one], draws=self.draws[one])
