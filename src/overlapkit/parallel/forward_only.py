"""Forward prefetch that is on only while the model's forward runs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def prefetch_in_forward(model: nn.Module, order: Sequence[tuple["FSDPModule", list["FSDPModule"]]]) -> None:
    """Let units prefetch in forward, and not where recomputation runs their forward again in backward.

    There the units that follow were used and freed already: a prefetch would gather them once more, for
    nobody. It happens with reentrant checkpoints, and with units inside of a checkpoint of either kind.

    Args:
        model: The root; whatever runs while its forward does not is recomputation, or is called alone.
        order: For each unit the units whose all-gathers it starts, nearest first.
    """

    def turn_on(module: nn.Module, args: Any) -> None:
        for unit, following in order:
            unit.set_modules_to_forward_prefetch(following)

    def turn_off(module: nn.Module, args: Any, output: Any) -> None:
        for unit, _ in order:
            unit.set_modules_to_forward_prefetch([])

    # No graph can hold them; FSDP2 imports the compiler for the same purpose in the first forward.
    model.register_forward_pre_hook(torch.compiler.disable(turn_on), prepend=True)
    model.register_forward_hook(torch.compiler.disable(turn_off))
