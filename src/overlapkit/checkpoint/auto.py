"""every="auto": as often as pays, from what saves cost, measured, and how often the job fails, as stated.

J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
Computer Systems 22 (2006), after J. W. Young, A first order approximation to the optimum checkpoint
interval, Communications of the ACM 17 (1974).
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple

from overlapkit.checkpoint.every import Every
from overlapkit.checkpoint.save import Save
from overlapkit.quorum import Report

FIRST = 16
"""How many calls of `save` the first saves are apart, until something is measured."""


def schedule(every: int | Literal["auto"] | None, mtbf: float | None, in_flight: int) -> Every:
    """What `every=` and `mtbf=` of a checkpointer say."""
    if every == "auto":
        assert mtbf is not None
        return Auto(mtbf, in_flight)
    return Every(every)


class Rule(NamedTuple):
    """Calls later than `after`, up to the next rule's, are due at multiples of `every`, a power of two."""

    after: int
    every: int


def daly(cost_s: float, mtbf_s: float) -> float:
    """The seconds from one save to the next that lose the least time to saves and to failures.

    Args:
        cost_s: For how long a save holds up the training.
        mtbf_s: Mean time between failures.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def next_due(call: int, rules: Sequence[Rule]) -> int:
    """The first call after this one that is due."""
    for rule, following in pairwise([*rules, Rule(2**62, 1)]):
        due = (max(call, rule.after) // rule.every + 1) * rule.every
        if due <= following.after:
            return due
    raise AssertionError("the last rule has no end")


class Auto(Every):
    """Measures, and lets rank 0 decide for all ranks.

    Invariants:
        * All ranks follow the same rules at the same calls, without waiting for each other. What rank 0
          decides travels with the verdict of a save and is followed after the `in_flight`-th save that comes
          next: on every rank, that one begins only when the verdict is there.
        * A rank that misses a verdict goes on by the old rule. Intervals are powers of two, so saves of the
          old and of the new rule fall together again, and the next verdict has all rules: it heals by itself.
        * An interval grows by a factor of two at a time: one wrong measurement cannot cost hours.

    The cost of a save is its stall (in `save()` and in the optimizer's step) and how much longer steps take
    while it is unfinished (median against median, so that an evaluation is not taken for a cost); of the last
    saves the median, of all ranks the largest. No more than half of the time is spent on writing.

    Args:
        mtbf: Mean time between failures of the whole job, in seconds.
        in_flight: Of the checkpointer.
        clock: Seconds that never go back; each rank may have its own.
    """

    def __init__(self, mtbf: float, in_flight: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._mtbf = mtbf
        self._in_flight = in_flight
        self._clock = clock
        self._rules = [Rule(0, FIRST)]
        self._quiet: deque[float] = deque(maxlen=64)
        self._slow: list[float] = []
        self._costs: deque[float] = deque(maxlen=8)
        self._save: Save | None = None
        self._busy = False
        self._left: float | None = None
        self._cost: float | None = None  # these two are read by the saves' thread
        self._period: float | None = None

    def enter(self, call: int, step: int) -> bool:
        """See Every. The time since the last call's end is that of a step."""
        if self._left is not None:
            (self._slow if self._busy else self._quiet).append(self._clock() - self._left)
        self._left = None
        due = next_due(call - 1, self._rules) == call
        if due:
            self._conclude()
        return due

    def leave(self, save: Save | None, busy: bool) -> None:
        """See Every."""
        if save is not None:
            self._save = save
        self._busy = busy
        self._left = self._clock()

    def report(self) -> Report:
        """See Every."""
        return {"cost": self._cost}

    def decide(self, call: int, took_s: float, reports: list[Report]) -> Report:
        """See Every."""
        rules = [rule for rule, following in pairwise(self._rules) if following.after > call]
        rules.append(self._rules[-1])
        costs = [report["cost"] for report in reports if report["cost"] is not None]
        if costs and self._period is not None:
            seconds = max(daly(max(costs), self._mtbf), 2 * took_s)
            calls = max(1.0, seconds / max(self._period, 1e-9))
            every = min(2 ** round(math.log2(calls)), 2 * rules[-1].every)
            if every != rules[-1].every:
                for _ in range(self._in_flight):
                    call = next_due(call, rules)
                rules.append(Rule(call, every))
        return {"rules": rules}

    def follow(self, verdict: Report) -> None:
        """See Every."""
        self._rules = [Rule(*rule) for rule in verdict["rules"]]

    def _conclude(self) -> None:
        """The next save begins: what did the last one cost?"""
        slow, self._slow = self._slow, []
        if self._quiet or slow:
            self._period = median(self._quiet or slow)
        if self._save is None:
            return
        save, self._save = self._save, None
        cost = save.stall_s
        if slow and self._quiet:
            slow[0] -= save.staging_s  # is in both
            cost += max(0.0, median(slow) - median(self._quiet)) * len(slow)
        self._costs.append(cost)
        self._cost = median(self._costs)
