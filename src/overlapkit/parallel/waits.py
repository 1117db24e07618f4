"""What the compute stream of a CUDA device stood still for: marks around FSDP2's waits for all-gathers."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from overlapkit.parallel.traffic import LANE, Label
from overlapkit.span import Mark, SpanLog


class GatherWaits:
    """Of one unit. FSDP2 makes the compute stream wait before the unit's forward, and before its backward.

    Args:
        log: Where spans go.
        label: The all-gather's.

    Attributes:
        gathered: Marks the end of the latest all-gather that nobody has waited for yet.
    """

    def __init__(self, log: SpanLog, label: Label) -> None:
        self.gathered: Mark | None = None
        self._log = log
        self._label = label
        self._arrived: Mark | None = None

    def surround(self, modules: Sequence[nn.Module]) -> None:
        """Put hooks before and after FSDP2's, which must be there already."""
        for module in modules:
            for hook, first in ((self.before, True), (self.after, False)):
                module.register_forward_pre_hook(_forward(hook), prepend=first)
                module.register_forward_hook(_backward(hook), prepend=first)

    def before(self, device: torch.device) -> None:
        """FSDP2 is about to make the current stream wait, if need be."""
        self._arrived = self._log.mark(torch.cuda.current_stream(device))

    def after(self, device: torch.device) -> None:
        """It has: the time from here to the all-gather's end was lost, if it was later."""
        if self.gathered is not None and self._arrived is not None:
            name, parameters = self._label
            stream = torch.cuda.current_stream(device)
            ends = self._arrived, self.gathered
            self._log.between(LANE, f"wait {name}", stream, ends, exposed=True, parameters=parameters)
        self.gathered = self._arrived = None


def _forward(hook: Any) -> Any:
    def pre(module: nn.Module, args: Any) -> None:
        hook(torch.device("cuda", torch.cuda.current_device()))

    return torch.compiler.disable(pre)


def _backward(hook: Any) -> Any:
    """Tensor hooks run in the order of their registration: around the one that FSDP2 puts on the output."""

    def post(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: hook(gradient.device))

    return torch.compiler.disable(post)
