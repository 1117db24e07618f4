"""One start of all ranks of a job, by what they wrote down."""

from dataclasses import dataclass, field
from typing import Any

Records = list[dict[str, Any]]


@dataclass
class Life:
    """One start of all ranks.

    Attributes:
        name: For messages, "life.restart".
        world: Ranks.
        ranks: Their records.
        flipped: Steps whose checkpoint had a byte flipped before it began, and was not written again.
        faults: What hit it: kind and rank.
        spoilt: The data shard that it had to refuse.
        output: What it printed.
    """

    name: str
    world: int
    ranks: dict[int, Records]
    flipped: set[int] = field(default_factory=set)
    faults: list[tuple[str, int]] = field(default_factory=list)
    spoilt: str = ""
    output: str = ""

    @property
    def restored(self) -> int | None:
        """The step that it began at; None where not every rank came so far."""
        begun = [one["step"] for one in self.of("start")]
        return begun[0] if len(begun) == self.world else None

    def of(self, kind: str) -> Records:
        """The records of a kind, by rank."""
        return [one for rank in sorted(self.ranks) for one in self.ranks[rank] if one["kind"] == kind]

    def steps(self) -> dict[int, Records]:
        """For each step that all ranks have ended their records of it."""
        taken: dict[int, Records] = {}
        for one in self.of("step"):
            taken.setdefault(one["step"], []).append(one)
        return {step: records for step, records in taken.items() if len(records) == self.world}
