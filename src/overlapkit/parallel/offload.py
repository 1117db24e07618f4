"""`shard(offload=...)`: parameters, gradients and optimizer state kept in host memory between their uses."""

import weakref
from typing import TYPE_CHECKING, Any

import torch.nn as nn

from overlapkit.warn import warn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import OffloadPolicy


offloaded: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""The models whose shards `shard` keeps in host memory."""


def resolve_offload(offload: Any, mesh: "DeviceMesh | None") -> "OffloadPolicy | None":
    """The policy for fully_shard, or None where nothing is offloaded.

    True pins the host memory where there is a GPU to copy to; on a CPU mesh, where everything is in host
    memory anyway, it runs through the same code and pins nothing.

    Raises:
        TypeError: It is neither a bool nor an OffloadPolicy.
        ValueError: There is no process group, or memory cannot be pinned for this mesh.
    """
    if offload is False:
        return None
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    if offload is not True and not isinstance(offload, OffloadPolicy):
        raise TypeError(
            f"offload={offload!r}: give True, False, or a torch.distributed.fsdp.CPUOffloadPolicy"
        )
    if mesh is None:
        raise ValueError(
            f"offload={offload!r} needs a process group, and this process has none: launch with torchrun "
            "(--nproc-per-node 1 for one)"
        )
    on_gpu = mesh.device_type != "cpu"
    policy = CPUOffloadPolicy(pin_memory=on_gpu) if offload is True else offload
    if isinstance(policy, CPUOffloadPolicy):
        if policy.pin_memory and not on_gpu:
            raise ValueError(
                f"offload={offload!r} pins memory, and the mesh is on 'cpu', where nothing is copied to a "
                "GPU: give True, which pins only where there is one, or CPUOffloadPolicy(pin_memory=False)"
            )
        if on_gpu:
            _warn_without_host_backend()
    return policy


def _warn_without_host_backend() -> None:
    import torch.distributed as dist

    backends = dist.get_backend_config()
    if "cpu" not in backends:
        warn(
            f"offload: the process group's backends are {backends!r}, none for the CPU: norms of gradients "
            "in host memory cannot be reduced over the ranks, so clipping fails. Give "
            "init_process_group('cpu:gloo,cuda:nccl'), or no backend at all"
        )
