"""`compile_blocks`: each repeated block compiled in place, so that names stay and one graph serves all."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn as nn

from overlapkit.parallel.blocks import find_blocks
from overlapkit.parallel.preconditions import check_order, is_compiled

M = TypeVar("M", bound=nn.Module)


def compile_blocks(
    model: M, options: bool | Mapping[str, Any] = True, *, blocks: str | Sequence[Any] = "auto"
) -> M:
    """Compile a model's blocks in place, and return the model.

    `shard(compile_blocks=...)` does the same; this is for models that are replicated, or alone. Call it
    after `recompute` and before `shard` or `replicate`. Blocks of one class share a graph: compilation
    takes as long as for one, and FSDP2's hooks, which no graph can hold, run between the graphs. A block
    that is compiled already is left as it is. Names of modules and parameters stay as they are.

    Args:
        model: The model.
        options: True, or keyword arguments of torch.compile, as in {"mode": "max-autotune-no-cudagraphs"}.
            Its defaults hold: a block that cannot be one graph is several; {"fullgraph": True} makes that
            an error. False changes nothing.
        blocks: "auto" for the repeated blocks found by structure, or a list of modules or their names.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: torch.compile has no such option, no block is found, or the model's state forbids it.
            The message says what to do.
    """
    keywords = parse_options(options)
    if keywords is not None:
        check_order(model, "compile_blocks")
        for block in find_blocks(model, blocks, f"compile_blocks={options!r}").values():
            if not is_compiled(block):
                block.compile(**keywords)
    return model


def parse_options(options: Any) -> dict[str, Any] | None:
    """The keyword arguments for torch.compile, or None where nothing is to be compiled.

    Raises:
        TypeError: It is neither a bool nor a mapping.
        ValueError: torch.compile refuses them.
    """
    if isinstance(options, bool):
        return {} if options else None
    if not isinstance(options, Mapping):
        raise TypeError(
            f"compile_blocks={options!r}: give True, False, or a dict of torch.compile's keyword arguments"
        )
    known = set(inspect.signature(torch.compile).parameters) - {"model", "disable"}
    for name in options:
        if name not in known:
            raise ValueError(
                f"compile_blocks={dict(options)!r}: torch.compile takes no {name!r}; it takes "
                + ", ".join(sorted(known))
            )
    try:
        torch.compile(_probe, **options)  # checks values, and compiles nothing before it is called
    except Exception as error:
        raise ValueError(f"compile_blocks={dict(options)!r}: {error}") from error
    return dict(options)


def _probe() -> None:
    pass
