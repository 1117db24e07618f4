"""Take one point out after the other, run its tests, and note which one fails first.

A test that runs into its time limit has caught nothing: on a busy machine that says nothing.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
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
        patience_s: What a test may take beyond ten times its usual, before it is ended.
    """

    def __init__(self, root: Path, folder: Path, jobs: int, patience_s: float = 120.0) -> None:
        self._patience_s = patience_s
        self._copies = [Checkout(root, folder / f"copy-{number}") for number in range(jobs)]

    def passing(self, tests: Collection[str]) -> dict[str, float]:
        """Those that pass where nothing is taken out, and their seconds: of others a failure says nothing."""
        jobs, listed, found = len(self._copies), sorted(tests), {}
        parts = [listed[number::jobs] for number in range(jobs) if listed[number::jobs]]
        for part, _, outcome in each(parts, self._copies, lambda part, copy: Run(copy.at, part, _WHOLE_S)):
            found |= outcome.passed
            for test in set(part) - outcome.passed.keys():
                print(f"fails with nothing taken out: {test}")
        return found

    def run(self, tests: Mapping[Point, Sequence[str]], usual_s: Mapping[str, float]) -> dict[Key, Row]:
        """Take each point out and run its tests; returns the rows of those that are caught.

        Args:
            tests: Those to run for each point, in this order.
            usual_s: What each takes, where that is known.
        """
        caught = {}
        left = {point: list(some) for point, some in tests.items() if some}
        while left:
            later = {}
            for point, outcome in self._tried(left, usual_s):
                said = outcome.failed or "SURVIVES"
                if outcome.late:
                    said = f"out of time, no catch: {outcome.failed}"
                    others = left[point]
                    others = others[others.index(outcome.failed) + 1 :] if outcome.failed in others else []
                    if others:
                        later[point] = others
                elif outcome.failed is not None:
                    caught[point.key] = Row(point.key, outcome.failed, outcome.seconds)
                elif outcome.trouble:
                    print(f"{point}: pytest came to no test:\n{outcome.trouble}")
                print(f"{outcome.seconds:5.0f} s  {point}  ->  {said}", flush=True)
            left = later
        return caught

    def _tried(
        self, tests: Mapping[Point, Sequence[str]], usual_s: Mapping[str, float]
    ) -> Iterator[tuple[Point, Outcome]]:
        """Each point with how its tests ended, up to the first that failed or was late."""

        def begin(point: Point, copy: Checkout) -> Run:
            copy.take_out(point)
            taken = [usual_s.get(test, 0.0) for test in tests[point]]
            limit = self._patience_s + 10 * max(taken)
            whole = _START_S + 2 * limit + 10 * sum(taken)
            return Run(copy.at, ["-x", f"--timeout={limit:.0f}", *tests[point]], whole)

        for point, copy, outcome in each(list(tests), self._copies, begin):
            copy.put_back(point)
            yield point, outcome
