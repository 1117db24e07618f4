"""Lane 4: communication that hides behind compute."""

from overlapkit.parallel.ddp import replicate
from overlapkit.parallel.description import Description, UnitRow
from overlapkit.parallel.fsdp import describe, shard

__all__ = ["Description", "UnitRow", "describe", "replicate", "shard"]
