"""Where a source whose order is a function stands: two integers, the same on every rank."""

from collections.abc import Mapping
from typing import Any

from overlapkit.input.checks import as_epoch, is_integer
from overlapkit.input.order import Order

FORMAT = 1


class Progress:
    """The epoch and position of a source, how passes follow each other, and the state that resumes them.

    Each pass is a new epoch, however the one before it ended: had it to be finished first, it would
    depend on how far a reader had read ahead. Only the first pass, and the first after `set_epoch` or
    `load_state_dict`, begins where it was told to.

    Args:
        order: Who takes which sample when.
        least: Samples of a rank that are worth a pass: an epoch with fewer left is over.
        identity: What else a position depends on, as plain values: it stands in the state, and a state that
            has another is refused.

    Attributes:
        epoch: The epoch of the latest pass, or of the one that comes next where it was set.
        position: Samples of that epoch that all ranks together have taken.
    """

    def __init__(self, order: Order, least: int = 1, identity: Mapping[str, Any] | None = None) -> None:
        self.order = order
        self._least = least
        self._identity = dict(identity or {})
        self.epoch = 0
        self.position = 0
        self._told: tuple[int, int] | None = (0, 0)  # where the next pass begins
        self._start = 0

    def begin(self) -> int:
        """Begin a pass, and return how many samples it has for this rank.

        A position at an epoch's end, where ranks cannot take `least` samples more, begins a whole epoch.
        """
        if self._told is not None:
            self.epoch, self.position = self._told  # which a pass may have moved while it was being told
        if self._told is None or self.is_over(self.position):
            self.epoch, self.position = self.epoch + 1, 0
        self._told = None
        self._start = self.position
        return self.order.share(self._start)

    def take(self, taken: int) -> None:
        """Note that this rank, as every other, has taken `taken` samples since the pass began.

        Once the next pass has been told where to begin, a pass that goes on nevertheless moves nothing.
        """
        if self._told is None:
            self.position = self.order.after(self._start, taken)

    def finish(self) -> None:
        """Note that the pass is over: what is left of its epoch is left out, by whatever number of ranks."""
        if self._told is None:
            self.position = self.order.size

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this epoch: what is left of it where it was resumed, else all of it."""
        epoch = as_epoch(epoch)
        unfinished = self._told is not None and epoch == self.epoch and not self.is_over(self.position)
        if not unfinished:
            self._tell(epoch, 0)

    def is_over(self, position: int) -> bool:
        """Whether an epoch has no pass left at a position."""
        return self.order.share(position) < self._least

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on every rank."""
        return {
            "format": FORMAT,
            "epoch": self.epoch,
            "position": self.position,
            "size": self.order.size,
            "seed": self.order.seed,
            "shuffle": self.order.shuffle,
            **self._identity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass begin where the state stands, at whatever number of ranks.

        Raises:
            TypeError: It is no dict.
            ValueError: It is damaged, or was saved in another order (size, seed, shuffle or identity).
        """
        self._tell(*self._check(state))

    def _tell(self, epoch: int, position: int) -> None:
        self.epoch, self.position = self._told = epoch, position

    def _check(self, state: Any) -> tuple[int, int]:
        if not isinstance(state, dict):
            raise TypeError(f"state is a {type(state).__name__}: give what state_dict() returned")
        own = self.state_dict()
        if missing := sorted(own.keys() - state.keys()):
            raise ValueError(f"state lacks {', '.join(missing)}: give what state_dict() returned")
        for name in own:
            if name not in ("epoch", "position") and state[name] != own[name]:
                raise ValueError(
                    f"state has {name}={state[name]!r}, this source has {own[name]!r}: its position means "
                    "another sample here. Build the source as it was when the state was saved"
                )
        epoch, position = state["epoch"], state["position"]
        whole = is_integer(epoch) and is_integer(position)
        if not whole or epoch < 0 or not 0 <= position <= self.order.size:
            raise ValueError(f"state stands at epoch {epoch!r}, position {position!r}: it is damaged")
        return int(epoch), int(position)
