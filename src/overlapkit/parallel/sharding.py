"""The arguments of `shard`, checked and resolved before anything is changed."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from overlapkit.parallel.description import Description, describe_units
from overlapkit.parallel.merging import MIN_UNIT_MB
from overlapkit.parallel.meshes import count_ranks, resolve_mesh
from overlapkit.parallel.preconditions import check_model
from overlapkit.parallel.shard_plan import check_names, fill
from overlapkit.parallel.structure import can_forward
from overlapkit.parallel.tensor_parallel import local_part
from overlapkit.parallel.units import Unit, find_ignored, prefetch_order, resolve_units

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
        copies: How many copies of each shard there are: 1, but with a 2-D mesh.
        shards: How many ranks share each parameter.
        reduce_unused: Whether a parameter without a gradient is reduced as zero; None for where torch can.
    """

    model: nn.Module
    mesh: "DeviceMesh | None"
    units: list[Unit]
    ignored: set[nn.Parameter]
    policy: "MixedPrecisionPolicy | None"
    forward_prefetch: int
    backward_prefetch: int
    copies: int
    shards: int
    reduce_unused: bool | None

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
        min_unit_mb: Any,
        reduce_unused: Any = None,
        ranks: Any = None,
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
        _check_reduce_unused(reduce_unused)
        _check_min_unit_mb(min_unit_mb, chosen["units"])
        policy = _policy(mp_policy)
        mesh = resolve_mesh(model, mesh, left_alone) if ranks is None else None
        copies, shards = count_ranks(ranks, mesh)
        _check_reshard_kind(reshard)
        check_names(plan, model)
        resolved = resolve_units(
            model,
            chosen["units"],
            chosen["reshard"],
            left_alone,
            min_unit_mb,
            policy.param_dtype if policy else None,
        )
        _check_sparse(model, left_alone)
        for unit in resolved:
            if mesh is not None or ranks is not None:
                _check_reshard(unit, shards, "plan: " if isinstance(chosen["reshard"], tuple) else "")
            _check_unit(unit)
        return cls(
            model,
            mesh,
            resolved,
            left_alone,
            policy,
            chosen["forward_prefetch"],
            chosen["backward_prefetch"],
            copies,
            shards,
            reduce_unused,
        )

    def description(self) -> Description:
        """The table of what will happen."""
        param_dtype = self.policy.param_dtype if self.policy else None
        reduce_dtype = self.policy.reduce_dtype if self.policy else None
        order = prefetch_order(self.units, self.forward_prefetch, self.backward_prefetch)
        return describe_units(self.units, order, self.copies, self.shards, param_dtype, reduce_dtype)


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


def _check_reshard_kind(reshard: Any) -> None:
    if reshard != "auto" and not isinstance(reshard, int):
        raise ValueError(f"reshard={reshard!r}: give 'auto', True, False, or a number of ranks")


def _check_reshard(unit: Unit, shards: int, source: str) -> None:
    if isinstance(unit.reshard, bool):
        return
    if not 1 < unit.reshard < shards or shards % unit.reshard:
        where = f"{source}unit {unit.name}: " if source else ""
        raise ValueError(
            f"{where}reshard={unit.reshard}: a number of ranks must divide the {shards} ranks that share a "
            "parameter, and be neither 1 (that is False) nor all of them (that is True)"
        )


def _check_min_unit_mb(min_unit_mb: Any, units: Any) -> None:
    number = isinstance(min_unit_mb, (int, float)) and not isinstance(min_unit_mb, bool)
    if not (number and math.isfinite(min_unit_mb) and min_unit_mb >= 0):
        raise ValueError(f"min_unit_mb={min_unit_mb!r}: give MiB, 0 or more; 0 leaves every block alone")
    if min_unit_mb != MIN_UNIT_MB and not isinstance(units, str):
        raise ValueError(
            f"min_unit_mb={min_unit_mb!r} merges the units that are found by structure, and here they are "
            "listed: leave it out, or put the modules that belong together into one entry of the list"
        )


def _check_reduce_unused(reduce_unused: Any) -> None:
    if not (reduce_unused is None or isinstance(reduce_unused, bool)):
        raise ValueError(f"reduce_unused={reduce_unused!r}: give True, False, or None for the usual rule")
    if reduce_unused:
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ValueError(
                f"reduce_unused=True needs torch 2.13, this is {torch.__version__}: update, or have every "
                "rank use every parameter in each step"
            )


def _check_sparse(model: nn.Module, ignored: set[nn.Parameter]) -> None:
    for name, module in model.named_modules():
        table = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        if table and module.weight.requires_grad and module.weight not in ignored:
            raise ValueError(
                f"model.{name} has sparse gradients, which FSDP2 cannot reduce: make it with sparse=False, "
                "or use replicate over gloo"
            )


def _check_unit(unit: Unit) -> None:
    """What fully_shard would refuse, half of it only in the first forward."""
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in unit.parameters.items():
        if parameter.ndim == 0:
            raise ValueError(f"parameter {name} is a scalar and cannot be sharded: give it shape (1,)")
        if not local_part(parameter).is_contiguous():
            raise ValueError(
                f"parameter {name} is not contiguous (strides {parameter.stride()}): "
                "replace it by its .contiguous()"
            )
        if parameter.requires_grad and not parameter.numel():
            raise ValueError(
                f"parameter {name} of shape {tuple(parameter.shape)} has no elements, and FSDP2 cannot "
                "reduce its gradient: freeze it, or put it into ignored"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"parameter {name} has a hook on its gradient, and shard replaces the parameter: call its "
                "register_post_accumulate_grad_hook after shard instead"
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
