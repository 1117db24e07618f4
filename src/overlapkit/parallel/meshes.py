"""Which ranks a model is sharded over: the mesh, the numbers that stand for one, and what must agree."""

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from overlapkit.device import has_process_group, rank_and_world
from overlapkit.parallel.tensor_parallel import is_split

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def resolve_mesh(model: nn.Module, mesh: Any, ignored: set[nn.Parameter]) -> "DeviceMesh | None":
    """The mesh to use; None where this process has no group and needs none.

    Raises:
        RuntimeError: WORLD_SIZE is set above 1 and there is no process group.
    """
    rank_and_world()
    if mesh is None and not has_process_group():
        return None
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh={mesh!r}: give a torch DeviceMesh (init_device_mesh makes one), or None")
    _check_split(model, mesh)
    devices = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    if mesh is None:
        nccl = "nccl" in torch.distributed.get_backend_config()
        device_type = "cuda" if "cuda" in devices or (nccl and torch.cuda.is_available()) else "cpu"
        mesh = init_device_mesh(device_type, (torch.distributed.get_world_size(),))
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions: give one (FSDP) or two (HSDP: copies, then shards); "
            "take a part of a larger mesh by its names, as in mesh['replicate', 'shard']"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError(
            "mesh has two dimensions without names: "
            "init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))"
        )
    if mesh.device_type == "cpu" and devices - {"cpu"}:
        raise ValueError(
            f"mesh is on 'cpu' and the parameters on {sorted(devices)}: make the mesh with "
            "init_device_mesh('cuda', ...), or move the model to the CPU first"
        )
    stray = [p for p in ignored if p.device.type not in (mesh.device_type, "meta")]
    if stray:
        raise ValueError(
            f"ignored: a parameter of shape {tuple(stray[0].shape)} is on '{stray[0].device}' and the mesh "
            f"on '{mesh.device_type}'; ignored parameters are not moved: move them first"
        )
    checked: DeviceMesh = mesh
    return checked


def check_current_gpu(model: nn.Module, mesh: "DeviceMesh | None") -> None:
    """Refuse a model on this rank's own GPU while another one is current, to which FSDP2 would move it.

    A mesh makes the GPU of LOCAL_RANK the current one, but not where CUDA is in use already, by this model.

    Raises:
        ValueError: It is so: without this all ranks of a node would meet on the first GPU.
    """
    if mesh is None or mesh.device_type != "cuda":
        return
    own = f"cuda:{os.environ.get('LOCAL_RANK')}"
    if own not in {str(parameter.device) for parameter in model.parameters()}:
        return
    current = f"cuda:{torch.cuda.current_device()}"
    if current != own:
        raise ValueError(
            f"model is on '{own}', this rank's GPU by LOCAL_RANK, and the current one, to which FSDP2 moves "
            f"it, is '{current}': call torch.cuda.set_device('{own}') before the model is made"
        )


def count_ranks(ranks: Any, mesh: "DeviceMesh | None") -> tuple[int, int]:
    """Copies of each shard, and shards of each parameter.

    Args:
        ranks: What the user asks for instead of a mesh, or None.
        mesh: Or None.
    """
    if ranks is None:
        return (1, 1) if mesh is None else (mesh.size(0) if mesh.ndim == 2 else 1, mesh.size(-1))
    pair = ranks if isinstance(ranks, tuple) else (1, ranks)
    if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in pair):
        raise ValueError(f"ranks={ranks!r}: give a number of ranks, or (copies, shards) as of a 2-D mesh")
    return pair


def from_all(mesh: "DeviceMesh", value: Any) -> list[Any]:
    """What each rank of the mesh gives, in the order of `mesh.mesh.flatten()`; all of them call this.

    Args:
        mesh: Of any number of dimensions.
        value: A small object that can be pickled.
    """
    found: list[Any] = [value]
    if "fake" in torch.distributed.get_backend_config():
        return found * mesh.size()  # nobody answers
    for dim in reversed(range(mesh.ndim)):
        gathered: list[Any] = [None] * mesh.size(dim)
        torch.distributed.all_gather_object(gathered, found, group=mesh.get_group(dim))
        found = [each for part in gathered for each in part]
    return found


def must_agree(mesh: "DeviceMesh", value: str, what: str, remedy: str) -> None:
    """Refuse to go on, on every rank of the mesh, where a value is not the same on all of them.

    Args:
        mesh: All its ranks call this.
        value: Short.
        what: It is a digest of.
        remedy: What to do where it differs.

    Raises:
        ValueError: It is not the same; names the ranks whose value is not that of the mesh's first one.
    """
    found = from_all(mesh, value)
    ranks = mesh.mesh.flatten().tolist()
    odd = [rank for rank, each in zip(ranks, found, strict=True) if each != found[0]]
    if odd:
        raise ValueError(
            f"rank(s) {', '.join(map(str, odd))} differ from rank {ranks[0]} in {what}: {remedy}"
        )


def _check_split(model: nn.Module, mesh: "DeviceMesh | None") -> None:
    """Refuse a mesh that does not go with the one over which parameters are split already.

    Raises:
        ValueError: They are split and `mesh` is missing, has no names, or shares a dimension with theirs.
    """
    for name, parameter in model.named_parameters():
        if not is_split(parameter):
            continue
        split: Any = parameter
        taken = split.device_mesh.mesh_dim_names
        remedy = (
            "make one mesh for both, as in mesh = init_device_mesh(device, (data, tensor), mesh_dim_names="
            "('dp', 'tp')), and give parallelize_module mesh['tp'] and this call mesh['dp']"
        )
        if mesh is None or mesh.mesh_dim_names is None or taken is None:
            raise ValueError(
                f"parameter {name} is split over a mesh{f' {taken}' if taken else ''} already, and mesh "
                f"{'is not given' if mesh is None else 'or that one has no names'}: {remedy}"
            )
        if both := sorted({*taken} & {*mesh.mesh_dim_names}):
            raise ValueError(
                f"parameter {name} is split over the mesh dimensions {taken} already, and mesh has "
                f"{both[0]!r}, too: {remedy}"
            )
