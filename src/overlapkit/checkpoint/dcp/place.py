"""Where a checkpoint is: a path that ends in step-N, so that a Checkpointer of the folder above finds it."""

import os
from pathlib import Path

from overlapkit.checkpoint.manifest import step_of
from overlapkit.checkpoint.opening import check_path


def checkpoint_path(checkpoint_id: object) -> Path:
    """A checkpoint_id, or the path of a writer or reader, as a Path.

    Raises:
        TypeError: It is no path.
        ValueError: It does not end in step-N.
        NotImplementedError: It is the URL of an object store.
    """
    check_path("checkpoint_id", checkpoint_id)
    path = Path(os.fsdecode(checkpoint_id))  # type: ignore[arg-type]  # check_path has looked
    if step_of(path.name) is None:
        raise ValueError(
            f"checkpoint_id={os.fspath(path)!r}: give a path that ends in step- and a number, such as "
            f"{os.fspath(path / 'step-100')!r}: overlapkit knows checkpoints by their step"
        )
    return path


class AtStep:
    """What DCP asks a writer and a reader about their place."""

    _path: Path | None

    @property
    def checkpoint_id(self) -> str | None:
        """The checkpoint that is written or read; DCP's logs show it."""
        return None if self._path is None else os.fspath(self._path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path that ends in step-N."""
        try:
            checkpoint_path(checkpoint_id)
        except (TypeError, ValueError, NotImplementedError):
            return False
        return True
