"""How far the consumer has come in a source, as a value that a checkpoint can keep."""

from dataclasses import dataclass
from typing import Any

from overlapkit.input.checks import is_integer

FORMAT = 1


@dataclass(slots=True)
class Position:
    """Counts what the consumer has taken, never what was read ahead.

    Attributes:
        taken: Batches (an elastic source: samples of all ranks) taken since the epoch began; 0 between
            epochs.
        epoch: The epoch that the sampler was set to, or None where it has no epochs.
        order: What brings the epoch's order back, as the source recorded it when the epoch began.
        mark: What the source noted with the last batch taken, or a function that works it out.
        again: The next batch has been taken, too: it is read again, to stand in where this rank has no more
            batches and others have.
        drawn: [rank, number of ranks], and the states that the dataset's own generators had there behind the
            last batch taken; a function that works this out; or None.
    """

    taken: int = 0
    epoch: int | None = None
    order: Any = None
    mark: Any = None
    again: bool = False
    drawn: Any = None

    @property
    def begun(self) -> bool:
        """Whether a batch of the epoch has been taken."""
        return self.taken > 0 or self.again

    def left_out(self, epoch: int | None, unit: str) -> str:
        """What to say where the rest of this position's epoch is left out for another epoch."""
        return (
            f"the loaded state stands after {unit} {self.taken} of epoch {self.epoch}, but epoch {epoch} was "
            "set: the rest of that epoch is left out. Start at the state's epoch to go on in it"
        )

    @property
    def noted(self) -> Any:
        """The mark, worked out."""
        return _worked_out(self.mark)

    @property
    def states(self) -> Any:
        """`drawn`, worked out."""
        return _worked_out(self.drawn)

    def state_dict(self, kind: str) -> dict[str, Any]:
        """Plain values and uint8 tensors."""
        return {
            "format": FORMAT,
            "source": kind,
            "taken": self.taken,
            "epoch": self.epoch,
            "order": self.order,
            "mark": self.noted,
            "again": self.again,
            "drawn": self.states,
        }

    @classmethod
    def from_state(cls, state: Any, kind: str) -> "Position":
        """The position that `state_dict` described.

        Raises:
            TypeError: It is no dict.
            ValueError: Another kind of source, or another version of overlapkit, wrote it; or it is damaged.
        """
        if not isinstance(state, dict):
            raise TypeError(
                f"state is a {type(state).__name__}: give what DeviceLoader.state_dict() returned"
            )
        if state.get("format") != FORMAT:
            raise ValueError(
                f"state has format {state.get('format')!r}, this version of overlapkit reads {FORMAT}: "
                "give what DeviceLoader.state_dict() returned"
            )
        if state.get("source") != kind:
            raise ValueError(
                f"state was saved over a source of the kind {state.get('source')!r}, this one is {kind!r}: "
                "build the DeviceLoader over the same kind of source as when it was saved"
            )
        if missing := sorted({"taken", "epoch", "order", "mark"} - state.keys()):
            raise ValueError(f"state lacks {', '.join(missing)}: it is damaged")
        taken, epoch = state["taken"], state["epoch"]
        again, drawn = state.get("again", False), state.get("drawn")  # a state of an earlier version has none
        if not is_integer(taken) or taken < 0:
            raise ValueError(f"state has taken={taken!r}: it is damaged, for what was taken is a count")
        if epoch is not None and not is_integer(epoch):
            raise ValueError(f"state has epoch={epoch!r}: it is damaged, for an epoch is an integer or None")
        if not isinstance(again, bool):
            raise ValueError(f"state has again={again!r}: it is damaged, for that is True or False")
        if drawn is not None and not (isinstance(drawn, list) and [*map(type, drawn)] == [list, list]):
            raise ValueError(f"state has drawn={drawn!r:.80}: it is damaged")
        epoch = epoch if epoch is None else int(epoch)
        return cls(int(taken), epoch, state["order"], state["mark"], again, drawn)


def _worked_out(value: Any) -> Any:
    return value() if callable(value) else value
