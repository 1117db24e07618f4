"""Lane 6: saves that run beside the step, and restores that find either a whole checkpoint or none."""

from typing import TYPE_CHECKING, Any

from overlapkit.checkpoint.checkpointer import Checkpointer
from overlapkit.checkpoint.contents import Contents, TensorEntry, describe
from overlapkit.checkpoint.differences import Difference, TensorDifference, diff
from overlapkit.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpoint,
    MismatchError,
    RankFailed,
    StoreError,
)
from overlapkit.checkpoint.exchange.exporting import Exported, export
from overlapkit.checkpoint.exchange.importing import import_checkpoint
from overlapkit.checkpoint.exchange.pretrained import Loaded, load_pretrained
from overlapkit.checkpoint.listing import Listed, list_checkpoints
from overlapkit.checkpoint.save import Save
from overlapkit.checkpoint.verification import Damage, verify

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
    "Contents",
    "Damage",
    "DamagedCheckpoint",
    "Difference",
    "Exported",
    "Listed",
    "Loaded",
    "MismatchError",
    "RankFailed",
    "SafetensorsLoadPlanner",
    "SafetensorsReader",
    "SafetensorsSavePlanner",
    "SafetensorsWriter",
    "Save",
    "StoreError",
    "TensorDifference",
    "TensorEntry",
    "describe",
    "diff",
    "export",
    "import_checkpoint",
    "list_checkpoints",
    "load_pretrained",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in __all__:  # torch.distributed.checkpoint is imported by those only who use it
        from overlapkit.checkpoint import dcp

        return getattr(dcp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
