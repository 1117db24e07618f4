"""Latency and bandwidth of a collective from its times: t = alpha + bytes on the wire / beta (Hockney)."""

from collections.abc import Sequence
from typing import NamedTuple

from overlapkit.alpha_beta import fit_line

WIRE = {"all_reduce": lambda n: 2 * (n - 1) / n, "all_gather": lambda n: (n - 1) / n}
"""Bytes that each rank sends for each byte of the result, in a ring: nccl-tests' bus bandwidth counts so."""


class Line(NamedTuple):
    """alpha in seconds, beta in bytes per second and rank."""

    alpha: float
    beta: float


def fit(sizes: Sequence[int], times: Sequence[float], factor: float) -> Line:
    """The line of least relative error; where no larger message took longer, the least time is all latency.

    Args:
        sizes: Bytes of the result.
        times: Seconds, above 0, one for each size.
        factor: Of WIRE.
    """
    alpha, slope = fit_line([(size * factor, took) for size, took in zip(sizes, times, strict=True)])
    return Line(alpha, 1 / slope) if slope else Line(min(times), float("inf"))
