"""The blocks that recomputation and compilation work on: found by structure, or listed by the user."""

from collections.abc import Sequence
from typing import Any

import torch.nn as nn

from overlapkit.parallel.structure import can_forward, find_structure


def find_blocks(model: nn.Module, blocks: str | Sequence[Any], option: str) -> dict[str, nn.Module]:
    """Blocks by name, in the order of the model, or as listed.

    Args:
        model: The model.
        blocks: "auto" for the repeated blocks, or modules of the model, or their names.
        option: What they are for, as the user wrote it: for errors.

    Raises:
        TypeError: `blocks` is neither "auto" nor a sequence of modules and names.
        ValueError: A name or module is not part of the model or is not called in forward, or none was found.
    """
    if isinstance(blocks, str) and blocks == "auto":
        found = {name: model.get_submodule(name) for name in find_structure(model).blocks}
        if not found:
            raise ValueError(
                f"{option}: {type(model).__name__} has no repeated blocks; name those that are meant, as in "
                "parallel.recompute(model, 'full', blocks=['encoder', 'decoder']) or parallel.compile_blocks"
            )
        return found
    if isinstance(blocks, (str, nn.Module)) or not isinstance(blocks, Sequence):
        raise TypeError(f"blocks={blocks!r}: give 'auto', or a list of modules or of their names")
    names = {module: name for name, module in model.named_modules()}
    listed = {}
    for entry in blocks:
        module = entry
        if isinstance(entry, str):
            module = next((module for module, name in names.items() if name == entry), None)
        if not isinstance(module, nn.Module) or module not in names:
            raise ValueError(f"blocks: the model has no part {entry!r}")
        if not can_forward(module):
            raise ValueError(
                f"blocks: {names[module]!r} has no forward of its own; list its children instead"
            )
        listed[names[module]] = module
    if not listed:
        raise ValueError(f"blocks={blocks!r} names none, so {option} would do nothing: leave it out")
    return listed
