"""`accumulate`: several microbatches, one gradient, one synchronisation."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch.nn as nn

from overlapkit.parallel.failure import roll_of
from overlapkit.parallel.synchronizers import Synchronizers
from overlapkit.parallel.weights import Scale, Weights, count
from overlapkit.warn import warn

T = TypeVar("T")

_DEFER = ("all", "all_reduce", "none")


def accumulate(
    model: nn.Module,
    microbatches: Iterable[T],
    *,
    tokens: Callable[[T], Any] | None = None,
    defer: Literal["all", "all_reduce", "none"] = "all",
) -> Iterator[tuple[T, Scale]]:
    """Iterate over the microbatches of one step, so that gradients are synchronised on the last one only.

    ```python
    for (x, y), scale in ok.accumulate(model, microbatches, tokens=lambda mb: (mb[1] != -100).sum()):
        loss = cross_entropy(model(x), y)  # the mean over this microbatch's tokens
        (loss * scale).backward()
    opt.step(); opt.zero_grad(set_to_none=True)
    ```

    The gradient is then that of the mean over all tokens of all microbatches and ranks, as if they were one
    batch. `scale` is a `Scale`: it is multiplied with the loss, which should be fp32. One small all-reduce
    finds it out. It begins before the first forward, and nothing waits for it until a scale is used.

    Takes models of `shard` and `replicate`, of torch's fully_shard and DistributedDataParallel, compiled or
    not. Any other model accumulates within this process: its scales are those of this process's tokens.

    A loop that is left before its last microbatch (break, an exception) has not synchronised anything: the
    model's gradients, which would differ between ranks, are set to None, with a warning. Every switch is set
    back as it was found, however the loop ends.

    Args:
        model: The model, wrapped or sharded.
        microbatches: Of this step, on this rank; as many on every rank. All but a list or tuple is read to
            its end first, so all are held at once (not with `DeviceLoader(reuse_buffers=True)`).
        tokens: How many tokens a microbatch has, as an int or a 0-d tensor; a tensor on the GPU is not
            waited for. One without tokens counts nothing, but must be run. None: all count the same.
        defer: "all": nothing is communicated before the last backward; FSDP2 keeps whole gradients until
            then, in the reduction's dtype. "all_reduce": each backward reduce-scatters, so that shards of
            gradients are kept, and only the all-reduce between the copies of a 2-D mesh waits (on a 1-D mesh
            nothing does; DDP's all-reduce is all it has, and waits). "none": each backward synchronises.

    Yields:
        Each microbatch with its scale.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: `defer` is not allowed, there are no microbatches, or not as many on every rank; raised
            on every rank, at the latest before the second microbatch. (Where a rank has none at all, FSDP2's
            forward fails on the others, as it does when a rank is gone.)
        RuntimeError: The last microbatch had no backward, so that gradients were not synchronised.
        CollectiveFailed: A rank did not take part within the process group's timeout.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: accumulate takes a torch.nn.Module")
    if isinstance(microbatches, (str, bytes)) or not isinstance(microbatches, Iterable):
        raise TypeError(f"microbatches={type(microbatches).__name__}: give the microbatches of one step")
    if tokens is not None and not callable(tokens):
        raise TypeError(f"tokens={tokens!r}: give a function of a microbatch, or None")
    if defer not in _DEFER:
        raise ValueError(f"defer={defer!r}: give 'all', 'all_reduce' or 'none'")
    return _each(Synchronizers(model), microbatches, tokens, defer)


def _each(
    parts: Synchronizers, microbatches: Iterable[T], tokens: Callable[[T], Any] | None, defer: str
) -> Iterator[tuple[T, Scale]]:
    held, weights = _weighed(parts, microbatches, tokens)
    place, whole = 0, False
    try:
        for place, microbatch in enumerate(held):
            parts.set(first=place == 0, last=place == len(held) - 1, defer=defer)
            yield microbatch, Scale(weights, place)
            weights.check()
        whole = True
        parts.finish()
    finally:
        parts.restore()
        if not whole:
            last = place == len(held) - 1
            parts.drop(synchronised=last)
            if not last:
                warn(
                    f"accumulate was left at microbatch {place + 1} of {len(held)}: the step "
                    "is not whole, so the model's gradients are set to None"
                )


def _weighed(
    parts: Synchronizers, microbatches: Iterable[T], tokens: Callable[[T], Any] | None
) -> tuple[Sequence[T], Weights]:
    """The microbatches, and their weights under way; an error here must not leave other ranks waiting."""
    roll = roll_of(parts.groups[0]) if parts.groups else None
    held: Sequence[T] = ()
    try:
        held = microbatches if isinstance(microbatches, (list, tuple)) else list(microbatches)
        counted: Any = count(held, tokens)
    except Exception as error:
        Weights(error, parts, roll)
        raise
    weights = Weights(counted, parts, roll)
    if not held:
        weights.check()
    return held, weights
