"""Lane 6: saves that run beside the step, and restores that find either a whole checkpoint or none."""

from typing import TYPE_CHECKING, Any

from overlapkit.checkpoint.checkpointer import Checkpointer
from overlapkit.checkpoint.errors import CheckpointError, DamagedCheckpoint, MismatchError, RankFailed
from overlapkit.checkpoint.save import Save

if TYPE_CHECKING:
    from overlapkit.checkpoint.dcp import (
        SafetensorsLoadPlanner,
        SafetensorsReader,
        SafetensorsSavePlanner,
        SafetensorsWriter,
    )

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DamagedCheckpoint",
    "MismatchError",
    "RankFailed",
    "SafetensorsLoadPlanner",
    "SafetensorsReader",
    "SafetensorsSavePlanner",
    "SafetensorsWriter",
    "Save",
]


def __getattr__(name: str) -> Any:
    if name in __all__:  # torch.distributed.checkpoint is imported by those only who use it
        from overlapkit.checkpoint import dcp

        return getattr(dcp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
