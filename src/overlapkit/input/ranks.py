"""What all ranks say to each other as a pass over a loader begins.

No collectives: it goes through the job's store, and a rank that is late or gone is named after a bounded
wait.
"""

import contextlib
import itertools
from collections import defaultdict

from overlapkit.input.agreement import Agreed
from overlapkit.input.uneven import ALONE, REMEDY, Counted, Plan, Uneven
from overlapkit.quorum import Quorum, RankFailed, Report


class Ranks:
    """All ranks of the job; each begins the same passes over this loader in the same order.

    Where every rank knows how many batches it has, that is said once a pass; else batch by batch.

    Args:
        mode: What to do where they have different numbers of batches.

    Attributes:
        quorum: The ranks.
        litter: Keys of this rank's in the store that nobody reads once all ranks have begun another pass.
        warned: It was said that batches are left out.
    """

    def __init__(self, mode: Uneven) -> None:
        self.mode = mode
        self.quorum = Quorum("input")
        self.quorum.timeout /= 2  # to name the rank before a collective's own timeout ends the job
        self.litter: list[str] = []
        self.warned = False
        self._passes = itertools.count()

    def next_pass(self) -> int:
        """The number of a pass that begins."""
        return next(self._passes)

    def fail(self, number: int, error: BaseException) -> None:
        """Tell the others, who may be waiting, that a pass failed here before its first batch."""
        with contextlib.suppress(RuntimeError):  # no store, no process group: what is wrong here comes first
            self.quorum.fail(str(number), error)

    def settle(self, number: int, left: float | None, *, resumed: bool, spare: bool) -> Plan:
        """Say how many batches this rank has in a pass, and learn what all of them make of it.

        Args:
            number: The pass.
            left: Batches, or None where that is not known.
            resumed: The pass is what was left of an epoch, and may be nothing.
            spare: There is a batch already that could be handed over again.

        Raises:
            ValueError: Ranks have different numbers of batches, and cannot go on with them.
            RankFailed: A rank failed, or did not begin this pass in time.
        """
        report = {"left": left, "resumed": resumed, "spare": spare, "mode": self.mode}
        try:
            verdict = self.quorum.together(str(number), lambda: report, _judge)
        except RankFailed as error:
            raise RankFailed(f"a pass did not begin on all ranks: {error}. {ALONE}") from error
        if "wrong" in verdict:
            raise ValueError(f"uneven={self.mode!r}: {verdict['wrong']}")
        while self.litter:
            self.quorum.store.delete_key(self.litter.pop())
        if left is None or verdict["limit"] is None:
            return Agreed(self, number, spare)
        return Counted(left, verdict["limit"])


def _judge(reports: list[Report]) -> Report:
    modes, left = [report["mode"] for report in reports], [report["left"] for report in reports]
    if len(set(modes)) > 1:
        return {"wrong": f"ranks differ: uneven is {_by_rank(modes)}"}
    if None in left:
        return {"limit": None}
    fewest, most = min(left), max(left)
    if fewest == most:
        return {"limit": most}
    counts = f"batches in this pass: {_by_rank(left)}"
    if modes[0] == "error":
        return {"wrong": f"ranks have different numbers of {counts}: {REMEDY}"}
    if modes[0] == "drop":
        if fewest == 0 and not all(report["resumed"] for report in reports):
            return {"wrong": f"there is nothing to hand over where a rank has no batch; {counts}"}
        return {"limit": fewest}
    if any(report["left"] == 0 and not report["spare"] for report in reports):
        return {"wrong": f"a rank that has no batch has none to hand over again; {counts}"}
    return {"limit": most}


def _by_rank(values: list[object]) -> str:
    """Such as "5 on rank(s) 1, 3; 7 on rank(s) 0, 2"; of many ranks only the first are named."""
    ranks = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(str(rank))
    named = [
        f"{value} on rank(s) {', '.join(who[:8])}{' and others' * (len(who) > 8)}"
        for value, who in ranks.items()
    ]
    return "; ".join(named[:8])
