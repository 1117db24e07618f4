"""DTensors whose rows are whole: a kernel runs on the rows that a rank has, and its results are DTensors.

No collectives but one: the mean of a loss is over the targets of all ranks, whose number is one all-reduce.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from overlapkit.kernels.shards import Shards

Function = TypeVar("Function", bound=Callable[..., Any])
LAST = -1
_DISTRIBUTED = torch.distributed.is_available()


def by_rows(
    *rows: str,
    whole: Sequence[str] = (),
    broadcast: Sequence[str] = (),
    dim: str | None = None,
    seed: str | None = None,
) -> Callable[[Function], Function]:
    """Decorate a function of rows, so that it takes DTensors too; plain tensors pass untouched.

    Args:
        rows: Names of the tensors (..., D) whose rows it works on. They may be sharded in every dimension
            but the last; where they are sharded differently, the one with most sharded dimensions leads.
        whole: Names of the parameters, each replicated or a plain tensor, the same on all ranks. The
            gradient of a replicated one is partial over the mesh dimensions that shard rows; that of a
            plain one is summed over them.
        broadcast: Names of tensors that broadcast against the first of `rows`, plain (the same on all
            ranks) or DTensors that lie anyhow.
        dim: Name of the argument that says which dimension is whole, where that need not be the last.
        seed: Name of the argument that random numbers follow from: each shard gets another. Without a
            `training` of False it is needed, for ranks that have the same rows must draw the same.
    """

    def decorate(fn: Function) -> Function:
        def on_shards(named: dict[str, Any]) -> Any:
            along = LAST if dim is None else named.get(dim, LAST)
            shards = Shards.of(named, dict.fromkeys(rows, along), whole, broadcast)
            if shards is None:
                return None
            local = shards.local(named)
            if seed is not None and named.get("training", True):
                if named.get(seed) is None:
                    raise ValueError(
                        f"{seed}=None: {rows[0]} is a DTensor: pass the same {seed} on all ranks"
                    )
                local[seed] = shards.seed(named[seed])
            return shards.wrap(fn(**local))

        return taking_dtensors(fn, on_shards)

    return decorate


def loss_by_rows(
    logits: str, *, classes: int, whole: Sequence[str], count: Callable[[dict[str, Any]], Tensor]
) -> Callable[[Function], Function]:
    """As `by_rows`, for a loss of `logits` and target with a reduction, and perhaps the rows' lse beside it.

    With "sum" and "mean" the loss is partial over the mesh dimensions that shard rows; its mean is over the
    rows of all ranks.

    Args:
        logits: Name of the tensor that holds rows.
        classes: The dimension of it that must be whole.
        whole: As for `by_rows`.
        count: What the mean of one rank's rows divides by (0 without any), from the arguments by name.
    """

    def decorate(fn: Function) -> Function:
        def on_shards(named: dict[str, Any]) -> Any:
            target = named.get("target")
            soft = isinstance(target, Tensor) and target.is_floating_point()  # class probabilities
            shards = Shards.of(named, {logits: classes, "target": classes if soft else None}, whole)
            if shards is None:
                return None
            reduction, local = named.get("reduction", "mean"), shards.local(named)
            if reduction not in ("mean", "sum"):
                return shards.wrap(fn(**local))
            out = fn(**local | {"reduction": "sum"})
            loss, rest = (out[0], shards.wrap(out[1:])) if isinstance(out, tuple) else (out, ())
            if reduction == "mean":
                total = shards.total(count(local))
                loss = loss / torch.where(total == 0, 1, total)
            loss = shards.partial(loss)
            return (loss, *rest) if rest else loss

        return taking_dtensors(fn, on_shards)

    return decorate


def taking_dtensors(fn: Function, on_shards: Callable[[dict[str, Any]], Any]) -> Function:
    """`fn`, but where a tensor may be a DTensor what `on_shards` makes of the arguments by name.

    It gives None where there is nothing for it to do, or `fn`'s own checks say what is wrong.
    """
    names = list(inspect.signature(fn).parameters)

    @functools.wraps(fn)
    def with_dtensors(*args: Any, **kwargs: Any) -> Any:
        if not _any_subclass(args, kwargs):
            return fn(*args, **kwargs)
        out = on_shards(dict(zip(names, args, strict=False)) | kwargs)
        return fn(*args, **kwargs) if out is None else out

    return cast(Function, with_dtensors)


def _any_subclass(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there is more to look at. All that most calls pay: torch's DTensor is not imported for them."""
    if not _DISTRIBUTED:
        return False
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and type(value) is not Tensor and type(value) is not nn.Parameter:
            return True
    return False
