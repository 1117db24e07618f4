"""What can go wrong with a checkpoint beyond a wrong argument.

CheckpointError
├── RankFailed          another rank failed, or did not report in time
├── DamagedCheckpoint   the bytes on disk are not those that were written
├── StoreError          an object store failed, or refused
└── MismatchError       the checkpoint is sound, but the state does not fit it
"""

from typing import TYPE_CHECKING

from overlapkit import quorum

if TYPE_CHECKING:
    from overlapkit.checkpoint.verification import Damage


class CheckpointError(RuntimeError):
    """Base of all errors of this package."""


class RankFailed(CheckpointError, quorum.RankFailed):
    """Another rank failed or did not report in time, so no rank went on; the message says which, and why."""


class DamagedCheckpoint(CheckpointError):
    """A file is missing, cut short, or differs from its checksum; the message names file and tensor.

    Attributes:
        damage: All damaged places, where a whole checkpoint was looked through (`verify`); else empty.
    """

    def __init__(self, message: str, damage: "tuple[Damage, ...]" = ()) -> None:
        super().__init__(message)
        self.damage = damage


class StoreError(CheckpointError):
    """A request to an object store failed to the end; the message names the object, the cause says why."""


class MismatchError(CheckpointError):
    """Missing or unexpected keys, other shapes or dtypes; the message lists them all."""
