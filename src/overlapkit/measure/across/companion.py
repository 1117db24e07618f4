"""What a meter does about the other ranks: compares steps with theirs, and watches for hangs."""

from overlapkit.measure.across.judge import LOCAL
from overlapkit.measure.across.liaison import Liaison
from overlapkit.measure.across.ranks import Ranks
from overlapkit.measure.across.watch import HangWatch, OnHang, beat_s
from overlapkit.measure.across.where import AwakeClock, Progress
from overlapkit.measure.ledger import Ledger
from overlapkit.measure.phases import Phases
from overlapkit.measure.sources import Coverage
from overlapkit.quorum import Quorum


class Across:
    """A meter's companion. In the training thread it notes the step and makes no call to the store.

    Args:
        ledger: Of the meter.
        phases: Of the meter.
        every: Distance of measured steps.
        hang_timeout: Seconds without progress that are a hang; None for no watch.
        on_hang: "exit", "wait" or a callable, see HangWatch.
    """

    def __init__(
        self, ledger: Ledger, phases: Phases, every: int, hang_timeout: float | None, on_hang: OnHang
    ) -> None:
        self._liaison: Liaison | None = None
        self._progress: Progress | None = None
        coverage = ledger.coverage
        if coverage.world > 1:
            self._liaison = Liaison(ledger, every, Quorum("meter"), *_what_is_local(coverage))
        if hang_timeout is not None:
            awake = AwakeClock(2 * beat_s(hang_timeout))
            self._progress = Progress(phases, coverage.taps.values(), awake)
            self._watch = HangWatch(self._progress, Quorum("hang"), hang_timeout, on_hang)

    def enter(self, step: int) -> None:
        """A step begins."""
        if self._progress is not None:
            self._progress.enter(step)

    def leave(self, step: int, *, whole: bool) -> None:
        """A step is over."""
        if self._progress is not None:
            self._progress.leave(step, whole=whole)
        if whole and self._liaison is not None:
            self._liaison.step_ended(step)

    def close(self) -> None:
        """Compare the last steps; waits for the others, 10 s at most. This rank is not watched any more."""
        if self._progress is not None:
            self._watch.close()
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
