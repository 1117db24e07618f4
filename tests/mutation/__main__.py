"""make mutate: take out one wait after the other, and see a test fail for each."""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutation import listing
from tests.mutation.checkout import PACKAGE
from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.lanes import files_of
from tests.mutation.listing import PAGE, Key, Row
from tests.mutation.points import Point, in_package
from tests.mutation.recording import Recording, load, record, save
from tests.mutation.running import warm
from tests.mutation.trying import Trial


def _recorded(folder: Path, root: Path, points: Sequence[Point], jobs: int, kept: Path | None) -> Recording:
    if kept is not None and kept.exists():
        return load(kept)
    files = dict.fromkeys(file for point in points for file in files_of(point.file))
    recording = record(root, folder, points, list(files), jobs)
    if kept is not None:
        save(recording, kept)
    return recording


def main(arguments: Sequence[str]) -> int:
    """Returns 0 where each mutation is caught, 1 where one is not or the list is out of date."""
    parser = argparse.ArgumentParser(prog="make mutate", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write the list into {PAGE}")
    parser.add_argument("--only", default="", help="only the points whose line has this in it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once")
    parser.add_argument(
        "--afresh", action="store_true", help="look for a test for each, do not try the listed"
    )
    parser.add_argument(
        "--recording", type=Path, help="a file to keep what was recorded in, and read it from"
    )
    parser.add_argument("--show", action="store_true", help="list the points, and what is left out and why")
    chosen = parser.parse_args(arguments)
    root, begun = Path.cwd(), time.monotonic()
    for ending in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: runs are ended, copies removed
        signal.signal(ending, signal.default_int_handler)
    every = in_package(root / PACKAGE)
    if chosen.show:
        for point in every:
            print(point, f"-- no point: {point.left_out.reason}" if point.left_out else "")
        return 0
    listed = listing.read(root / PAGE)
    points = [one for one in every if one.left_out is None and chosen.only in str(one)]
    open_points = [one for one in points if one.key not in EQUIVALENT]
    caught: dict[Key, Row] = {}
    warm()
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        trial = Trial(root, Path(folder), chosen.jobs)
        known = {one: listed[one.key].test for one in open_points if one.key in listed and not chosen.afresh}
        before = {point: test for point, test in known.items() if test is not None}
        if before:
            usual = trial.passing(set(before.values()))
            caught = trial.run({one: [test] for one, test in before.items() if test in usual}, usual)
        left = [one for one in open_points if one.key not in caught]
        if left:
            recording = _recorded(Path(folder), root, left, chosen.jobs, chosen.recording)
            found = trial.run({one: recording.tests_of(one) for one in left}, recording.seconds)
            usual = trial.passing({str(row.test) for row in found.values()})
            caught |= {key: row for key, row in found.items() if row.test in usual}
    print(f"{len(caught)} of {len(open_points)} caught in {time.monotonic() - begun:.0f} s")
    return _concluded(every, points, caught, listed, root if chosen.write else None)


def _concluded(
    every: Sequence[Point],
    points: Sequence[Point],
    caught: dict[Key, Row],
    listed: dict[Key, Row],
    root: Path | None,
) -> int:
    there = {point.key for point in every if point.left_out is None}
    same = {key: Row(key, None, reason=reason) for key, reason in EQUIVALENT.items() if key in there}
    tried = {point.key for point in points}
    rows = {key: row for key, row in listed.items() if key in there and key not in tried} | caught | same
    survivors = [str(point) for point in points if point.key not in rows]
    stale = [f"equivalent.py lists what is gone: {key}" for key in EQUIVALENT if key not in there]
    if root is not None:
        listing.write(root / PAGE, rows.values())
    apart = listing.differences(every, rows if root is not None else listed)
    for line in [*(f"survives: {one}" for one in survivors), *stale, *apart]:
        print(line)
    return 1 if survivors or stale or apart else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
