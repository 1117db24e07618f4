"""Latency and bandwidth of a collective from its times: t = alpha + bytes on the wire / beta (Hockney)."""

from collections.abc import Sequence
from typing import NamedTuple

WIRE = {"all_reduce": lambda n: 2 * (n - 1) / n, "all_gather": lambda n: (n - 1) / n}
"""Bytes that each rank sends for each byte of the result, in a ring: nccl-tests' bus bandwidth counts so."""


class Line(NamedTuple):
    """alpha in seconds, beta in bytes per second and rank."""

    alpha: float
    beta: float


def fit(sizes: Sequence[int], times: Sequence[float], factor: float) -> Line:
    """Least squares of the relative error, so that small messages count as much as large ones.

    Args:
        sizes: Bytes of the result.
        times: Seconds, above 0, one for each size.
        factor: Of WIRE.
    """
    import numpy as np

    wire, took = np.asarray(sizes, float) * factor, np.asarray(times, float)
    (alpha, slope), *_ = np.linalg.lstsq(
        np.stack([1 / took, wire / took], axis=1), np.ones_like(took), rcond=None
    )
    if slope <= 0:  # no larger message took longer: all is latency
        return Line(float(took.min()), float("inf"))
    if alpha < 0:
        x = wire / took
        return Line(0.0, float(x @ x / x.sum()))
    return Line(float(alpha), float(1 / slope))
