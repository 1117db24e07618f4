"""The global gradient norm and clipping by it, over plain tensors and DTensors, without a host sync."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from overlapkit import launch
from overlapkit.optim.arguments import check_clip
from overlapkit.optim.columns import FP32, PLAIN
from overlapkit.optim.gradients import as_placed, check_dense
from overlapkit.optim.place import is_partial, shards_over
from overlapkit.optim.state import Form, is_dense, local
from overlapkit.optim.table import Entry, Table

_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds the same to the norm that it divides by


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for plain tensors and DTensors on any mixture of meshes.

    On a GPU two launches for all gradients of all dtypes, and no host synchronisation. `AdamW(max_norm=...)`
    does the same inside its step, without writing the gradients.

    Args:
        parameters: Parameters, those without a gradient included, on one device.
        max_norm: The largest norm allowed.
        norm_type: 2 or inf.
        error_if_nonfinite: Raise where the norm is not finite; waits for the device.
        foreach: Accepted as torch accepts it; there is one way to compute here.

    Returns:
        The norm before clipping, a plain 0-d tensor, the same on every rank.

    Raises:
        ValueError: `max_norm` or `norm_type` is not allowed.
        RuntimeError: A gradient is sparse; the norm is not finite and `error_if_nonfinite` is set.
    """
    check_clip(max_norm, norm_type)
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in listed if p.grad is not None]
    check_dense(grads)
    clipped = None if error_if_nonfinite else _in_two_launches(grads, max_norm, norm_type)
    if clipped is not None:
        return clipped
    norm = global_norm(grads, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the gradients' norm of type {norm_type} is {norm.item()}: leave error_if_nonfinite out to clip "
            "all the same, or find what made it"
        )
    clip_by_global_norm_(grads, max_norm, norm)
    return norm


def global_norm(grads: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients taken as one vector.

    DTensors on different meshes cannot enter one torch operation, so each mesh gives its own norm, and
    these are the elements of the last one. On sharded gradients this is one all-reduce of one number per
    mesh and mesh dimension.

    Args:
        grads: Gradients, floating point, any shapes, on one device.
        norm_type: 2 or inf.

    Returns:
        A plain 0-d tensor on the gradients' device, the same on every rank; zero where there are none.
    """
    if float(norm_type) != 2.0:
        return _largest(grads)
    by_mesh: dict[Any, list[Tensor]] = defaultdict(list)
    for grad in grads:
        by_mesh[getattr(grad, "device_mesh", None)].append(grad)
    norms = [_plain(_norm(group)) for group in by_mesh.values()]
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
    factor = clip_factor(max_norm, norm)
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for grad in grads:
        here = local(grad)
        by_device[here.device].append(here)
    for device, together in by_device.items():
        torch._foreach_mul_(together, factor.to(device))


def clip_factor(max_norm: float, norm: Tensor) -> Tensor:
    """min(1, max_norm / norm), 0-d."""
    return torch.clamp(max_norm / (norm + _EPS), max=1.0)


def _in_two_launches(grads: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor | None:
    """Clip through the kernels, or return None: they take dense gradients on one device, no partial sums."""
    flat = [local(grad) for grad in grads]
    if len({g.device for g in flat}) != 1 or not all(launch.through_triton(g) and is_dense(g) for g in flat):
        return None
    if any(map(is_partial, grads)):
        return None
    from overlapkit.optim.raw import launcher

    largest = float(norm_type) != 2.0
    form = Form(PLAIN, FP32, False)
    table = Table([Entry(grad, form, {}, 0, 0) for grad in grads], flat)
    table.refresh(flat, [g.data_ptr() for g in flat], (), max_norm)
    sums = summed_over_meshes(launcher.squares(table, largest=largest), table.meshes, largest=largest)
    norm = launcher.multiply(table, sums, largest=largest)
    torch.autograd.graph.increment_version([*grads, *flat])
    return norm


def summed_over_meshes(
    sums: Tensor, meshes: Sequence[tuple[Any, tuple[int, ...]] | None], *, largest: bool = False
) -> Tensor:
    """Sums of squares of shards, one row for each mesh (M, P), such that all that is returned adds up.

    Each row is added up over the ranks between which its gradients are sharded; what is replicated is
    not. Without shards there is nothing to do, and no launch.
    """
    if all(mesh is None for mesh in meshes):
        return sums
    totals = sums.view(torch.int32).amax(1) if largest else sums.sum(1)  # bits order NaN above all numbers
    op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
    for row, found in enumerate(meshes):
        if found is not None:
            mesh, dims = found
            for dim in dims:
                torch.distributed.all_reduce(totals[row], op, group=mesh.get_group(dim))
    return totals.view(torch.float32)


def _norm(grads: list[Tensor]) -> Tensor:
    """Of half-precision gradients in fp32: a norm in bf16 has two digits."""
    if any(grad.dtype in (torch.bfloat16, torch.float16) for grad in grads):
        norms = [torch.linalg.vector_norm(grad, dtype=_wide(grad)).to(grads[0].device) for grad in grads]
        whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return whole
    return torch.nn.utils.get_total_norm(grads)


def _largest(grads: Sequence[Tensor]) -> Tensor:
    """The infinity norm, fp32. torch's has none where a tensor, or a rank's part of it, is empty."""
    by_mesh: dict[Any, list[Tensor]] = defaultdict(list)
    for grad in grads:
        whole = as_placed(grad, grad) if not is_partial(grad) else _plain(grad)
        if whole.numel():
            largest = torch.linalg.vector_norm(whole, float("inf"), dtype=_wide(whole)).float()
        else:
            largest = torch.zeros((), device=whole.device)
        by_mesh[None if is_partial(grad) else shards_over(grad)].append(largest)
    if not by_mesh:
        return torch.zeros(())
    rows = torch.stack([torch.stack(found).amax() for found in by_mesh.values()])
    return summed_over_meshes(rows[:, None], list(by_mesh), largest=True).amax()


def _wide(grad: Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)


def _plain(norm: Tensor) -> Tensor:
    """The whole value of a norm that is still a DTensor, partial over its mesh."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
