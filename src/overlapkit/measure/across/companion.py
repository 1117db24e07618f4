"""What a meter does about the other ranks: compares steps with theirs, and watches for hangs."""

from overlapkit.measure.across.judge import LOCAL
from overlapkit.measure.across.liaison import Liaison
from overlapkit.measure.across.ranks import Ranks
from overlapkit.measure.ledger import Ledger
from overlapkit.measure.sources import Coverage
from overlapkit.quorum import Quorum


class Across:
    """A meter's companion. In the training thread it notes the step and makes no call to the store.

    Args:
        ledger: Of the meter.
        every: Distance of measured steps.
    """

    def __init__(self, ledger: Ledger, every: int) -> None:
        self._liaison: Liaison | None = None
        if ledger.coverage.world > 1:
            local, unseen = _what_is_local(ledger.coverage)
            self._liaison = Liaison(ledger, every, Quorum("meter"), local, unseen)

    def enter(self, step: int) -> None:
        """A step begins."""

    def leave(self, step: int, *, whole: bool) -> None:
        """A step is over."""
        if whole and self._liaison is not None:
            self._liaison.step_ended(step)

    def close(self) -> None:
        """Compare the last steps; waits for the others, 10 s at most."""
        if self._liaison is not None:
            self._liaison.close()

    def ranks(self, patience: float = 0.0) -> Ranks | str:
        """The latest comparison; or why there is none."""
        return "single process" if self._liaison is None else self._liaison.latest(patience)


def _what_is_local(coverage: Coverage) -> tuple[tuple[str, ...], str | None]:
    """The parts of a step in which no rank waits for another, and what therefore cannot be told."""
    if "model" in coverage.taps:
        return LOCAL, None
    waiting = {"backward", "other"}
    name = coverage.names["model"]
    if name is None or "FSDP" in str(name):
        waiting.add("forward")
    reason = coverage.missing("communication")
    unseen = f"who is late within {' or '.join(sorted(waiting))} cannot be told ({reason})"
    return tuple(part for part in LOCAL if part not in waiting), unseen
