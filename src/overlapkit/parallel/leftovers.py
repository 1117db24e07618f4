"""What a forward leaves gathered and an exception half done does not reach the next step."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from overlapkit.parallel.synchronizers import forget, groups_of
from overlapkit.parallel.traffic import in_backward


class Leftovers:
    """Frees what forward gathered for a backward that does not come: weights change, the copies would not.

    FSDP2 frees in backward only. Gathered copies outlive a forward without gradients (pytorch#149029,
    #147179), one whose loss is thrown away, and one that raised; so does an all-gather for a unit that no
    forward reached. After an exception FSDP2 also takes itself for being in the middle of a step, and no
    later backward would reduce the root's gradients.

    Args:
        model: The root, sharded.
        units: The modules of each unit.
    """

    def __init__(self, model: nn.Module, units: Sequence[Sequence[nn.Module]]) -> None:
        self._root: Any = model
        self._units: list[Any] = [modules[0] for modules in units]  # one stands for all
        self._awaited = False  # whether a forward ended, and no backward has begun since
        self._running = False
        # No graph can hold them.
        model.register_forward_pre_hook(torch.compiler.disable(self._before), prepend=True)
        model.register_forward_hook(torch.compiler.disable(self._after))
        model.register_forward_hook(torch.compiler.disable(self._failed), always_call=True)
        for modules in units:
            for module in modules:
                module.register_forward_pre_hook(torch.compiler.disable(_use_again), prepend=True)

    def _before(self, module: nn.Module, args: Any) -> None:
        if in_backward():  # recomputation
            return
        if self._root._get_fsdp_state()._state_ctx.post_backward_final_callback_queued:
            self._abandon_backward()
        elif self._awaited:
            self._free()
        self._awaited, self._running = False, True

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            return
        self._running = False
        if not torch.is_grad_enabled():
            self._free()
            return
        self._awaited = True
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._begin_backward)

    def _failed(self, module: nn.Module, args: Any, output: Any) -> None:
        """Called last, also where forward raised. It waits for nothing: a rank may have died."""
        if self._running:
            self._end_forward()
            self._awaited, self._running = True, False

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        self._awaited = False

    def _free(self) -> None:
        for unit in self._units:
            if any(group._all_gather_result is not None for group in groups_of(unit)):
                unit.unshard()  # only what was waited for can be freed
            unit.reshard()

    def _end_forward(self) -> None:
        """Set FSDP2 back to where no forward runs. Gradients that it accumulates, of earlier ones, stay."""
        for unit in self._units:
            state = unit._get_fsdp_state()
            for each in (state, *groups_of(unit)):
                each._training_state = type(each._training_state).IDLE
            state._modules_to_run_forward.clear()
            unit.reshard()
        self._root._get_fsdp_state()._state_ctx.iter_forward_root = None

    def _abandon_backward(self) -> None:
        """Set FSDP2 back to where no step runs. What the failed backward had not reduced is forgotten."""
        if hasattr(self._root, "reset_iter_state"):  # torch 2.13; it keeps whole gradients
            self._root.reset_iter_state()
        self._end_forward()
        state = self._root._get_fsdp_state()
        state._state_ctx.post_backward_final_callback_queued = False
        state._comm_ctx.post_forward_order.clear()
        for unit in self._units:
            for group in groups_of(unit):
                group._post_forward_indices.clear()
                forget(group)
        self._free()


def _use_again(module: Any, args: Any) -> None:
    """Let a unit that is done in this backward be recomputed in it once more, for another forward.

    FSDP2 takes that for a part of what it has reduced already: with reentrant checkpoints it would keep the
    second use's gradients, unreduced, for the next step.
    """
    state = module._get_fsdp_state()
    groups = groups_of(module)
    stages = {group._training_state.name for group in groups}
    if state._training_state.name == "PRE_BACKWARD" and stages == {"POST_BACKWARD"}:
        for each in (state, *groups):
            each._training_state = type(each._training_state).IDLE
