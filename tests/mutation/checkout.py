"""Copies of the checkout, in which sources are changed: the one that is worked in never is."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.mutation.points import Point, without

PACKAGE = Path("src/overlapkit")
_LEFT = (".?*", "__pycache__", "runs", "build", "dist")  # environments, caches and the like

_SEEN = """
import os
_known = set()
def seen(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (number, test) not in _known:
        _known.add((number, test))
        with open({path!r}, "a") as file:
            file.write(f"{{number}} {{test}}\\n")
    return True
"""


class Checkout:
    """A copy of a checkout, one point of which may be taken out at a time.

    Args:
        root: What is copied.
        at: A folder that is not there yet.
    """

    def __init__(self, root: Path, at: Path) -> None:
        shutil.copytree(root, at, ignore=shutil.ignore_patterns(*_LEFT))
        self.at = at
        self._before: dict[str, str] = {}
        self._clock = 1_000_000_000

    def take_out(self, point: Point) -> None:
        """Change the source of a point."""
        before = self._before.setdefault(point.file, (self.at / PACKAGE / point.file).read_text())
        self._put(point.file, without(before, point))

    def put_back(self, point: Point) -> None:
        """The file as it was."""
        self._put(point.file, self._before[point.file])

    def record(self, points: Sequence[Point], to: Path) -> None:
        """Make each point write down which tests come by, as lines `number test`."""
        (self.at / PACKAGE / "_seen.py").write_text(_SEEN.format(path=str(to)))
        added: dict[str, dict[int, list[bytes]]] = {}
        for number, point in enumerate(points):
            tell = f'__import__("overlapkit._seen", fromlist=["seen"]).seen({number})'
            places = added.setdefault(point.file, {})
            if point.instead == "pass":  # a statement
                places.setdefault(point.span[0], []).append(f"{tell}; ".encode())
            else:
                places.setdefault(point.span[0], []).append(f"({tell} and ".encode())
                places.setdefault(point.span[1], []).insert(0, b")")
        for file, places in added.items():
            data = (self.at / PACKAGE / file).read_bytes()
            for place in sorted(places, reverse=True):
                data = data[:place] + b"".join(places[place]) + data[place:]
            (self.at / PACKAGE / file).write_bytes(data)

    def _put(self, file: str, text: str) -> None:
        """Python knows what it compiled by a file's second and size: no two of ours have the same."""
        path = self.at / PACKAGE / file
        path.write_text(text)
        self._clock += 1
        os.utime(path, (self._clock, self._clock))
