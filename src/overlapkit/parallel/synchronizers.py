"""The parts of a model that synchronise gradients, ours or torch's, and the switches that they have for it.

FSDP2 tells nobody how its switches stand, over which ranks it averages, or what it has accumulated: that is
read from its state here, and (in the middle of a step) by `leftovers`.
"""

import functools
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

_Averaging = tuple[list[dist.ProcessGroup], float | None, torch.device]


class Switches(NamedTuple):
    """How an FSDP2 module stands.

    Attributes:
        reduce: Whether backward reduces gradients at all.
        all_reduce: Whether between the copies of a 2-D mesh, too.
        free: Whether backward frees parameters.
        finish: Whether the end of backward waits for what is being reduced.
    """

    reduce: bool = True
    all_reduce: bool = True
    free: bool = True
    finish: bool = True

    @classmethod
    def of(cls, module: Any) -> "Switches":
        """As they are."""
        finish = module._get_fsdp_state()._state_ctx.is_last_backward
        if not (groups := groups_of(module)):
            return cls(finish=finish)
        group = groups[0]
        return cls(group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward, finish)

    def set(self, module: Any) -> None:
        """Set them so."""
        module.set_requires_gradient_sync(self.reduce, recurse=False)  # sets both
        module.set_requires_all_reduce(self.all_reduce, recurse=False)
        module.set_reshard_after_backward(self.free, recurse=False)
        module.set_is_last_backward(self.finish)


class Synchronizers:
    """FSDP2 modules and DDP wrappers of a model, the model itself included.

    Args:
        model: Any module; without such parts nothing here does anything.

    Attributes:
        groups: The process groups over which gradients are averaged, one after the other; none where
            nobody does that.
        divisor: What the sum over all those ranks is divided by.
        device: Of the gradients.

    Raises:
        ValueError: A part cannot be switched, or parts average over different ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        fsdp = sys.modules.get("torch.distributed.fsdp")  # not loaded: nothing can be sharded
        modules = list(model.modules())
        for module in modules:
            if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
                raise ValueError(
                    "model is wrapped in FullyShardedDataParallel (FSDP1): use shard, or fully_shard"
                )
        self._model = model
        self._replicas = [module for module in modules if isinstance(module, DistributedDataParallel)]
        sharded = [module for module in modules if fsdp is not None and isinstance(module, fsdp.FSDPModule)]
        self._sharded: list[Any] = list({id(module._get_fsdp_state()): module for module in sharded}.values())
        self._was = [Switches.of(module) for module in self._sharded]
        self._synced = [replica.require_backward_grad_sync for replica in self._replicas]
        self._backwards = [_backwards(replica) for replica in self._replicas]
        self._hooks: list[Any] = []
        self.groups, self.divisor, self.device = self._averaging()

    def set(self, *, first: bool, last: bool, defer: str) -> None:
        """Set the switches for the next forward and backward."""
        now = last or defer == "none"
        for replica, before in zip(self._replicas, self._synced, strict=True):
            # torch fails where a static graph's very first backward is not synchronised
            unseen = replica.static_graph and not replica._static_graph_delay_allreduce_enqueued
            replica.require_backward_grad_sync = before and (now or (first and unseen))
        for module, was in zip(self._sharded, self._was, strict=True):
            if last:
                self._hooks += [hook for group in groups_of(module) for hook in _widen_late(group)]
            Switches(
                reduce=was.reduce and (now or defer == "all_reduce"),
                all_reduce=was.all_reduce and now,
                free=was.free and (last or not _stays_gathered(module)),
                finish=was.finish and last,  # a reduction may go on during the next forward
            ).set(module)

    def finish(self) -> None:
        """Refuse a step whose gradients were not averaged, because the last microbatch left them out.

        Raises:
            RuntimeError: It had no backward, or (DDP) not for all parameters.
        """
        try:
            for replica in self._replicas:
                replica._check_reducer_finalized()
            if self._left_out():
                raise RuntimeError(
                    "accumulate: the last microbatch had no backward, which would have synchronised the "
                    "gradients: run one for each microbatch, or leave the loop on every rank to drop the step"
                )
        except RuntimeError:
            self.drop(synchronised=False)
            raise

    def _left_out(self) -> bool:
        """Whether there are gradients that no synchronised backward followed."""
        if any(_accumulated(module) for module in self._sharded):
            return True
        return any(
            before is not None
            and _backwards(replica) == before
            and any(parameter.grad is not None for parameter in replica.parameters())
            for replica, before in zip(self._replicas, self._backwards, strict=True)
        )

    def restore(self) -> None:
        """Set every switch as it was found."""
        for replica, before in zip(self._replicas, self._synced, strict=True):
            replica.require_backward_grad_sync = before
        for module, was in zip(self._sharded, self._was, strict=True):
            was.set(module)
        while self._hooks:
            self._hooks.pop().remove()

    def drop(self, *, synchronised: bool) -> None:
        """Forget gradients that were not averaged, after a backward too few.

        Args:
            synchronised: Whether those in `.grad` may have been: then they stay.
        """
        for module in self._sharded:
            state = module._get_fsdp_state()
            if state._is_root and hasattr(module, "reset_iter_state"):
                module.reset_iter_state()  # an error may have come in the middle of forward or backward
            for group in groups_of(module):
                forget(group)
            module.reshard()  # parameters that were kept would not see the optimizer's step
        if not synchronised:
            for parameter in self._model.parameters():
                parameter.grad = None

    def _averaging(self) -> tuple[list[dist.ProcessGroup], float, torch.device]:
        found: list[_Averaging] = [([part.process_group], None, part.device) for part in self._replicas]
        found += [_averages(group) for module in self._sharded for group in groups_of(module)]
        if not found:
            parameter = next(self._model.parameters(), None)
            return [], 1.0, torch.device("cpu") if parameter is None else parameter.device
        groups, divisor, device = found[0]
        ranks = [dist.get_process_group_ranks(group) for group in groups]
        for replica in self._replicas:
            if dist.get_process_group_ranks(replica.process_group) != ranks[0]:
                raise ValueError(
                    "model has parts that DDP averages over different ranks: accumulate each alone"
                )
        size = 1.0
        for group in groups:
            size *= group.size()
        if size == dist.get_world_size():  # one collective over all does what one for each would
            assert dist.group.WORLD is not None
            groups = [dist.group.WORLD]
        return groups, divisor or size, device


def groups_of(module: Any) -> list[Any]:
    """FSDP2's parameter groups of a module; before torch 2.12 there was one at most."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _averages(group: Any) -> _Averaging:
    info = group.mesh_info
    names = ("shard_process_group", "replicate_process_group")
    found = [getattr(info, name) for name in names if hasattr(info, name)]
    return found, group.gradient_divide_factor, group.device


def _stays_gathered(module: Any) -> bool:
    """Whether its parameters stay between forward and backward: then there is room for them always."""
    return all(group.post_forward_mesh_info is None for group in groups_of(module))


def _backwards(replica: Any) -> int | None:
    """How many backwards were synchronised; torch's own wrapper does not know."""
    return replica._times.backwards if hasattr(replica, "_times") else None


def _accumulated(module: Any) -> bool:
    """Whether it keeps whole gradients aside, or reductions that no end of a backward has waited for."""
    context = module._get_fsdp_state()._comm_ctx
    reducing = getattr(context, "reduce_scatter_states", None) or getattr(
        context, "reduce_scatter_state", None
    )
    return bool(reducing) or any(
        it.unsharded_accumulated_grad is not None
        or (hasattr(it, "_unsharded_param") and it._unsharded_param.grad is not None)
        for group in groups_of(module)
        for it in group.fsdp_params
    )


def forget(group: Any) -> None:
    """Drop gradients that FSDP2 keeps aside, whole or partly reduced."""
    group._partial_reduce_output = None
    for parameter in group.fsdp_params:
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def _widen_late(group: Any) -> list[Any]:
    """Let gradients that come with the last microbatch alone be accumulated as those before them.

    FSDP2 keeps gradients of earlier ones in the reduction's dtype, and refuses to reduce them together with
    others in the parameters' (pytorch#196996): such are in a unit whose parameters are not all used always.
    """
    waiting = [it for it in group.fsdp_params if it.unsharded_accumulated_grad is None]
    if len(waiting) == len(group.fsdp_params):
        return []

    trained = [it for it in waiting if it.sharded_param.requires_grad]
    if getattr(
        group, "reduce_scatter_unused_params", False
    ):  # then one that never comes is zero (torch 2.13)
        for it in trained:
            it.unsharded_accumulated_grad = torch.zeros_like(it._unsharded_param, dtype=it.reduce_dtype)
        return []

    def widen(parameter: nn.Parameter, of: Any) -> None:
        assert parameter.grad is not None
        of.unsharded_accumulated_grad = parameter.grad.to(of.reduce_dtype)
        parameter.grad = None

    return [
        it._unsharded_param.register_post_accumulate_grad_hook(functools.partial(widen, of=it))
        for it in trained
    ]
