"""Losses, lse and gradients of rows of logits: by kernel or in torch's operations, classes whole or sharded.

Nothing here is known to autograd: these are the bodies of the operators.
"""

import torch
from torch import Tensor

from overlapkit.kernels import cross_entropy_plain as plain
from overlapkit.kernels.cross_entropy_options import Options
from overlapkit.launch import through_triton


def forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, lse and what lse lost to rounding, each (N,), of logits (N, V or a rank's share of V)."""
    in_triton = through_triton(logits)
    if in_triton and not options.group:
        from overlapkit.kernels.raw.cross_entropy import forward

        return forward(logits, target, weight, options)
    if in_triton:
        from overlapkit.kernels.raw.cross_entropy import statistics
    else:
        statistics = plain.statistics
    shard = _shard(logits, options.group)
    found = statistics(logits, target, weight, options, shard)
    if options.group:
        found = _of_all_ranks(found, logits.shape[1], options.group)
    loss = plain.loss(found, target, weight, options, shard[1])
    return loss, found[0].clone(), found[1].clone()  # an operator's outputs share no memory


def _shard(logits: Tensor, group: str) -> tuple[int, int]:
    """The first of the classes that this rank's logits (N, n) are of, and the number of all classes."""
    n = logits.shape[1]
    if not group:
        return 0, n
    ranks = process_group(group)
    return ranks.rank() * n, ranks.size() * n


def process_group(name: str) -> "torch.distributed.ProcessGroup":
    """The process group of a name; an operator's arguments can be strings, but no groups."""
    from torch.distributed import distributed_c10d as c10d

    return c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type, unused-ignore]


def _of_all_ranks(found: Tensor, n: int, group: str) -> Tensor:
    """The statistics of all classes from those of each rank's, by one collective: 16 bytes a row and rank.

    All ranks add up the same numbers in the same order, so that they get the same bits. Behind them goes n,
    the number of a rank's classes: where they differ, no rank knows which classes it has.
    """
    ranks = process_group(group)
    mine = torch.cat((found.flatten(), found.new_full((1,), n)))
    gathered = mine.new_empty((ranks.size(), mine.numel()))
    torch.distributed.all_gather(list(gathered), mine, group=ranks)
    alike = (gathered[:, -1] == n).all()
    if found.is_cpu and not alike:
        sizes = [int(size) for size in gathered[:, -1]]
        raise ValueError(
            f"the ranks of vocab_group have {sizes} classes: all need as many, so pad them to a multiple of "
            f"{ranks.size()} ranks, with logits (or the bias) of -inf"
        )
    lse, low, hit, dot = gathered[:, :-1].unflatten(1, found.shape).unbind(1)
    top = lse.amax(0)
    shift = torch.where(top == -torch.inf, 0.0, top)
    total = ((lse - shift) + low).exp().sum(0)
    lse, low = plain.sum_in_two(shift, total.log())
    return torch.stack((torch.where(alike, lse, torch.nan), low, hit.sum(0), dot.sum(0)))


def gradient(
    dloss: Tensor,
    dlse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    low: Tensor,
    options: Options,
    out: Tensor,
) -> None:
    """Write the gradient of logits (N, V) to `out`, of dense rows, which may be logits itself."""
    shard = _shard(logits, options.group)
    if through_triton(logits):
        from overlapkit.kernels.raw.cross_entropy import backward

        backward(dloss, dlse, logits, target, weight, lse, low, options, shard, out)
    else:
        plain.gradient(dloss, dlse, logits, target, weight, lse, low, options, shard, out)


def forward_and_gradient_(
    logits: Tensor, target: Tensor, weight: Tensor | None, scale: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Return loss and lse, each (N,); logits (N, V), of dense rows, become the loss's gradient x scale ()."""
    if through_triton(logits) and not options.group:
        from overlapkit.kernels.raw.cross_entropy_inplace import forward_and_gradient_

        return forward_and_gradient_(logits, target, weight, scale, options)
    loss, lse, low = forward(logits, target, weight, options)
    dloss = torch.ones_like(loss) if scale is None else scale.to(loss.dtype).expand_as(loss)
    gradient(dloss, None, logits, target, weight, lse, low, options, logits)
    return loss, lse


def count(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What the mean divides by: the summed weights of the kept targets, and 1 where that is 0."""
    total = kept(target, weight, ignore_index, dtype)
    return total.clamp_min(1) if weight is None else torch.where(total == 0, 1, total)


def kept(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The number of targets that are not ignored, or the sum of their weights."""
    mask = target != ignore_index
    if weight is None:
        return mask.sum()
    last = weight.shape[0] - 1  # a target out of range has told of itself already
    return torch.where(mask, weight.detach()[target.clamp(0, last)], 0).sum(dtype=dtype)
