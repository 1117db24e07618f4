"""How well a mean over steps is known, and what difference of two means is more than noise.

Steps are not independent: clocks and neighbours drift. So the standard error comes from the means of runs of
consecutive steps (batch means; Law and Kelton, Simulation Modeling and Analysis, chapter 9).
"""

import math
from collections.abc import Sequence

_BATCHES = 10
_FEWEST = 4  # steps below which nothing is said about noise
_Z = 3.2905  # of a normal distribution: exceeded by chance once in a thousand times


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean of consecutive values; None of fewer than 4."""
    if len(values) < _FEWEST:
        return None
    means = _batch_means(values)
    mean = sum(means) / len(means)
    variance = sum((one - mean) ** 2 for one in means) / (len(means) - 1)
    return math.sqrt(variance / len(means))


def noise(first: tuple[float | None, int], second: tuple[float | None, int]) -> float | None:
    """The difference of two means that chance exceeds once in a thousand times (Welch's test).

    Args:
        first: The standard error of a mean and of how many steps it is.
        second: Likewise.

    Returns:
        None where a standard error is not known.
    """
    (one, steps), (other, others) = first, second
    if one is None or other is None:
        return None
    total = one**2 + other**2
    if not total:
        return 0.0
    weights = one**4 / (_batches(steps) - 1) + other**4 / (_batches(others) - 1)
    return _quantile(total**2 / weights) * math.sqrt(total)


def _batches(steps: int) -> int:
    return max(2, steps if steps < 2 * _BATCHES else _BATCHES)


def _batch_means(values: Sequence[float]) -> list[float]:
    count = _batches(len(values))
    size = len(values) // count
    kept = values[len(values) - count * size :]
    return [sum(kept[at : at + size]) / size for at in range(0, len(kept), size)]


def _quantile(degrees: float) -> float:
    """Of Student's distribution (Abramowitz and Stegun 26.7.5; within 4 % from 4 degrees on)."""
    z, terms = _Z, 1 / degrees
    return (
        z
        + (z**3 + z) / 4 * terms
        + (5 * z**5 + 16 * z**3 + 3 * z) / 96 * terms**2
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 * terms**3
    )
