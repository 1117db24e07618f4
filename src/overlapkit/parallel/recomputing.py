"""`recompute`: blocks whose activations are computed again in backward instead of being kept, in place."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from overlapkit.parallel.blocks import find_blocks
from overlapkit.parallel.preconditions import check_order, is_compiled
from overlapkit.parallel.saved_ops import save_costly

M = TypeVar("M", bound=nn.Module)


def recompute(model: M, policy: str | None, *, blocks: str | Sequence[Any] = "auto") -> M:
    """Make blocks compute their activations again in backward, in place, and return the model.

    `shard(recompute=...)` does the same; this is for models that are replicated, or alone. Call it before
    blocks are compiled and before `shard` or `replicate`.

    Gradients are the same to the bit: random numbers are drawn again from the same state, and running
    statistics of BatchNorm are updated once. Names of modules, parameters and state_dict keys stay as
    they are; copies and pickles recompute, too. A block's forward hooks, FSDP2's among them, are not part
    of what is computed again: each unit is gathered once in forward and once in backward, as without.
    Forward without gradients is not changed. A compiled block recomputes inside of its compiled backward.

    Args:
        model: The model.
        policy: "none" or None changes nothing. "full": of each block only its inputs are kept. "every:N":
            the same, for the first block of every N: the last block of a model is needed as soon as
            backward begins, so to recompute that one frees nothing at the peak. "selective": a block also
            keeps the results of matrix products, convolutions, attention without dropout, and reductions
            between ranks; what is computed again costs little. Forward must not change such a result in
            place (torch raises in backward if it does); "full" allows that.
        blocks: "auto" for the repeated blocks found by structure, or a list of modules or their names.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: `policy` is none of these, no block is found, or the model's state forbids it: it is
            sharded, wrapped, compiled, or recomputes already. The message says what to do.
    """
    every, selective = parse_policy(policy)
    if every:
        check_order(model, "recompute")
        chosen = find_blocks(model, blocks, f"recompute={policy!r}")
        _refuse(model, chosen)
        for block in list(chosen.values())[::every]:
            block.forward = Recomputed(block, vars(block).get("forward"), selective)
    return model


def parse_policy(policy: Any) -> tuple[int, bool]:
    """How many blocks there are to each that recomputes (0: none does), and whether it is selective.

    Raises:
        ValueError: It is none of those that `recompute` takes.
    """
    if policy is None or policy == "none":
        return 0, False
    if policy in ("full", "selective"):
        return 1, bool(policy == "selective")
    if isinstance(policy, str) and policy.startswith("every:"):
        number = policy.removeprefix("every:")
        if number.isascii() and number.isdigit() and int(number) > 0:
            return int(number), False
    raise ValueError(
        f"recompute={policy!r}: give 'none', 'full', 'selective', or 'every:N' for the first block of every "
        "N, as in 'every:2'"
    )


class Recomputed:
    """Takes the place of a block's forward, as an attribute of the instance.

    So module tree and class stay as they are, and the block's own hooks are outside. A copy or a pickle of
    the block holds one that refers to the new block.

    Args:
        block: The block.
        forward: The instance's own forward, where it has one beside its class's.
        selective: Keep what `save_costly` says.
    """

    def __init__(self, block: nn.Module, forward: Callable[..., Any] | None, selective: bool) -> None:
        self.block = block
        self.own = forward
        self.selective = selective

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward."""
        forward = partial(type(self.block).forward, self.block) if self.own is None else self.own
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the partitioner recomputes: it takes torch's own contexts only
            if self.selective:
                return checkpoint(forward, *args, use_reentrant=False, context_fn=_selective, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Around the first forward, and around the one in backward."""
        first, again = _selective() if self.selective else (nullcontext(), nullcontext())
        norms = [module for module in self.block.modules() if _has_statistics(module)]
        return first, _Statistics(norms, again) if norms else again


_selective = partial(create_selective_checkpoint_contexts, save_costly)


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.training and module.running_mean is not None


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class _Statistics:
    """Lets the forward in backward update copies of running statistics: the first one updated them already.

    Args:
        norms: The modules that have them.
        inner: Entered as well.
    """

    def __init__(self, norms: list[nn.Module], inner: AbstractContextManager[Any]) -> None:
        self._norms = norms
        self._inner = inner
        self._kept: list[dict[str, Any]] = []

    def __enter__(self) -> None:
        self._kept = [{name: norm._buffers[name] for name in _STATISTICS} for norm in self._norms]
        for norm, kept in zip(self._norms, self._kept, strict=True):
            norm._buffers.update({name: None if it is None else it.clone() for name, it in kept.items()})
        self._inner.__enter__()  # last: it does not expect these operations

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        for norm, kept in zip(self._norms, self._kept, strict=True):
            norm._buffers.update(kept)


def _refuse(model: nn.Module, chosen: dict[str, nn.Module]) -> None:
    """What would be recomputed twice, or too late."""
    for name, module in model.named_modules():
        if _recomputes(module) and any(_within(name, block) or _within(block, name) for block in chosen):
            raise ValueError(f"model.{name} recomputes already: a block does once, in one way")
        if getattr(module, "gradient_checkpointing", False) is True:
            where = f"model.{name}" if name else "model"
            raise ValueError(
                f"{where}.gradient_checkpointing is on: that is recomputation already; "
                "call model.gradient_checkpointing_disable() first, or leave recompute out"
            )
    if getattr(getattr(model, "config", None), "use_cache", False) is True:
        raise ValueError(
            "model.config.use_cache is on: blocks that are computed again add to the cache a second time; "
            "set model.config.use_cache = False first"
        )
    for name, block in chosen.items():
        if is_compiled(block):
            raise ValueError(
                f"model.{name} is compiled already: the order is recompute, then compile; "
                "call recompute first, or give both to shard(recompute=..., compile_blocks=True)"
            )


def _recomputes(module: nn.Module) -> bool:
    return type(module).__name__ == "CheckpointWrapper" or isinstance(vars(module).get("forward"), Recomputed)


def _within(inner: str, outer: str) -> bool:
    return f"{inner}.".startswith(f"{outer}.")
