"""Latency and rate of a link from times by message size: R. W. Hockney's line, alpha + beta * bytes."""

from collections.abc import Sequence


def fit_line(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(alpha, beta) of least relative error, so that small messages count as much; neither is negative.

    Args:
        rows: Pairs of bytes and seconds above 0, of two sizes or more.
    """
    weights = [1 / seconds**2 for _, seconds in rows]
    total = sum(weights)
    size = sum(w * n for w, (n, _) in zip(weights, rows, strict=True)) / total
    time = sum(w * s for w, (_, s) in zip(weights, rows, strict=True)) / total
    spread = sum(w * (n - size) ** 2 for w, (n, _) in zip(weights, rows, strict=True))
    both = sum(w * (n - size) * (s - time) for w, (n, s) in zip(weights, rows, strict=True))
    beta = both / spread
    if beta <= 0:  # no larger message took longer: all is latency
        return time, 0.0
    if (alpha := time - beta * size) >= 0:
        return alpha, beta
    through = sum(w * n * s for w, (n, s) in zip(weights, rows, strict=True))
    return 0.0, through / sum(w * n * n for w, (n, _) in zip(weights, rows, strict=True))
