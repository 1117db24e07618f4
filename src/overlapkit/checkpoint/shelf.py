"""What is in a checkpointer's directory; asking changes nothing there."""

from overlapkit.checkpoint.deletion import Deleting
from overlapkit.checkpoint.finding import sound_checkpoints
from overlapkit.checkpoint.manifest import step_folders
from overlapkit.checkpoint.opening import check_step, check_which
from overlapkit.checkpoint.retention import Best
from overlapkit.checkpoint.tiers import Tiers
from overlapkit.checkpoint.verification import verify


class Shelf:
    """The part of Checkpointer that looks. It may be asked on one rank alone."""

    _tiers: Tiers
    _best: Best | None
    _deletion: Deleting

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, ascending: those with a sound manifest and all files."""
        return list(sound_checkpoints(*self._tiers.places))

    def latest(self) -> int | None:
        """The highest of `steps()`, or None."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step of the best of `steps()` by the metric of `best=`, or None where none has it.

        Raises:
            ValueError: This checkpointer was made without `best=`.
        """
        check_which("best", self._best)
        assert self._best is not None
        return next(iter(self._best.ranked(sound_checkpoints(*self._tiers.places))), None)

    def verify(self, step: int) -> None:
        """Read a whole checkpoint against its checksums, wherever it is.

        Raises:
            FileNotFoundError: There is none of this step.
            DamagedCheckpoint: Something differs; the message names file, tensor and bytes.
        """
        step, places = check_step(step), self._tiers.places
        there = [place for place in places if step in step_folders(place)]
        for place in there or places[-1:]:
            verify(place, step)
        if there[0] == places[0]:
            self._deletion.read_whole(step)
