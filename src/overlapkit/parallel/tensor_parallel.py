"""Models whose parameters are split over other ranks (`parallelize_module`) before they are sharded."""

import sys
from typing import Any

import torch


def is_split(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # not loaded: there can be none
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; another tensor itself."""
    if not is_split(tensor):
        return tensor
    split: Any = tensor
    with torch.no_grad():
        local: torch.Tensor = split.to_local()
    return local
