"""Random numbers that belong to a sample of an epoch, whoever draws them and whenever.

Augmentation that is a function of (seed, epoch, sample) needs no state to go on bitwise, at any number of
ranks and however batches are cut.
"""

import numpy as np

from overlapkit.input.order import uniform


def uniforms(samples: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """`count` random numbers for each sample: a counter through a mixer keyed by a hash of (seed, epoch).

    Args:
        samples: int64 (n,), from 0 on.
        count: Numbers for each; another count gives other numbers.
        seed: Any integer.
        epoch: Any integer.

    Returns:
        float64 (n, count) in [0, 1).
    """
    first = samples.astype(np.uint64) * np.uint64(count)
    counters: np.ndarray = np.add.outer(first, np.arange(count, dtype=np.uint64))
    return uniform(counters, f"draws/{seed}/{epoch}")
