"""Lane 6: saves that run beside the step, and restores that find either a whole checkpoint or none."""

from overlapkit.checkpoint.checkpointer import Checkpointer
from overlapkit.checkpoint.contents import Contents, TensorEntry, describe
from overlapkit.checkpoint.differences import Difference, TensorDifference, diff
from overlapkit.checkpoint.errors import CheckpointError, DamagedCheckpoint, MismatchError, RankFailed
from overlapkit.checkpoint.exchange.exporting import Exported, export
from overlapkit.checkpoint.exchange.importing import import_checkpoint
from overlapkit.checkpoint.exchange.pretrained import Loaded, load_pretrained
from overlapkit.checkpoint.listing import Listed, list_checkpoints
from overlapkit.checkpoint.save import Save
from overlapkit.checkpoint.verification import Damage, verify

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
    "Save",
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
