"""Gradients as the kernels read them: this rank's part, in the parameter's layout, in one of three dtypes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from overlapkit.optim.state import local

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def laid_out(param: Tensor, grad: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Tensor:
    """This rank's part of a gradient, in the layout of the parameter's; itself wherever it is so already.

    Of another dtype than those given, it becomes the first of them.
    """
    here, found = local(param), as_placed(param, grad)
    if found.dtype not in dtypes:
        found = found.to(dtypes[0])
    if found.stride() == here.stride() or (found.is_contiguous() and here.is_contiguous()):
        return found
    like = torch.empty_like(here, dtype=found.dtype, memory_format=torch.preserve_format, requires_grad=False)
    return like.copy_(found)


def as_placed(param: Tensor, grad: Tensor) -> Tensor:
    """This rank's part of a gradient, on the placements of its parameter."""
    if local(grad) is grad:
        return grad
    sharded: Any = grad
    like: Any = param
    if local(param) is not param and sharded.placements != like.placements:
        sharded = sharded.redistribute(placements=like.placements)
    found: Any = sharded._local_tensor
    whole: Tensor = found.wait() if hasattr(found, "wait") else found  # a collective may not have ended
    return whole


def check_dense(grads: Sequence[Tensor]) -> None:
    """Refuse gradients that have no place for most of their elements.

    Raises:
        RuntimeError: One is sparse.
    """
    if {grad.layout for grad in grads} - {torch.strided}:
        raise RuntimeError("AdamW does not support sparse gradients: use torch.optim.SparseAdam")
