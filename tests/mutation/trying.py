"""Take one point out after the other, run its tests, and note which one fails first."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tests.mutation.checkout import Checkout
from tests.mutation.listing import Key, Row
from tests.mutation.points import Point
from tests.mutation.running import Outcome, Run, each

_START_S = 120.0  # until the first test, on however busy a machine
_WHOLE_S = 3600.0


class Trial:
    """Copies of a checkout, in which mutations are tried.

    Args:
        root: The checkout.
        folder: Where the copies go.
        jobs: How many there are, and so how many mutations are tried at once.
        patience_s: What a test may take beyond ten times its usual, before it counts as late.
    """

    def __init__(self, root: Path, folder: Path, jobs: int, patience_s: float = 60.0) -> None:
        self._patience_s = patience_s
        self._copies = [Checkout(root, folder / f"copy-{number}") for number in range(jobs)]

    def failing(self, tests: Collection[str]) -> set[str]:
        """Those that fail where nothing is taken out: elsewhere their failing says nothing."""
        jobs, listed, found = len(self._copies), sorted(tests), set()
        parts = [listed[number::jobs] for number in range(jobs) if listed[number::jobs]]
        for part, _, outcome in each(parts, self._copies, lambda part, copy: Run(copy.at, part, _WHOLE_S)):
            found |= set(part) - outcome.passed.keys()
            for test in set(part) - outcome.passed.keys():
                print(f"fails with nothing taken out: {test}")
        return found

    def run(self, tests: Mapping[Point, Sequence[str]], usual_s: Mapping[str, float]) -> dict[Key, Row]:
        """Take each point out and run its tests; returns the rows of those that are caught.

        Args:
            tests: Those to run for each point, in this order.
            usual_s: What each takes, where that is known.
        """

        def begin(point: Point, copy: Checkout) -> Run:
            copy.take_out(point)
            taken = [usual_s.get(test, 0.0) for test in tests[point]]
            limit = self._patience_s + 10 * max(taken)
            whole = _START_S + 2 * limit + 10 * sum(taken)
            return Run(copy.at, ["-x", f"--timeout={limit:.0f}", *tests[point]], whole)

        caught = {}
        for point, copy, outcome in each([one for one in tests if tests[one]], self._copies, begin):
            copy.put_back(point)
            row = _judged(point, outcome)
            if row is not None:
                caught[point.key] = row
            said = f"{row.test} {row.how}" if row else "SURVIVES"
            print(f"{outcome.seconds:5.0f} s  {point}  ->  {said}", flush=True)
        return caught


def _judged(point: Point, outcome: Outcome) -> Row | None:
    if outcome.failed is not None:
        return Row(point.key, outcome.failed, "late" if outcome.late else "", outcome.seconds)
    if outcome.trouble:
        print(f"{point}: pytest came to no test:\n{outcome.trouble}")
    return None
