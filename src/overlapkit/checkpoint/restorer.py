"""One restore: read and check on every rank, agree, and only then put the values in place."""

import itertools
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from overlapkit.checkpoint import rng
from overlapkit.checkpoint.catalog import Catalog
from overlapkit.checkpoint.errors import DamagedCheckpoint, MismatchError, RankFailed
from overlapkit.checkpoint.finding import sound_checkpoints
from overlapkit.checkpoint.manifest import making_sense_of, read_manifest, step_folders, step_name
from overlapkit.checkpoint.match import Plan, make_plan, writers_of
from overlapkit.checkpoint.opening import check_step
from overlapkit.checkpoint.placing import Values
from overlapkit.checkpoint.reader import read_ahead, read_boxes, room
from overlapkit.checkpoint.remote.place import StorePath
from overlapkit.checkpoint.retention import Best
from overlapkit.checkpoint.stage import Stager
from overlapkit.lane import Lane
from overlapkit.pinned import PinnedBuffer
from overlapkit.quorum import Quorum, Report


class Restorer:
    """Restores the checkpoints of one directory, or of several tiers.

    Invariants:
        * All ranks restore the same checkpoint, or none.
        * A state is changed only after everything that it takes has been read and checked, on all ranks.

    Attributes:
        read_all: The last restore has read all that was in its checkpoint, in the first place.
    """

    read_all = _whole = False

    def __init__(
        self, places: Sequence[Path], best: Best | None, quorum: Quorum, stager: Stager, helper: Lane
    ) -> None:
        self._places = places
        self._best = best
        self._quorum = quorum
        self._stager = stager
        self._helper = helper
        self._calls = itertools.count()
        self._name = ""

    def begin(self) -> str:
        """A restore comes: what the ranks agree on it under."""
        self._name = f"restore/{next(self._calls)}"
        return self._name

    def restore(
        self,
        state: dict[str, Any],
        step: int | Literal["latest", "best"],
        only: tuple[str, ...] | None,
        strict: bool,
    ) -> int:
        """See `Checkpointer.restore`. It was begun, and no save may be in flight."""
        self.read_all = False
        name = self._name
        found = self._quorum.together(name, dict, lambda _: {"found": self.candidates(step)})["found"]
        damage: list[str] = []
        for candidate, place in found:
            folder = self._places[place] / step_name(candidate)
            damaged = self._restore_one(f"{name}/{candidate}/{place}", folder, state, only, strict)
            if not damaged:
                self.read_all = place == 0 and only is None and strict and self._whole
                return int(candidate)
            damage.append(damaged)
            if isinstance(step, str) or len(damage) < len(found):
                warnings.warn(f"{step_name(candidate)} is damaged and is skipped: {damaged}", stacklevel=3)
        if damage:  # nothing sound is left: starting from 0 in silence would lose the run
            raise DamagedCheckpoint("; ".join(damage))
        return 0

    def candidates(self, step: int | Literal["latest", "best"]) -> list[tuple[int, int]]:
        """The checkpoints to try, the best first: the step, and which place it is in.

        Raises:
            FileNotFoundError: There is none of this step, or none with the metric of `best`.
        """
        where = " and ".join(map(str, self._places))
        there = [(found, place) for place, root in enumerate(self._places) for found in step_folders(root)]
        there.sort(key=lambda one: (-one[0], one[1]))
        if step == "latest":
            return there
        if step == "best":
            assert self._best is not None
            if ranked := self._best.ranked(sound_checkpoints(*self._places)):
                return [one for best in ranked for one in there if one[0] == best]
            raise FileNotFoundError(
                f"step='best': no checkpoint in {where} has {self._best.metric!r} among its metrics"
            )
        wanted = [one for one in there if one[0] == check_step(step)]
        if not wanted:
            steps = sorted({found for found, _ in there})
            raise FileNotFoundError(
                f"step={step}: {where} has no such checkpoint, but {steps or 'none at all'}"
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
                plan, values, catalog = done[0]
                self._put_in_place(f"{key}/place", plan, values, catalog, only is None)
                self._whole = catalog.world == self._quorum.world
            return damaged
        finally:
            done.clear()
            for loan in loans:
                loan.give_back()

    def _put_in_place(self, key: str, plan: Plan, values: Values, catalog: Catalog, rng_too: bool) -> None:
        def work() -> Report:
            _apply(plan, values, catalog, rng_too=rng_too)
            return {}

        try:
            self._quorum.together(key, work, lambda _: {})
        except RankFailed as error:
            error.add_note(
                f"overlapkit: here {step_name(catalog.step)} is in place, there in part: build both anew"
            )
            raise

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
        mine = f"rank-{rank if world == manifest.world else 0:05d}.safetensors"
        if only is None and mine in manifest.files and not isinstance(folder, StorePath):
            self._helper.submit(partial(read_ahead, manifest.inside / mine))
        catalog = Catalog(manifest, rank, world, writers_of(state) if world > 1 else None)
        plan = make_plan(state, catalog, only, self._helper)
        if not catalog.whole and (plan.problems or not catalog.covers(plan.wanted)):
            catalog = Catalog(manifest, rank, world)  # the state is laid out in another way than it was
            plan = make_plan(state, catalog, only, self._helper)
        if plan.problems and strict:
            problems = "".join(f"\n    {problem}" for problem in plan.problems)
            raise MismatchError(
                f"{manifest.folder} does not fit the state; only= restores some of its keys, strict=False "
                f"what fits:{problems}"
            )
        if only is None and catalog.rng is not None:
            with making_sense_of(manifest.folder, "states of random generators that can be set: use only="):
                rng.check(catalog.rng)
        nbytes = room(plan.wanted)
        loans.append(self._stager.borrow(nbytes))
        values = read_boxes(plan.wanted, loans[0].bytes(nbytes), self._helper, rank / world)
        return plan, values, catalog


def _apply(plan: Plan, values: Values, catalog: Catalog, *, rng_too: bool) -> None:
    if plan.problems:
        problems = "; ".join(plan.problems)
        warnings.warn(f"{step_name(catalog.step)} does not fit in full: {problems}", stacklevel=8)
    for apply in plan.apply:
        try:
            apply(values)
        except Exception as error:  # of an object's own load_state_dict: nothing can be undone
            error.add_note(
                f"overlapkit: raised while {step_name(catalog.step)} was put into the state, which is now "
                "restored in part: build it anew"
            )
            raise
    if rng_too and catalog.rng is not None:
        rng.put_back(catalog.rng)


def _all_damage(reports: list[Report]) -> Report:
    return {"damaged": "; ".join(dict.fromkeys(r["damaged"] for r in reports if "damaged" in r))}
