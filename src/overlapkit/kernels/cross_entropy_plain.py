"""The rows of cross entropy in torch's own operations, where no kernel of ours runs.

A shard of the classes will do: logits (N, n) are those of n of n_classes, beginning with class `first`.
"""

import torch
from torch import Tensor

from overlapkit.kernels.cross_entropy_options import Options


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a dtype is computed in: float32, and float64 for itself."""
    return torch.promote_types(dtype, torch.float32)


def sum_in_two(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a + b, rounded, and what it lost (Knuth's two-sum). An infinite sum lost nothing."""
    total = a + b
    back = total - a
    low = (a - (total - back)) + (b - back)
    return total, torch.where(total.isinf(), 0.0, low)


def statistics(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: Options,
    shard: tuple[int, int],
) -> Tensor:
    """Return (4, N): lse and what it lost, the target's logit (0 where it is not here), weights . logits."""
    ignore_index, smoothing, _, softcap = options.numbers
    first, n_classes = shard
    x = logits.to(wide(logits.dtype))
    if softcap:
        x = (x / softcap).tanh_().mul_(softcap)
    n = x.shape[1]
    known = (target >= 0) & (target < n_classes)
    if x.is_cpu and (bad := target[~known & (target != ignore_index)]).numel():
        raise IndexError(f"Target {bad[0].item()} is out of bounds.")  # in torch's words
    top = x.amax(-1)
    top = torch.where(top == -torch.inf, 0.0, top)
    lse, low = sum_in_two(top, (x - top[:, None]).exp_().sum(-1).log_())
    here = (target >= first) & (target < first + n)
    hit = x.gather(1, (target - first).clamp(0, n - 1)[:, None])[:, 0]
    hit = torch.where(here, hit, torch.where(known, 0.0, torch.nan))
    if not smoothing:
        dot = torch.zeros_like(lse)
    else:
        with torch.autocast(x.device.type, enabled=False):  # which would round a product
            dot = x.sum(-1) if weight is None else x @ weight[first : first + n].to(x.dtype)
    return torch.stack((lse, low, hit, dot))


def loss(
    found: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: Options,
    n_classes: int,
) -> Tensor:
    """The rows' losses (N,) from the statistics (4, N) of all classes."""
    ignore_index, smoothing, z_loss, _ = options.numbers
    lse, low, hit, dot = found
    result = (lse - hit) + low
    if weight is not None:
        result = result * weight.to(lse.dtype)[target.clamp(0, n_classes - 1)]
    if smoothing:
        total = n_classes if weight is None else weight.sum(dtype=lse.dtype)
        smooth = smoothing / n_classes * (total * lse - dot)
        result = (1.0 - smoothing) * result + smooth
    if z_loss:
        result = result + z_loss * lse.square()
    return torch.where(target == ignore_index, 0.0, result)


def gradient(
    dloss: Tensor,
    dlse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    low: Tensor,
    options: Options,
    shard: tuple[int, int],
    out: Tensor,
) -> None:
    """Write the gradient of logits (N, n) to `out` (N, n), which may be logits itself."""
    ignore_index, smoothing, z_loss, softcap = options.numbers
    first, n_classes = shard
    x = logits.to(wide(logits.dtype), copy=out is not logits)
    slope = None
    if softcap:
        x.div_(softcap).tanh_()
        slope = x.square().neg_().add_(1.0)
        x.mul_(softcap)
    kept, dloss = target != ignore_index, dloss.to(x.dtype)
    known = (target >= 0) & (target < n_classes)
    on_target = dloss * (1.0 - smoothing)
    if weight is not None:
        weight = weight.to(x.dtype)
        on_target = on_target * weight[target.clamp(0, n_classes - 1)]
    on_target = torch.where(known, on_target, torch.nan)
    on_weight = dloss * (smoothing / n_classes)
    total = n_classes if weight is None else weight.sum()
    on_softmax = torch.where(kept, on_target + 2.0 * z_loss * dloss * lse + on_weight * total, 0.0)
    if dlse is not None:
        on_softmax = on_softmax + dlse
    x.sub_(lse[:, None]).sub_(low[:, None]).exp_().mul_(on_softmax[:, None])
    local, n = target - first, x.shape[1]
    on_target = torch.where(kept & (local >= 0) & (local < n), on_target, 0.0)
    index = local.clamp(0, n - 1)[:, None]
    x.scatter_(1, index, x.gather(1, index) - on_target[:, None])
    if smoothing:
        mine = x.new_ones(n) if weight is None else weight[first : first + n]
        x.addr_(torch.where(kept, on_weight, 0.0), mine, alpha=-1.0)
    if slope is not None:
        x.mul_(slope)
    if dlse is None:
        x.masked_fill_(~kept[:, None], 0.0)
    if x is not out:
        out.copy_(x)
