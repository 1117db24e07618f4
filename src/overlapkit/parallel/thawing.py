"""Units that are frozen at first and trained later, in mixed precision."""

from collections.abc import Sequence
from typing import Any

import torch.nn as nn

from overlapkit.parallel.units import Unit


def train_later(model: nn.Module, units: Sequence[Unit]) -> None:
    """Let the parameters of units that are frozen now be trained after they have been used.

    In the first forward FSDP2 notes the dtype to reduce in, from the parameters that require gradients then.
    Where a unit has none, gradients would later stay in the dtype of the forward, which is an error in
    backward. So they require gradients while it takes that note, and at no other time.
    """
    names = [name for unit in units if _frozen_alike(unit) for name in unit.parameters]
    if not names:
        return
    noted: dict[str, nn.Parameter] = {}

    def require(module: nn.Module, args: Any) -> None:
        for name in names:
            parameter = model.get_parameter(name)
            if not parameter.requires_grad:
                parameter.requires_grad_(True)
                noted[name] = parameter

    def freeze(module: nn.Module, args: Any) -> None:
        for name, parameter in noted.items():
            parameter.requires_grad_(False)
            model.get_parameter(name).requires_grad_(False)  # another one in the root unit, gathered by now
        noted.clear()
        for handle in handles:
            handle.remove()

    handles = (
        model.register_forward_pre_hook(require, prepend=True),  # before FSDP2's
        model.register_forward_pre_hook(freeze),  # after it
    )


def _frozen_alike(unit: Unit) -> bool:
    """Whether all its parameters are frozen, and could be trained together."""
    parameters = unit.parameters.values()
    return (
        not any(parameter.requires_grad for parameter in parameters)
        and all(parameter.is_floating_point() for parameter in parameters)
        and len({parameter.dtype for parameter in parameters}) == 1
    )
