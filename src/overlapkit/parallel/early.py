"""The unit that forward needs first, gathered as soon as an optimizer has stepped."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from overlapkit.optimizer_step import before_update
from overlapkit.parallel.traffic import in_backward


class EarlyUnshard:
    """Gathers one unit between an optimizer's step and the next forward.

    Invariant:
        * Forward never computes with other weights than the shards hold. Before a unit that was gathered
          early is used, each rank compares its shard with what it gave, and all agree: some of what torch
          lets a program do to weights (foreach on DTensors, `.data`) leaves no other trace. Where any rank's
          differ, all gather again.

    Args:
        modules: The unit's modules, sharded.
        parameters: Calls that return its parameters as the modules have them now.
        group: The ranks that share them.
        device: The type of the device that the group communicates on; offloaded shards are elsewhere.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: Sequence[Callable[[], torch.Tensor]],
        group: dist.ProcessGroup,
        device: str,
    ) -> None:
        self._unit: Any = modules[0]
        self._parameters = parameters
        self._group, self._device = group, device
        self._handle: Any = None
        self._given: list[torch.Tensor] = []
        before_forward = torch.compiler.disable(self._before_forward)  # no graph can hold it
        for module in modules:
            module.register_forward_pre_hook(before_forward, prepend=True)
        here = weakref.ref(self)

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            if (early := here()) is None or not early._changed_by(optimizer):
                return None
            return before_update(args, kwargs, early.discard)  # a closure's forward uses what was gathered

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if (early := here()) is not None and early._changed_by(optimizer) and not in_backward():
                early.gather()

        for handle in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
            weakref.finalize(self, handle.remove)

    def gather(self) -> None:
        """Begin to gather the weights as they are now."""
        self.discard()
        if (shards := self._shards()) is not None:
            self._given = [shard.clone() for shard in shards]
            self._handle = self._unit.unshard(async_op=True)

    def discard(self) -> None:
        """Take back what was gathered early: the weights are about to change, or have."""
        handle, self._handle, self._given = self._handle, None, []
        if handle is not None:
            handle.wait()  # only what was waited for can be freed
            self._unit.reshard()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._handle is None:
            return
        shards = self._shards()
        same = shards is not None and all(map(torch.equal, shards, self._given))
        changed = torch.tensor(0 if same else 1, device=self._device)
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self._group)
        if changed.item():
            self.discard()
        self._handle, self._given = None, []

    def _shards(self) -> list[torch.Tensor] | None:
        """This rank's part of each parameter; None where the unit is not sharded at the moment."""
        from torch.distributed.tensor import DTensor

        found = [find() for find in self._parameters]
        shards = [each.to_local().detach() for each in found if isinstance(each, DTensor)]
        return shards if len(shards) == len(found) else None

    def _changed_by(self, optimizer: torch.optim.Optimizer) -> bool:
        own = {id(find()) for find in self._parameters}
        return any(id(each) in own for group in optimizer.param_groups for each in group["params"])
