"""How often a save is due: at every call, or at multiples of a step."""

from overlapkit.checkpoint.save import Save
from overlapkit.quorum import Report


class Every:
    """When saves are due. All methods but `enter` are there for Auto, which measures.

    Args:
        every: A number of steps, or None for every call.
    """

    def __init__(self, every: int | None = None) -> None:
        self._every = every

    def enter(self, call: int, step: int) -> bool:
        """A call of `save` begins; whether it is due."""
        return self._every is None or step % self._every == 0

    def leave(self, save: Save | None, busy: bool) -> None:
        """A call of `save` ends; `busy` where saves are unfinished."""

    def report(self) -> Report:
        """What this rank says of itself beside its share of a save."""
        return {}

    def decide(self, call: int, took_s: float, reports: list[Report]) -> Report:
        """What rank 0 makes of all ranks' reports; call and seconds are those of a save just committed."""
        return {}

    def follow(self, verdict: Report) -> None:
        """Take over what rank 0 decided."""
