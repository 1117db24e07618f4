"""torch.autocast's rule for functions that it keeps in float32."""

import torch
from torch import Tensor


def result_dtype(x: Tensor) -> torch.dtype:
    """The dtype of x; inside torch.autocast on CUDA float32, as that has it for norms and softmax."""
    if x.is_cuda and x.dtype != torch.float64 and torch.is_autocast_enabled("cuda"):
        return torch.float32
    return x.dtype
