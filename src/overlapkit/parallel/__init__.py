"""Lane 4: communication that hides behind compute."""

from overlapkit.parallel.accumulating import accumulate
from overlapkit.parallel.compiling import compile_blocks
from overlapkit.parallel.ddp import replicate
from overlapkit.parallel.description import Description, UnitRow
from overlapkit.parallel.fsdp import describe, shard
from overlapkit.parallel.materialize import materialize, meta_parameters
from overlapkit.parallel.recomputing import recompute
from overlapkit.parallel.shard_plan import ShardPlan
from overlapkit.parallel.weights import Scale

__all__ = [
    "Description",
    "Scale",
    "ShardPlan",
    "UnitRow",
    "accumulate",
    "compile_blocks",
    "describe",
    "materialize",
    "meta_parameters",
    "recompute",
    "replicate",
    "shard",
]
