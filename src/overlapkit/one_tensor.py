"""torch.distributed's collectives of one tensor a rank, by the names that this torch has.

torch 2.13 renamed both, and warns of the former names.
"""

from typing import Any

import torch.distributed as dist

all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
