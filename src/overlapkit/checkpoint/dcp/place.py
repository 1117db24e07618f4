"""Where a checkpoint is: a path or URL that ends in step-N, below a Checkpointer's directory."""

import os
from pathlib import Path
from typing import NamedTuple

from overlapkit.checkpoint.manifest import step_name, step_of
from overlapkit.checkpoint.opening import check_place
from overlapkit.checkpoint.remote.store import place_of
from overlapkit.device import has_process_group, rank_and_world


class Place(NamedTuple):
    """A checkpoint: the directory that it is in, and its step."""

    root: Path
    step: int

    @property
    def folder(self) -> Path:
        """The checkpoint."""
        return self.root / step_name(self.step)


def checkpoint_place(checkpoint_id: object) -> Place:
    """Where a checkpoint_id, or the path of a writer or reader, is.

    Raises:
        TypeError: It is no path.
        ValueError: It does not end in step-N, or there is no such kind of store.
        ImportError: What reads this kind of store is not installed.
    """
    check_place("checkpoint_id", checkpoint_id)
    text = os.fsdecode(checkpoint_id).rstrip("/")  # type: ignore[arg-type]  # check_place has looked
    above, _, name = text.rpartition("/")
    step = step_of(name)
    if step is None:
        raise ValueError(
            f"checkpoint_id={text!r}: give a path that ends in step- and a number, such as "
            f"'{text}/step-100': overlapkit knows checkpoints by their step"
        )
    return Place(place_of(above or ("/" if text.startswith("/") else ".")), step)


def place_or_refusal(checkpoint_id: object) -> Place | Exception:
    """`checkpoint_place`; with several ranks its error, to be raised where DCP tells the other ranks of it.

    At construction, and at the beginning of a save or a load, it does not: they would wait in a collective.
    """
    try:
        return checkpoint_place(checkpoint_id)
    except Exception as error:
        if has_process_group() and rank_and_world()[1] > 1:
            return error
        raise


class AtStep:
    """What DCP asks a writer and a reader about their place."""

    _place: Place | Exception | None

    @property
    def checkpoint_id(self) -> str | None:
        """The checkpoint that is written or read; DCP's logs show it."""
        return str(self._place.folder) if isinstance(self._place, Place) else None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path or URL that ends in step-N."""
        try:
            checkpoint_place(checkpoint_id)
        except (TypeError, ValueError, NotImplementedError, ImportError):
            return False
        return True
