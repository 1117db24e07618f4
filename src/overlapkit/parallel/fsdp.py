"""`shard`: FSDP2 with units found by structure, explicit prefetch, and spans of every collective."""

import hashlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch.nn as nn

from overlapkit.options import named_options
from overlapkit.parallel import compiling, recomputing
from overlapkit.parallel.description import Description
from overlapkit.parallel.leftovers import Leftovers
from overlapkit.parallel.merging import MIN_UNIT_MB
from overlapkit.parallel.meshes import check_current_gpu, must_agree
from overlapkit.parallel.offload import offloaded, resolve_offload
from overlapkit.parallel.preconditions import check_holders
from overlapkit.parallel.schedule import Schedule, first
from overlapkit.parallel.shard_plan import ShardPlan, fill
from overlapkit.parallel.sharding import Sharding
from overlapkit.parallel.thawing import train_later
from overlapkit.parallel.units import Unit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

M = TypeVar("M", bound=nn.Module)

_done: "weakref.WeakKeyDictionary[nn.Module, Description]" = weakref.WeakKeyDictionary()


@named_options
def shard(
    model: M,
    mesh: "DeviceMesh | None" = None,
    *,
    units: str | Sequence[Any] = "auto",
    plan: ShardPlan | None = None,
    mp_policy: "MixedPrecisionPolicy | str | None" = None,
    forward_prefetch: int = 1,
    backward_prefetch: int = 1,
    reshard: bool | int | str = "auto",
    recompute: str | None = None,
    compile_blocks: bool | Mapping[str, Any] = False,
    offload: "bool | OffloadPolicy" = False,
    ignored: Iterable[Any] = (),
    min_unit_mb: float = MIN_UNIT_MB,
    reduce_unused: bool | None = None,
    unshard_early: bool = False,
    reduce_scatter_buffers: int | None = None,
    separate_reduce_scatter: bool = False,
    comm_memory: str | None = None,
) -> M:
    """Recompute, compile and shard a model over the ranks of a mesh with FSDP2, in place, and return it.

    Call it before the optimizer is made, with the same weights on every rank (seed alike): each rank
    keeps its part of its own weights, nothing is broadcast. Parameters are moved to the mesh's device,
    as fully_shard does. `describe` shows what will happen.

    A process without a process group (no torchrun) has nobody to share with: only recomputation and
    compilation are applied then, so that one script serves one process and many.

    The model gets an attribute `timings`: a callable that returns the `Span`s of the collectives that
    finished since its last call. Those of "all_gather UNIT", "reduce_scatter UNIT" and, on a 2-D mesh,
    "all_reduce UNIT" have bytes and parameter names. Spans with `exposed=True` are when the step stood
    still: "wait ..." for one of these, on CUDA "reduce_scatter tail" at the end of backward, and on the CPU
    all of an all-reduce.

    On the CPU, over gloo, both collectives are direct sends, and backward does not wait for a reduce-scatter
    whose result is a new gradient. So gradients are whole when `backward` returns, as on CUDA; where some
    are kept from an earlier backward (not set to None) each reduce-scatter is waited for. docs/parallel.md.

    Args:
        model: A module with parameters, not wrapped or compiled. It may be on the meta device, whole or in
            part: then `materialize` or `load_pretrained` gives it memory and values afterwards. Its modules
            may be tensor-parallel (`parallelize_module` over another dimension of the same mesh).
        mesh: 1-D, or 2-D with names (HSDP: copies along the first dimension, shards along the second).
            None for all ranks of the default process group.
        units: "auto": each repeated block; the largest embedding, where the model has an untied output
            projection; [norm, projection] together; and everything else, tied weights included, in the
            root unit. Or a list of modules, names, or lists of those (one unit each), in forward order.
        plan: A ShardPlan: what it decides need not, and must not, be given here, too.
        mp_policy: "bf16" (bf16 parameters, fp32 reduction), a MixedPrecisionPolicy, or None.
        forward_prefetch: How many following units' all-gathers a unit starts, in the order of `units`;
            0 leaves it to FSDP2.
        backward_prefetch: How many preceding units' all-gathers a unit starts in backward; 0 for none.
        reshard: Whether parameters are freed between forward and backward. "auto": blocks and embedding
            are; the projection, needed first in backward, and the root are not. True or False: all units
            alike. A number: they stay gathered among that many ranks. After a forward without gradients all
            are freed. Without a process group nothing is freed, and any of these is right.
        recompute: "none", "full", "every:N" or "selective": see `recompute`. Each unit is gathered as often
            as without.
        compile_blocks: True, or a dict of torch.compile's keyword arguments: see `compile_blocks`.
        offload: True to keep parameters, gradients and so optimizer state in host memory, pinned where the
            mesh is on a GPU, or an OffloadPolicy. Clipping then needs a process group with a CPU backend.
        ignored: Parameters, modules or names of either that stay as they are: not sharded, moved, or
            reduced.
        min_unit_mb: With units="auto", neighbouring blocks of one list share a unit until it gathers so many
            MiB (but not more than an eighth of all blocks); 0 leaves each block alone. `merging.MIN_UNIT_MB`
            says why 8.
        reduce_unused: True: a trainable parameter to which backward gave no gradient on this rank is reduced
            as zero. False: it is left out, and where ranks differ in what they used, they hang, or add up
            gradients of different parameters (pytorch#158719). None: True from torch 2.13 on, which can.
        unshard_early: Gather what forward needs first (the root unit, or the first where the root has no
            parameters) as soon as an optimizer that has some of it returns from `step`. Worth it where
            the loop does something else before the next forward. Costs one small all-reduce a step, with
            which the ranks agree that the weights are still those that were gathered; if not, they are
            gathered again.
        reduce_scatter_buffers: How many reduce-scatters may be under way, each with its buffer, while
            backward goes on. None for torch's 1 on CUDA, and 2 on the CPU. More than 1 on CUDA needs
            torch 2.13.
        separate_reduce_scatter: A communicator of its own for the reduce-scatters, so that NCCL need not
            run them and the all-gathers in turns. Needs torch 2.13.
        comm_memory: On CUDA, "symmetric": all-gathers use NCCL's symmetric memory (torch 2.12; their spans
            are not recorded). "group": buffers come from the process group's allocator, as SHARP wants it
            (no spans are recorded). None for ordinary memory.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument's value or the model's state forbids it; the message says what to do.
        RuntimeError: WORLD_SIZE is set above 1 and there is no process group, or this torch is too old for
            an option.
    """
    policy = fill(plan, recompute=(recompute, None))["recompute"]
    recomputing.parse_policy(policy)
    compiling.parse_options(compile_blocks)
    schedule = Schedule(reduce_scatter_buffers, separate_reduce_scatter, comm_memory, unshard_early)
    sharding = Sharding.of(
        "shard",
        model,
        mesh,
        plan=plan,
        units=units,
        mp_policy=mp_policy,
        forward_prefetch=forward_prefetch,
        backward_prefetch=backward_prefetch,
        reshard=reshard,
        ignored=ignored,
        min_unit_mb=min_unit_mb,
        reduce_unused=reduce_unused,
    )
    schedule.check(sharding.mesh)
    check_current_gpu(model, sharding.mesh)
    offload_policy = resolve_offload(offload, sharding.mesh)
    check_holders(model, "shard")
    if sharding.mesh is None and mp_policy is not None:
        raise ValueError(
            f"mp_policy={mp_policy!r} needs a process group, and this process has none: launch with "
            "torchrun (--nproc-per-node 1 for one), or use torch.autocast"
        )
    if sharding.mesh is not None and hasattr(model, "timings"):
        raise ValueError("model has an attribute 'timings' already: rename it, shard puts its own there")
    description = sharding.description()
    if sharding.mesh is not None:
        must_agree(
            sharding.mesh,
            hashlib.sha256(repr((description, policy, schedule)).encode()).hexdigest(),
            "what shard is to do",
            "give it the same model, options and plan on every rank",
        )
    recomputing.recompute(model, policy)
    compiling.compile_blocks(model, compile_blocks)
    if sharding.mesh is None:
        return model
    _apply(sharding, schedule, offload_policy)
    if offload_policy is not None:
        offloaded.add(model)
    _done[model] = description
    return model


def describe(
    model: nn.Module,
    mesh: "DeviceMesh | None" = None,
    *,
    units: str | Sequence[Any] = "auto",
    plan: ShardPlan | None = None,
    mp_policy: "MixedPrecisionPolicy | str | None" = None,
    forward_prefetch: int = 1,
    backward_prefetch: int = 1,
    reshard: bool | int | str = "auto",
    ignored: Iterable[Any] = (),
    min_unit_mb: float = MIN_UNIT_MB,
    ranks: int | tuple[int, int] | None = None,
) -> Description:
    """Say what `shard` would do with the same arguments; changes nothing and needs no process group.

    A model that `shard` has sharded is described as it was sharded, whatever the other arguments are.

    Args:
        model: The model, before or after `shard`.
        mesh: As for `shard`. Without it, and without a process group, sizes are those of one rank.
        units: As for `shard`.
        plan: As for `shard`.
        mp_policy: As for `shard`.
        forward_prefetch: As for `shard`.
        backward_prefetch: As for `shard`.
        reshard: As for `shard`.
        ignored: As for `shard`.
        min_unit_mb: As for `shard`.
        ranks: Plan for so many ranks, or for (copies, shards) of a 2-D mesh, without a process group.

    Raises:
        TypeError: As `shard` does; so are ValueError and RuntimeError.
    """
    if mesh is not None and ranks is not None:
        raise ValueError(f"mesh and ranks={ranks!r} are both given: leave one out")
    if isinstance(model, nn.Module) and model in _done:
        return _done[model]
    return Sharding.of(
        "describe",
        model,
        mesh,
        plan=plan,
        units=units,
        mp_policy=mp_policy,
        forward_prefetch=forward_prefetch,
        backward_prefetch=backward_prefetch,
        reshard=reshard,
        ignored=ignored,
        min_unit_mb=min_unit_mb,
        ranks=ranks,
    ).description()


def _apply(sharding: Sharding, schedule: Schedule, offload: "OffloadPolicy | None") -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # Inner before outer: a call takes what no earlier call has taken.
    for unit in sorted(sharding.units, key=_size):
        fully_shard(
            unit.modules[0] if len(unit.modules) == 1 else list(unit.modules),
            mesh=sharding.mesh,
            reshard_after_forward=unit.reshard,
            mp_policy=sharding.policy or MixedPrecisionPolicy(),
            offload_policy=offload or OffloadPolicy(),
            ignored_params=sharding.ignored or None,
        )
        if unit.reshard and not unit.regathers:
            first(unit).set_unshard_in_backward(False)
    if sharding.reduce_unused is not False:
        root: Any = sharding.model
        if hasattr(root, "set_reduce_scatter_unused_params"):  # torch 2.13
            root.set_reduce_scatter_unused_params(True)
    if sharding.policy and sharding.policy.param_dtype:
        train_later(sharding.model, sharding.units)
    schedule.apply(sharding)
    Leftovers(sharding.model, [unit.modules for unit in sharding.units])


def _size(unit: Unit) -> int:
    return sum(1 for module in unit.modules for _ in module.modules())
