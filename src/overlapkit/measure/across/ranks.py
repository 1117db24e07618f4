"""What is known of all ranks together: the part of a StepReport that every rank has alike."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from overlapkit.measure.across.sequence import Mismatch


@dataclass(frozen=True, slots=True)
class RankPart:
    """One part of a step on all ranks. Milliseconds a step.

    Attributes:
        median_ms: Of the ranks' means.
        worst_ms: The largest of them.
        worst_rank: Whose it is.
        skew_ms: Worst less median.
    """

    median_ms: float
    worst_ms: float
    worst_rank: int
    skew_ms: float


@dataclass(frozen=True, slots=True)
class LateRank:
    """A rank that others waited for.

    Attributes:
        rank: Of the job.
        steps: In how many steps it was the latest, by enough to matter.
        of: Steps that were compared.
        late_ms: How late, on the mean of these steps.
        phase: The part of the step in which it took longer than the median rank: one of `judge.LOCAL`, or
            None where its local times explain less than half.
        excess_ms: How much longer, on the mean of these steps.
        at: The collective at which others most often waited for it, and the phase in which it came to it;
            None where collectives are not known.
    """

    rank: int
    steps: int
    of: int
    late_ms: float
    phase: str | None
    excess_ms: float
    at: str | None

    def __str__(self) -> str:
        text = f"rank {self.rank} in {self.steps} of {self.of} steps, {self.late_ms:.1f} ms late"
        if self.phase is not None:
            text += f", {self.excess_ms:.1f} ms of it longer in {_IN[self.phase]} than the median rank"
        elif self.at is not None:
            text += f", first at {self.at}"
        return text


_IN = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "the optimizer",
    "input": "waiting for input",
    "transfer": "the copy to the device",
    "checkpoint": "the checkpoint",
    "compilation": "torch.compile",
    "garbage": "Python's garbage collector",
    "other": "host work between the phases",
}


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks over the latest windows of steps.

    Attributes:
        world: How many there are.
        first_step: The first step that was compared, or None.
        last_step: The last.
        steps: How many were compared.
        parts: For each part of a step that was measured, median, worst rank and skew.
        collectives: At how many arrivals were compared; 0 where none are published.
        waited_ms: Of a rank, for later ones, a step; None where collectives are not known.
        late: Ranks that others waited for, the costliest first: at most one for each step.
        rotating: Whether no rank is the latest in most of the steps in which one is.
        transfer_ms: Of the exposed communication of a step, what it took once all had arrived, mean of ranks.
        waiting_ms: The rest of it: waiting for a late rank.
        period_ms: Median over ranks of the mean step.
        missing: Ranks that handed in nothing for the last window, at most 8.
        mismatches: Collectives that differ between ranks.
        unseen: What cannot be told, and why; None where all is known.
    """

    world: int
    first_step: int | None
    last_step: int | None
    steps: int
    parts: Mapping[str, RankPart]
    collectives: int
    waited_ms: float | None
    late: tuple[LateRank, ...]
    rotating: bool
    transfer_ms: float | None
    waiting_ms: float | None
    period_ms: float
    missing: tuple[int, ...]
    mismatches: tuple[Mismatch, ...]
    unseen: str | None

    @property
    def late_ms(self) -> float:
        """What lateness costs a step: the mean over all compared steps."""
        return self._mean_of(self.late)

    @property
    def explained(self) -> tuple[LateRank, ...]:
        """Those of `late` that were late for what they did themselves.

        Where local times are known without waits, lateness that they do not explain is the transport's or the
        scheduler's.
        """
        if "communication" not in self.parts:
            return self.late
        return tuple(one for one in self.late if one.phase is not None)

    @property
    def explained_ms(self) -> float:
        """What the lateness of those costs a step."""
        return self._mean_of(self.explained)

    def _mean_of(self, late: tuple[LateRank, ...]) -> float:
        return sum(one.late_ms * one.steps for one in late) / self.steps if self.steps else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Ranks":
        """What `to_dict` made, after a journey as JSON."""
        made = {
            "parts": {name: RankPart(**part) for name, part in data["parts"].items()},
            "late": tuple(LateRank(**late) for late in data["late"]),
            "missing": tuple(data["missing"]),
            "mismatches": tuple(
                Mismatch(**{**one, "ranks": tuple(one["ranks"])}) for one in data["mismatches"]
            ),
        }
        return cls(**{**data, **made})
