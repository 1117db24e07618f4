"""Which tests come by which point, and how long each takes: one run of tests, on sources that tell."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.mutation.checkout import Checkout
from tests.mutation.lanes import files_of
from tests.mutation.points import Point
from tests.mutation.running import Run, each, emptied

_LIMIT_S = 3600.0
_BUDGET_S = 60.0
"""Of tests that are tried for one mutation, as long as they took in the recording: the nearest first."""


class Recording:
    """What one run of tests has shown.

    Attributes:
        seconds: Of each test that passed.
        seen: The tests that come by each point.
    """

    def __init__(self, seconds: dict[str, float], seen: list[tuple[tuple[str, str, str, int], str]]) -> None:
        self.seconds = seconds
        self.seen = seen

    def tests_of(self, point: Point, *, all_of_them: bool = False) -> list[str]:
        """Those to be tried: of the nearest files first, the quickest of each first."""
        files = files_of(point.file)
        found = {test for key, test in self.seen if key == point.key and test in self.seconds}
        near = [test for test in found if test.partition("::")[0] in files]
        near.sort(key=lambda test: (files.index(test.partition("::")[0]), self.seconds[test]))
        chosen, spent = [], 0.0
        for test in near:
            if chosen and spent + self.seconds[test] > _BUDGET_S and not all_of_them:
                continue
            chosen.append(test)
            spent += self.seconds[test]
        return chosen


def record(root: Path, folder: Path, points: Sequence[Point], files: Sequence[str], jobs: int) -> Recording:
    """Run test files against sources that write down which point was passed."""
    notes = emptied(folder / "seen") / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.touch()
    copies = []
    for number in range(jobs):
        copies.append(Checkout(root, emptied(folder / f"recording-{number}")))
        copies[-1].record(points, notes)
    seconds: dict[str, float] = {}
    for file, _, outcome in each(
        files, copies, lambda file, copy: Run(copy.at, ["--timeout", "300", file], _LIMIT_S)
    ):
        seconds |= outcome.passed
        print(f"recorded {file}: {len(outcome.passed)} tests, {outcome.seconds:.0f} s", flush=True)
    seen = {tuple(line.split(" ", 1)) for line in notes.read_text().splitlines() if " " in line}
    return Recording(seconds, [(points[int(number)].key, test) for number, test in sorted(seen) if test])


def save(recording: Recording, path: Path) -> None:
    path.write_text(json.dumps([recording.seconds, recording.seen]))


def load(path: Path) -> Recording:
    seconds, seen = json.loads(path.read_text())
    return Recording(seconds, [(tuple(key), test) for key, test in seen])
