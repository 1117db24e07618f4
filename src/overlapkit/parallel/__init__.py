"""Lane 4: communication that hides behind compute."""

from overlapkit.parallel.ddp import replicate
from overlapkit.parallel.description import Description, UnitRow
from overlapkit.parallel.fsdp import describe, shard
from overlapkit.parallel.shard_plan import ShardPlan

__all__ = [
    "Description",
    "ShardPlan",
    "UnitRow",
    "describe",
    "replicate",
    "shard",
]
