"""What failures cost a job: goodput and the best time between saves, against the number of ranks.

The expected time of a job whose failures come at random: J. T. Daly, A higher order estimate of the optimum
checkpoint interval for restart dumps, Future Generation Computer Systems 22 (2006), equation 13.
"""

import math
from dataclasses import dataclass

from overlapkit.plan.arguments import check_amount, check_ranks

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Failures:
    """How often ranks fail, and what a save and a failure cost. Seconds.

    Args:
        mtbf_s: Mean time between failures of one rank; that of a job of n ranks is an n-th of it.
        restart_s: From a failure until the first step after it.
        stall_s: What one save costs the steps: its stall and what it slows them by.
        write_s: From save() until the checkpoint is committed, beside the steps. A failure meanwhile finds
            the one before only.

    Raises:
        TypeError: A figure is no number.
        ValueError: It is out of range.
    """

    mtbf_s: float
    restart_s: float
    stall_s: float
    write_s: float = 0.0

    def __post_init__(self) -> None:
        check_amount("mtbf_s", self.mtbf_s, above=0)
        check_amount("restart_s", self.restart_s)
        check_amount("stall_s", self.stall_s)
        check_amount("write_s", self.write_s)

    def goodput(self, ranks: int, interval_s: float) -> float:
        """The share of time in which the job gets on, 0 to 1; neither saves nor lost work count.

        Args:
            ranks: Of the job.
            interval_s: Training time from one save to the next.
        """
        check_ranks("ranks", ranks)
        check_amount("interval_s", interval_s, above=0)
        mean = self.mtbf_s / ranks
        # A failure finds the checkpoint before the one that is being written: that time passes again, too.
        lost = (self.restart_s + self.write_s) / mean
        wall = lost + math.log(math.expm1(min((interval_s + self.stall_s) / mean, 700.0)))
        return math.exp(math.log(interval_s / mean) - wall) if wall < 700 else 0.0

    def best_interval(self, ranks: int) -> float:
        """The training time between two saves that gives the largest goodput, in seconds.

        At least `write_s`, since one save is written at a time, and a millionth of the mean time between
        failures, where saves cost nothing.
        """
        check_ranks("ranks", ranks)
        mean = self.mtbf_s / ranks
        low, high = math.log(mean * 1e-6), math.log(mean * 10)
        while high - low > 1e-9:
            left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
            if self._logarithm(math.exp(left), mean) >= self._logarithm(math.exp(right), mean):
                high = right
            else:
                low = left
        return max(math.exp((low + high) / 2), self.write_s)

    def _logarithm(self, interval: float, mean: float) -> float:
        """Of the goodput but for what does not depend on the interval: it has one maximum."""
        return math.log(interval) - math.log(math.expm1((interval + self.stall_s) / mean))
