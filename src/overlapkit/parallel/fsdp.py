"""`shard`: FSDP2 with units found by structure, explicit prefetch, and spans of every collective."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn as nn

from overlapkit.parallel import compiling, recomputing
from overlapkit.parallel.description import Description
from overlapkit.parallel.forward_only import prefetch_in_forward
from overlapkit.parallel.offload import resolve_offload
from overlapkit.parallel.preconditions import check_holders
from overlapkit.parallel.shard_plan import ShardPlan, fill
from overlapkit.parallel.sharding import Sharding
from overlapkit.parallel.units import Unit, prefetch_order

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy

M = TypeVar("M", bound=nn.Module)

_done: "weakref.WeakKeyDictionary[nn.Module, Description]" = weakref.WeakKeyDictionary()


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
) -> M:
    """Recompute, compile and shard a model over the ranks of a mesh with FSDP2, in place, and return it.

    Call it before the optimizer is made, with the same weights on every rank (seed alike): each rank
    keeps its part of its own weights, nothing is broadcast. Parameters are moved to the mesh's device,
    as fully_shard does. `describe` shows what will happen.

    A process without a process group (no torchrun) has nobody to share with: only recomputation and
    compilation are applied then, so that one script serves one process and many.

    The model gets an attribute `timings`: a callable that returns the `Span`s of the collectives that
    finished since its last call. An all-gather's or reduce-scatter's span has its bytes and its unit's
    name. On the CPU, spans with `exposed=True` are when the training thread stood still: "wait ..." for
    an all-gather, and all of a reduce-scatter or all-reduce. On CUDA, spans are of the communication
    stream, none is marked exposed, and the all-reduce of a 2-D mesh is not recorded.

    Args:
        model: A module with parameters, on a real device, not wrapped or compiled.
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
            are; the projection, needed first in backward, and the root are not (and are freed after a
            forward without gradients). True or False: all units alike. A number: blocks stay gathered
            among that many ranks. Without a process group nothing is freed, and any of these is right.
        recompute: "none", "full", "every:N" or "selective": see `recompute`. Each unit is gathered as often
            as without.
        compile_blocks: True, or a dict of torch.compile's keyword arguments: see `compile_blocks`.
        offload: True to keep parameters, gradients and so optimizer state in host memory, pinned where the
            mesh is on a GPU, or an OffloadPolicy. Clipping then needs a process group with a CPU backend.
        ignored: Parameters, modules or names of either that stay as they are: not sharded, moved, or
            reduced.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument's value or the model's state forbids it; the message says what to do.
        RuntimeError: WORLD_SIZE is set above 1 and there is no process group.
        NotImplementedError: An option that is not there yet is set, or the model is on the meta device
            or tensor-parallel.
    """
    policy = fill(plan, recompute=(recompute, None))["recompute"]
    recomputing.parse_policy(policy)
    compiling.parse_options(compile_blocks)
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
    )
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
    recomputing.recompute(model, policy)
    compiling.compile_blocks(model, compile_blocks)
    if sharding.mesh is None:
        return model
    _apply(sharding, offload_policy)
    if sharding.freed_after_inference:
        _free_after_inference(model, sharding.freed_after_inference)
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

    Raises:
        TypeError: As `shard` does; so are ValueError, RuntimeError and NotImplementedError.
    """
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
    ).description()


def _apply(sharding: Sharding, offload: "OffloadPolicy | None") -> None:
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
            _first(unit).set_unshard_in_backward(False)
    _set_prefetch(sharding)
    _set_collectives(sharding)


def _size(unit: Unit) -> int:
    return sum(1 for module in unit.modules for _ in module.modules())


def _first(unit: Unit) -> "FSDPModule":
    """The modules of a unit share one state: any of them stands for it."""
    module: Any = unit.modules[0]
    return module  # type: ignore[no-any-return]


def _set_prefetch(sharding: Sharding) -> None:
    order = prefetch_order(sharding.units, sharding.forward_prefetch, sharding.backward_prefetch)
    first = [_first(unit) for unit in sharding.units]
    prefetch_in_forward(
        sharding.model,
        [(first[place], [first[n] for n in ahead]) for place, (ahead, _) in enumerate(order) if ahead],
    )
    for unit, (_, behind) in zip(sharding.units, order, strict=True):
        # An empty list would mean FSDP2's own choice; a unit that prefetches itself does nothing.
        _first(unit).set_modules_to_backward_prefetch(
            [_first(sharding.units[place]) for place in behind] or [_first(unit)]
        )


def _set_collectives(sharding: Sharding) -> None:
    from overlapkit.parallel.collectives import AllGather, ReduceScatter
    from overlapkit.span import SpanLog

    assert sharding.mesh is not None
    log = SpanLog()
    for unit in sharding.units:
        module: Any = _first(unit)  # torch's interface of these two is private; it is used by its methods
        reduce_scatter = ReduceScatter(log, unit.name)
        module.set_custom_all_gather(AllGather(log, unit.name))
        module.set_custom_reduce_scatter(reduce_scatter)
        if sharding.mesh.ndim == 2 and sharding.mesh.device_type == "cpu":
            module.set_all_reduce_hook(reduce_scatter.all_reduced)
    sharding.model.__dict__["timings"] = log.take  # no parameter, buffer or module: nn.Module need not know


def _free_after_inference(model: nn.Module, units: Sequence[Unit]) -> None:
    """Without a backward nothing else frees what is kept for one: it goes stale (pytorch#149029, #147179)."""
    kept = [_first(unit) for unit in units]

    def free(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            for each in kept:
                each.reshard()

    model.register_forward_hook(free)
