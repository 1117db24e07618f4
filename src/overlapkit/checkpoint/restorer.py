"""One restore: read and check on every rank, agree, and only then put the values in place."""

import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from overlapkit.checkpoint import rng
from overlapkit.checkpoint.catalog import Catalog
from overlapkit.checkpoint.errors import DamagedCheckpoint, MismatchError
from overlapkit.checkpoint.manifest import read_manifest, step_folders, step_name
from overlapkit.checkpoint.match import Plan, Values, make_plan, writers_of
from overlapkit.checkpoint.opening import check_step
from overlapkit.checkpoint.reader import read_boxes, room
from overlapkit.checkpoint.stage import Stager
from overlapkit.lane import Lane
from overlapkit.pinned import PinnedBuffer
from overlapkit.quorum import Quorum, Report


class Restorer:
    """Restores the checkpoints of one directory, or of several tiers.

    Invariants:
        * All ranks restore the same checkpoint, or none.
        * A state is changed only after everything that it takes has been read and checked, on all ranks.
    """

    def __init__(self, places: Sequence[Path], quorum: Quorum, stager: Stager, helper: Lane) -> None:
        self._places = places
        self._quorum = quorum
        self._stager = stager
        self._helper = helper
        self._calls = itertools.count()

    def restore(
        self, state: dict[str, Any], step: int | Literal["latest"], only: tuple[str, ...] | None, strict: bool
    ) -> int:
        """See `Checkpointer.restore`. No save may be in flight."""
        name = f"restore/{next(self._calls)}"
        found = self._quorum.together(name, dict, lambda _: {"found": self.candidates(step)})["found"]
        damage: list[str] = []
        for candidate, place in found:
            folder = self._places[place] / step_name(candidate)
            damaged = self._restore_one(f"{name}/{candidate}/{place}", folder, state, only, strict)
            if not damaged:
                return int(candidate)
            damage.append(damaged)
            if step == "latest" or len(damage) < len(found):
                warnings.warn(f"{step_name(candidate)} is damaged and is skipped: {damaged}", stacklevel=3)
        if damage:  # nothing sound is left: starting from 0 in silence would lose the run
            raise DamagedCheckpoint("; ".join(damage))
        return 0

    def candidates(self, step: int | Literal["latest"]) -> list[tuple[int, int]]:
        """The checkpoints to try, the best first: the step, and which place it is in.

        Raises:
            FileNotFoundError: There is none of this step.
        """
        there = [(found, place) for place, root in enumerate(self._places) for found in step_folders(root)]
        there.sort(key=lambda one: (-one[0], one[1]))
        if step == "latest":
            return there
        wanted = [one for one in there if one[0] == check_step(step)]
        if not wanted:
            steps = sorted({found for found, _ in there})
            raise FileNotFoundError(
                f"step={step}: {' and '.join(map(str, self._places))} has no such checkpoint, but "
                f"{steps or 'none at all'}"
            )
        return wanted

    def _restore_one(
        self, key: str, folder: Path, state: dict[str, Any], only: tuple[str, ...] | None, strict: bool
    ) -> str:
        """Restore one checkpoint, on all ranks or on none; returns what is damaged, or nothing."""
        loans: list[PinnedBuffer] = []
        done: list[tuple[Plan, Values, Catalog]] = []

        def work() -> Report:
            try:
                done.append(self._read(folder, state, only, strict, loans))
            except DamagedCheckpoint as error:
                return {"damaged": str(error)}
            return {}

        try:
            damaged = str(self._quorum.together(key, work, _all_damage)["damaged"])
            if not damaged:
                _apply(*done[0], rng_too=only is None)
            return damaged
        finally:
            done.clear()
            for loan in loans:
                loan.give_back()

    def _read(
        self,
        folder: Path,
        state: dict[str, Any],
        only: tuple[str, ...] | None,
        strict: bool,
        loans: list[PinnedBuffer],
    ) -> tuple[Plan, Values, Catalog]:
        manifest = read_manifest(folder)
        rank, world = self._quorum.rank, self._quorum.world
        catalog = Catalog(manifest, rank, world, writers_of(state))
        plan = make_plan(state, catalog, only)
        if not catalog.whole and (plan.problems or not catalog.covers(plan.wanted)):
            catalog = Catalog(manifest, rank, world)  # the state is laid out in another way than it was
            plan = make_plan(state, catalog, only)
        if plan.problems and strict:
            problems = "".join(f"\n    {problem}" for problem in plan.problems)
            raise MismatchError(
                f"{manifest.folder} does not fit the state; only= restores some of its keys, strict=False "
                f"what fits:{problems}"
            )
        nbytes = room(plan.wanted)
        loans.append(self._stager.borrow(nbytes))
        values = read_boxes(plan.wanted, loans[0].bytes(nbytes), self._helper, rank / world)
        return plan, values, catalog


def _apply(plan: Plan, values: Values, catalog: Catalog, *, rng_too: bool) -> None:
    if plan.problems:
        problems = "; ".join(plan.problems)
        warnings.warn(f"{step_name(catalog.step)} does not fit in full: {problems}", stacklevel=5)
    for apply in plan.apply:
        apply(values)
    if rng_too and catalog.rng is not None:
        rng.put_back(catalog.rng)


def _all_damage(reports: list[Report]) -> Report:
    return {"damaged": "; ".join(dict.fromkeys(r["damaged"] for r in reports if "damaged" in r))}
