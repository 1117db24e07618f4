"""Lane 6: saves that run beside the step, and restores that find either a whole checkpoint or none."""

from overlapkit.checkpoint.checkpointer import Checkpointer
from overlapkit.checkpoint.errors import CheckpointError, DamagedCheckpoint, MismatchError, RankFailed
from overlapkit.checkpoint.save import Save

__all__ = ["CheckpointError", "Checkpointer", "DamagedCheckpoint", "MismatchError", "RankFailed", "Save"]
