"""Cross entropy over class indices, with all of torch's options, z-loss, logit soft-capping and the lse."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlapkit.kernels.arguments import (
    check_floating,
    check_like,
    check_not_negative,
    check_number,
    no_double_backward,
)
from overlapkit.kernels.sharded import loss_by_rows
from overlapkit.launch import through_triton


def _divisor(arguments: dict[str, Any]) -> Tensor:
    """What the mean divides the sum by: the summed weights of the kept targets, or 0."""
    logits, target, weight = arguments["logits"], arguments["target"], arguments.get("weight")
    if target.is_floating_point():
        classes = logits.shape[min(1, logits.dim() - 1)]
        rows: Tensor = logits.new_full((), logits.numel() // classes, dtype=_wide(logits))
        return rows
    return _kept(target, weight, arguments.get("ignore_index", -100), _wide(logits))


@loss_by_rows("logits", classes=1, whole=("weight",), count=_divisor)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Cross entropy of logits and class indices, as torch.nn.functional.cross_entropy, computed in fp32.

    It differs from torch's in three ways, and never waits for the device to find out:

    * The mean over no targets (all of them ignored, or none there) is 0 with zero gradients, not NaN.
    * The loss of half-precision logits is float32, as torch's is under autocast.
    * On a GPU a target out of range gives NaN for its row (loss and gradient); on the CPU torch raises.

    Float targets (class probabilities) are left to torch. None of them can be ignored.

    Args:
        logits: (V,), (N, V) or (N, V, ...), floating point, any strides. V last is read without a copy.
        target: (), (N,) or (N, ...), int64 or uint8, any strides.
        weight: (V,), the weight of each class, or None for 1. Not differentiable.
        ignore_index: A target that counts for nothing.
        reduction: "mean" (over the weights of the targets that are not ignored), "sum" or "none".
        label_smoothing: 0 to 1, the share of the loss that goes to all classes alike.
        z_loss: Adds z_loss * lse^2 to the loss of each row (PaLM, section 5), reduced as the rest is.
        softcap: Replaces the logits by softcap * tanh(logits / softcap), as Gemma 2 does; None for not.
        return_lse: Also return the log-sum-exp of each row, differentiable.

    Returns:
        The loss, float32 (float64 for float64 logits): () or, for "none", target's shape. With
        return_lse the pair (loss, lse), lse with target's shape, ignored rows included.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An option is out of range; shapes, devices or dtypes do not fit; ignore_index is
            set and target holds class probabilities.
        NotImplementedError: z_loss, softcap or return_lse with class probabilities.
        RuntimeError: A second derivative was asked for, on a GPU.
    """
    _check_options(weight, ignore_index, reduction, label_smoothing, z_loss, softcap, logits)
    if isinstance(target, Tensor) and target.is_floating_point():
        if ignore_index >= 0:  # below it is no class, and torch lets it pass
            raise ValueError(
                f"ignore_index={ignore_index}: target holds class probabilities, of which none is ignored; "
                "leave it out, or pass class indices (int64)"
            )
        if z_loss or softcap is not None or return_lse:
            raise NotImplementedError(
                "target holds class probabilities: z_loss, softcap and return_lse need class indices (int64)"
            )
        x = logits.to(_wide(logits))
        weight = None if weight is None else weight.to(x.dtype)
        return F.cross_entropy(
            x, target.to(x.dtype), weight, reduction=reduction, label_smoothing=label_smoothing
        )
    if isinstance(target, Tensor) and target.dtype == torch.uint8:
        target = target.long()  # torch takes bytes for class indices, too
    _check_target(logits, target)
    in_triton = through_triton(logits)
    if not (in_triton or z_loss or softcap is not None or return_lse):
        return _torch_alone(logits, target, weight, ignore_index, reduction, label_smoothing)
    rows = logits if logits.dim() <= 2 else logits.movedim(1, -1)
    rows, flat = rows.reshape(-1, logits.shape[min(1, logits.dim() - 1)]), target.reshape(-1)
    rowwise = _cross_entropy if in_triton else _plain
    loss, lse, *_ = rowwise(rows, flat, weight, ignore_index, label_smoothing, z_loss, softcap or 0.0)
    loss, lse = loss.view(target.shape), lse.view(target.shape)
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / _count(flat, weight, ignore_index, loss.dtype)
    return (loss, lse) if return_lse else loss


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss through `cross_entropy`, whose options it takes."""

    z_loss: float = 0.0
    softcap: float | None = None
    return_lse: bool = False

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        return_lse: bool = False,
    ) -> None:
        super().__init__(
            weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
        self.z_loss = z_loss
        self.softcap = softcap
        self.return_lse = return_lse

    def forward(self, logits: Tensor, target: Tensor) -> Any:
        """Return what `cross_entropy` returns, for logits (N, V, ...) and target (N, ...)."""
        return cross_entropy(
            logits,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            return_lse=self.return_lse,
        )


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _check_options(
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logits: Tensor,
) -> None:
    check_floating("logits", logits)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index={ignore_index!r} is a {type(ignore_index).__name__}: pass an int")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: allowed are 'mean', 'sum' and 'none'")
    check_number("label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing}: allowed is 0 to 1")
    check_not_negative("z_loss", z_loss)
    if softcap is not None:
        check_not_negative("softcap", softcap)
        if softcap == 0.0:
            raise ValueError("softcap=0.0 leaves no logits: pass a positive number, or None for no cap")
    classes = logits.shape[min(1, logits.dim() - 1)]
    if classes == 0:
        raise ValueError(f"logits have shape {tuple(logits.shape)}: there must be at least one class")
    if weight is not None:
        check_like("weight", weight, (classes,), "logits", logits)


def _check_target(logits: Tensor, target: Tensor) -> None:
    if not isinstance(target, Tensor):
        raise TypeError(f"target is a {type(target).__name__}: pass a torch.Tensor of class indices")
    if target.dtype != torch.int64:
        raise ValueError(f"target has dtype {target.dtype}: pass int64 class indices, e.g. target.long()")
    wanted = () if logits.dim() == 1 else logits.shape[:1]
    if logits.dim() > 2:
        wanted += logits.shape[2:]
    if target.shape != wanted:
        raise ValueError(
            f"target has shape {tuple(target.shape)}: logits of shape {tuple(logits.shape)} need "
            f"{tuple(wanted)} (the classes are dimension 1; flatten (B, T, V) logits to (B*T, V))"
        )
    if target.device != logits.device:
        raise ValueError(f"target is on {target.device}, logits on {logits.device}: move target there")


def _count(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What the mean divides by: the summed weights of the kept targets, and 1 where that is 0."""
    total = _kept(target, weight, ignore_index, dtype)
    return total.clamp_min(1) if weight is None else torch.where(total == 0, 1, total)


def _kept(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    kept = target != ignore_index
    if weight is None:
        return kept.sum()
    last = weight.shape[0] - 1  # a target out of range has told of itself already
    return torch.where(kept, weight.detach()[target.clamp(0, last)], 0).sum(dtype=dtype)


def _torch_alone(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    """One call of torch's, where it has all that was asked for. Only its mean over nothing must be mended."""
    x = logits if logits.dtype == torch.float32 else logits.to(_wide(logits))
    w = None if weight is None else weight.detach().to(x.dtype)

    def loss(reduction: str) -> Tensor:
        return F.cross_entropy(
            x, target, w, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )

    if reduction != "mean":
        return loss(reduction)
    if type(x) is Tensor and x.is_cpu and not torch.compiler.is_compiling():
        mean = loss("mean")
        if not math.isnan(mean.item()):  # the CPU can look, and that costs less than counting first
            return mean
    return loss("sum") / _count(target, w, ignore_index, x.dtype)


def _plain(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """The rows' losses and lse in torch's own operations."""
    x = logits.to(_wide(logits))
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    w = None if weight is None else weight.detach().to(x.dtype)
    loss = F.cross_entropy(
        x, target, w, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    lse = torch.logsumexp(x, dim=-1)
    if z_loss:
        loss = loss + torch.where(target == ignore_index, 0.0, z_loss * lse.square())
    return loss, lse


@torch.library.custom_op("overlapkit::cross_entropy", mutates_args=())
def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from overlapkit.kernels.raw.cross_entropy import forward

    return forward(logits, target, weight, ignore_index, label_smoothing, z_loss, softcap)


@_cross_entropy.register_fake
def _(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    loss = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return loss, torch.empty_like(loss), torch.empty_like(loss)


@torch.library.custom_op("overlapkit::cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(
    dloss: Tensor,
    dlse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    low: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> Tensor:
    from overlapkit.kernels.raw.cross_entropy import backward

    options = (ignore_index, label_smoothing, z_loss, softcap)
    return backward(dloss, dlse, logits, target, weight, lse, low, *options)


@_cross_entropy_backward.register_fake
def _(
    dloss: Tensor,
    dlse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    low: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, weight, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    _, lse, low = output
    ctx.mark_non_differentiable(low)
    ctx.save_for_backward(logits, target, weight, lse, low)


def _differentiate(
    ctx: Any, dloss: Tensor | None, dlse: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    logits, target, weight, lse, low = ctx.saved_tensors
    if dloss is None and dlse is None:
        return None, None, None, None, None, None, None
    dloss = torch.zeros_like(lse) if dloss is None else dloss
    dlogits = _cross_entropy_backward(dloss, dlse, logits, target, weight, lse, low, *ctx.options)
    return dlogits, None, None, None, None, None, None


_cross_entropy.register_autograd(_differentiate, setup_context=_save)
_cross_entropy_backward.register_autograd(no_double_backward("cross_entropy"))
