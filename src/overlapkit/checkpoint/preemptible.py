"""The part of Checkpointer that listens to signals."""

import signal
import weakref

from overlapkit.checkpoint.opening import check_signal
from overlapkit.checkpoint.preemption import Preemption
from overlapkit.checkpoint.tiers import Tiers


class Preemptible:
    """What a signal makes a checkpointer do; Preemption has the how."""

    _tiers: Tiers
    _calls: int
    _preemption: Preemption | None = None

    def on_signal(
        self, signum: int = signal.SIGTERM, *, deadline: float = 25.0, exit_code: int | None = None
    ) -> None:
        """Save and exit when a signal comes, to this rank or any other: call it on every rank.

        All ranks save at the end of the same step, due or not: `save` must be called at the end of each. That
        call commits, closes the checkpointer, and raises SystemExit. docs/preemption.md shows a loop.

        Args:
            signum: May be called for several. A second signal changes nothing.
            deadline: Seconds from the signal until the process has ended; torchrun kills after 30. When it
                passes, the save is abandoned: the process ends with status 75 (os.EX_TEMPFAIL), and says
                on stderr which rank was late.
            exit_code: The exit status after a save; None for 128 + signum, as shells have it. torchrun
                restarts its workers (if it may) after any but 0, unless it has got the signal itself.

        Raises:
            RuntimeError: This is not the main thread, where Python runs handlers.
            ValueError: An argument is out of range, or the signal is listened to already.
        """
        self._check_open()
        code = check_signal(signum, deadline, exit_code)
        if self._preemption is None:
            self._preemption = Preemption(str(self._tiers.root), self._calls)
            weakref.finalize(self, self._preemption.close).atexit = False
        self._preemption.listen(signum, deadline, code)

    @property
    def signalled(self) -> bool:
        """Whether a signal of `on_signal` has come to some rank: a long evaluation had better end early."""
        return self._preemption is not None and self._preemption.asked

    def _check_open(self) -> None:
        raise NotImplementedError
