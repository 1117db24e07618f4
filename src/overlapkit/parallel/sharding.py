"""The arguments of `shard`, checked and resolved before anything is changed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from overlapkit.device import has_process_group, rank_and_world
from overlapkit.parallel.description import Description, describe_units
from overlapkit.parallel.preconditions import check_model
from overlapkit.parallel.shard_plan import check_names, fill
from overlapkit.parallel.structure import can_forward
from overlapkit.parallel.units import Unit, find_ignored, resolve_units

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class Sharding:
    """What will be done to which model.

    Attributes:
        model: The root module.
        mesh: Over which ranks, or None in a process without a group.
        units: In forward order, the root last.
        ignored: Parameters left alone.
        policy: Dtypes, or None for the parameters' own.
        forward_prefetch: Depth.
        backward_prefetch: Depth.
        freed_after_inference: Units that forward leaves gathered, whole or among fewer ranks, for a backward
            that a forward without gradients does not have.
    """

    model: nn.Module
    mesh: "DeviceMesh | None"
    units: list[Unit]
    ignored: set[nn.Parameter]
    policy: "MixedPrecisionPolicy | None"
    forward_prefetch: int
    backward_prefetch: int
    freed_after_inference: list[Unit]

    @classmethod
    def of(
        cls,
        function: str,
        model: Any,
        mesh: Any,
        *,
        plan: Any,
        units: Any,
        mp_policy: Any,
        forward_prefetch: Any,
        backward_prefetch: Any,
        reshard: Any,
        ignored: Iterable[Any],
    ) -> "Sharding":
        """Check the arguments that the user gave to `function`, together and in full."""
        chosen = fill(
            plan,
            units=(units, "auto"),
            reshard=(reshard, "auto"),
            forward_prefetch=(forward_prefetch, 1),
            backward_prefetch=(backward_prefetch, 1),
        )
        check_model(model, function)
        if not can_forward(model):
            raise ValueError(
                f"model is a {type(model).__name__}, which has no forward: {function} takes a module "
                "that is called"
            )
        for argument in ("forward_prefetch", "backward_prefetch"):
            depth = chosen[argument]
            if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
                raise ValueError(f"{argument}={depth!r}: give the number of units to gather ahead, 0 or more")
        left_alone = find_ignored(model, ignored)
        mesh = _mesh(model, mesh, left_alone)
        _check_reshard_kind(chosen["reshard"])
        check_names(plan, model)
        resolved = resolve_units(model, chosen["units"], chosen["reshard"], left_alone)
        for unit in resolved:
            _check_reshard(unit, mesh, "reshard" if plan is None else "plan")
            _check_unit(unit)
        return cls(
            model,
            mesh,
            resolved,
            left_alone,
            _policy(mp_policy),
            chosen["forward_prefetch"],
            chosen["backward_prefetch"],
            [] if reshard is False else [unit for unit in resolved if unit.reshard is not True],
        )

    def description(self) -> Description:
        """The table of what will happen."""
        param_dtype = self.policy.param_dtype if self.policy else None
        reduce_dtype = self.policy.reduce_dtype if self.policy else None
        ranks = self.mesh.size(-1) if self.mesh is not None else 1
        return describe_units(
            self.units, self.forward_prefetch, self.backward_prefetch, ranks, param_dtype, reduce_dtype
        )


def _policy(mp_policy: Any) -> "MixedPrecisionPolicy | None":
    if mp_policy is None:
        return None
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if mp_policy == "bf16":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if isinstance(mp_policy, MixedPrecisionPolicy):
        return mp_policy
    raise ValueError(
        f"mp_policy={mp_policy!r}: give 'bf16' (bf16 parameters, fp32 reduction) or a "
        "torch.distributed.fsdp.MixedPrecisionPolicy"
    )


def _mesh(model: nn.Module, mesh: Any, ignored: set[nn.Parameter]) -> "DeviceMesh | None":
    """The mesh to use; None where this process has no group and needs none.

    Raises:
        RuntimeError: WORLD_SIZE is set above 1 and there is no process group.
    """
    rank_and_world()
    if mesh is None and not has_process_group():
        return None
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    devices = {parameter.device.type for parameter in model.parameters()}
    if mesh is None:
        nccl = "nccl" in torch.distributed.get_backend_config()
        device_type = "cuda" if "cuda" in devices or (nccl and torch.cuda.is_available()) else "cpu"
        mesh = init_device_mesh(device_type, (torch.distributed.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh={mesh!r}: give a torch DeviceMesh (init_device_mesh makes one), or None")
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
    if mesh.device_type == "cpu" and devices != {"cpu"}:
        raise ValueError(
            f"mesh is on 'cpu' and the parameters on {sorted(devices)}: make the mesh with "
            "init_device_mesh('cuda', ...), or move the model to the CPU first"
        )
    stray = [p for p in ignored if p.device.type != mesh.device_type]
    if stray:
        raise ValueError(
            f"ignored: a parameter of shape {tuple(stray[0].shape)} is on '{stray[0].device}' and the mesh "
            f"on '{mesh.device_type}'; ignored parameters are not moved: move them first"
        )
    return mesh


def _check_reshard_kind(reshard: Any) -> None:
    if reshard != "auto" and not isinstance(reshard, (int, tuple)):
        raise ValueError(f"reshard={reshard!r}: give 'auto', True, False, or a number of ranks")


def _check_reshard(unit: Unit, mesh: "DeviceMesh | None", source: str) -> None:
    if isinstance(unit.reshard, bool) or mesh is None:
        return
    shards = mesh.size(-1)
    if not 1 < unit.reshard < shards or shards % unit.reshard:
        where = f"plan: unit {unit.name}: " if source == "plan" else ""
        raise ValueError(
            f"{where}reshard={unit.reshard}: a number of ranks must divide the {shards} ranks that share a "
            "parameter, and be neither 1 (that is False) nor all of them (that is True)"
        )


def _check_unit(unit: Unit) -> None:
    """What fully_shard would refuse, half of it only in the first forward."""
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in unit.parameters.items():
        if parameter.ndim == 0:
            raise ValueError(f"parameter {name} is a scalar and cannot be sharded: give it shape (1,)")
        if not parameter.is_contiguous():
            raise ValueError(
                f"parameter {name} is not contiguous (strides {parameter.stride()}): "
                "replace it by its .contiguous()"
            )
        if parameter.requires_grad:
            dtypes.setdefault(parameter.dtype, name)
    if len(dtypes) > 1:
        raise ValueError(
            f"unit {unit.name}: its trainable parameters mix dtypes ("
            + ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
            + "); one reduction has one dtype: cast them alike and let mp_policy choose the compute dtype, "
            "list modules of one dtype as units, or put the odd ones into ignored"
        )
