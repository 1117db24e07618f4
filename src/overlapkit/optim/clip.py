"""The global gradient norm and clipping by it, over plain tensors and DTensors, without a host sync."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds the same to the norm that it divides by


def global_norm(grads: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients taken as one vector.

    DTensors on different meshes cannot enter one torch operation, so each mesh gives its own norm and
    the squares are added. On sharded gradients this is one all-reduce of one number per mesh and mesh
    dimension.

    Args:
        grads: Gradients, floating point, any shapes, on one device.

    Returns:
        A plain 0-d tensor on the gradients' device, the same on every rank; zero where there are none.
    """
    by_mesh: dict[Any, list[Tensor]] = defaultdict(list)
    for grad in grads:
        by_mesh[getattr(grad, "device_mesh", None)].append(grad)
    norms = [_plain(torch.nn.utils.get_total_norm(group)) for group in by_mesh.values()]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def clip_by_global_norm_(grads: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Multiply the gradients in place by min(1, max_norm / norm).

    Multiplies also where the factor is 1: asking the device whether it is would stop the host.

    Args:
        grads: Gradients, changed in place.
        max_norm: The largest norm allowed.
        norm: What `global_norm` gave, 0-d.
    """
    factor = torch.clamp(max_norm / (norm + _EPS), max=1.0)
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]  # same storage
    if local:
        torch._foreach_mul_(local, factor.to(local[0].device))


def _plain(norm: Tensor) -> Tensor:
    """The whole value of a norm that is still a DTensor, partial over its mesh."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
