"""Cross entropy over class indices, with all of torch's options, z-loss, logit soft-capping and the lse."""

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlapkit.kernels.arguments import check_floating, check_like, check_no_gradient, check_not_transformed
from overlapkit.kernels.cross_entropy_ops import cross_entropy as _cross_entropy
from overlapkit.kernels.cross_entropy_options import as_indices, check_options, group_name
from overlapkit.kernels.cross_entropy_plain import wide
from overlapkit.kernels.cross_entropy_rows import count, kept
from overlapkit.kernels.sharded import loss_by_rows
from overlapkit.launch import through_triton, transformed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def divisor(arguments: dict[str, Any]) -> Tensor:
    """What the mean divides the sum by: the summed weights of the kept targets, or 0."""
    logits, target, weight = arguments["logits"], arguments["target"], arguments.get("weight")
    if target.is_floating_point():
        classes = logits.shape[min(1, logits.dim() - 1)]
        rows: Tensor = logits.new_full((), logits.numel() // classes, dtype=wide(logits.dtype))
        return rows
    return kept(target, weight, arguments.get("ignore_index", -100), wide(logits.dtype))


@loss_by_rows("logits", classes=1, whole=("weight",), count=divisor)
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
    vocab_group: "ProcessGroup | None" = None,
) -> Any:
    """Cross entropy of logits and class indices, as torch.nn.functional.cross_entropy, computed in fp32.

    It differs from torch's in three ways, and never waits for the device to find out:

    * The mean over no targets (all of them ignored, or none there) is 0 with zero gradients, not NaN.
    * The loss of half-precision logits is float32, as torch's is under autocast.
    * On a GPU a target out of range gives NaN for its row (loss and gradient); on the CPU torch raises.

    Float targets (class probabilities) run through torch's own operations. None of them can be ignored.

    Args:
        logits: (V,), (N, V) or (N, V, ...), floating point, any strides. V last is read without a copy.
        target: (), (N,) or (N, ...), int64 or uint8, any strides.
        weight: (V,), the weight of each class, or None for 1. Not differentiable beside class indices, where
            one that requires a gradient is an error, as in torch.
        ignore_index: A target that counts for nothing.
        reduction: "mean" (over the weights of the targets that are not ignored), "sum" or "none".
        label_smoothing: 0 to 1, the share of the loss that goes to all classes alike.
        z_loss: Adds z_loss * lse^2 to the loss of each row (PaLM, section 5), reduced as the rest is.
        softcap: Replaces the logits by softcap * tanh(logits / softcap), as Gemma 2 does; None for not.
        return_lse: Also return the log-sum-exp of each row, differentiable.
        vocab_group: The process group that the classes are sharded over, or None. Rank r of its R ranks
            passes the logits of classes r * V/R up to (r + 1) * V/R, and the same target and weight (of all
            V classes) as the others. All ranks get the same loss, bit for bit, by one all-gather of 16 bytes
            a row and rank; each gets the gradient of its own logits. Pad V to a multiple of R with
            logits of -inf (without softcap, which would raise them to -softcap); shards of unequal sizes
            are an error on the CPU, and NaN on a GPU.

    Returns:
        The loss, float32 (float64 for float64 logits): () or, for "none", target's shape. With
        return_lse the pair (loss, lse), lse with target's shape, ignored rows included.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An option is out of range; shapes, devices or dtypes do not fit; ignore_index or
            vocab_group is set and target holds class probabilities.
        RuntimeError: A second derivative was asked for, on a GPU or with a vocab_group; or a vocab_group is
            inside a transform of torch.func.
    """
    check_options(ignore_index, reduction, label_smoothing, z_loss, softcap)
    group, ranks = group_name(vocab_group)
    check_logits(logits, weight, ranks)
    if group:
        check_not_transformed("the loss of a vocab_group", "whole logits")
    if isinstance(target, Tensor) and target.is_floating_point():
        _check_probabilities(ignore_index, group)
        loss, lse = _of_probabilities(logits, target, weight, reduction, label_smoothing, z_loss, softcap)
        return (loss, lse) if return_lse else loss
    target = check_target(logits, target)
    check_no_gradient("weight", weight, "cross_entropy")
    in_operator = through_triton(logits) or bool(group)
    if not (in_operator or z_loss or softcap is not None or return_lse):
        return _torch_alone(logits, target, weight, ignore_index, reduction, label_smoothing)
    rows = logits if logits.dim() <= 2 else logits.movedim(1, -1)
    rows, flat = rows.reshape(-1, logits.shape[min(1, logits.dim() - 1)]), target.reshape(-1)
    options = (ignore_index, label_smoothing, z_loss, softcap or 0.0)
    if in_operator:
        loss, lse, _ = _cross_entropy(rows, flat, weight, *options, group)
    else:
        loss, lse = _plain(rows, flat, weight, *options)
    loss, lse = loss.view(target.shape), lse.view(target.shape)
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / count(flat, weight, ignore_index, loss.dtype)
    return (loss, lse) if return_lse else loss


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss through `cross_entropy`, whose options it takes.

    Args:
        weight: Of each class (V,), or None.
        ignore_index: As torch's.
        reduction: As torch's.
        label_smoothing: As torch's.
        z_loss: This and the others as of `cross_entropy`.
        softcap: See there.
        return_lse: See there.
        vocab_group: See there.
    """

    z_loss: float = 0.0
    softcap: float | None = None
    return_lse: bool = False
    vocab_group: "ProcessGroup | None" = None

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
        vocab_group: "ProcessGroup | None" = None,
    ) -> None:
        super().__init__(
            weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
        self.z_loss = z_loss
        self.softcap = softcap
        self.return_lse = return_lse
        self.vocab_group = vocab_group

    def forward(self, input: Tensor, target: Tensor) -> Any:
        """Return what `cross_entropy` returns, for input (N, V, ...), the logits, and target (N, ...)."""
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            return_lse=self.return_lse,
            vocab_group=self.vocab_group,
        )


def check_logits(logits: Tensor, weight: Tensor | None, ranks: int) -> None:
    """Refuse logits without classes, and weights of other classes than theirs."""
    check_floating("logits", logits)
    classes = logits.shape[min(1, logits.dim() - 1)]
    if classes == 0:
        raise ValueError(f"logits have shape {tuple(logits.shape)}: there must be at least one class")
    if weight is not None:
        of = "logits" if ranks == 1 else f"logits on {ranks} ranks of {classes} classes"
        check_like("weight", weight, (classes * ranks,), of, logits)


def check_target(logits: Tensor, target: Tensor) -> Tensor:
    """Return class indices that fit logits (V,), (N, V) or (N, V, ...), as int64."""
    wanted = () if logits.dim() == 1 else (*logits.shape[:1], *logits.shape[2:])
    remedy = " (the classes are dimension 1; flatten (B, T, V) logits to (B*T, V))"
    return as_indices(target, wanted, "logits", logits, remedy)


def _check_probabilities(ignore_index: int, group: str) -> None:
    for name, given in (("ignore_index", ignore_index >= 0), ("vocab_group", bool(group))):
        if given:  # an ignore_index below 0 is no class, and torch lets it pass
            value = f"{name}={ignore_index if name == 'ignore_index' else group!r}"
            raise ValueError(
                f"{value}: target holds class probabilities, for which there is none; "
                "leave it out, or pass class indices (int64)"
            )


def _of_probabilities(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Loss and lse for target (N, V, ...) of class probabilities."""
    x = _capped(logits, softcap or 0.0)
    weight = None if weight is None else weight.to(x.dtype)
    loss = F.cross_entropy(x, target.to(x.dtype), weight, reduction="none", label_smoothing=label_smoothing)
    lse = torch.logsumexp(x, dim=min(1, x.dim() - 1))
    if z_loss:
        loss = loss + z_loss * lse.square()
    if reduction != "none":
        rows = loss.numel() if reduction == "mean" else 1
        loss = loss.sum() / max(rows, 1)
    return loss, lse


def _torch_alone(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    """One call of torch's, where it has all that was asked for. Only its mean over nothing must be mended."""
    x = logits if logits.dtype == torch.float32 else logits.to(wide(logits.dtype))
    w = None if weight is None else weight.detach().to(x.dtype)

    def loss(reduction: str) -> Tensor:
        return F.cross_entropy(
            x, target, w, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )

    if reduction != "mean":
        return loss(reduction)
    if type(x) is Tensor and x.is_cpu and not torch.compiler.is_compiling() and not transformed():
        mean = loss("mean")
        if not math.isnan(mean.item()):  # the CPU can look, and that costs less than counting first
            return mean
    return loss("sum") / count(target, w, ignore_index, x.dtype)


def _plain(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """The rows' losses and lse in torch's own operations, which autograd knows."""
    x = _capped(logits, softcap)
    w = None if weight is None else weight.detach().to(x.dtype)
    loss = F.cross_entropy(
        x, target, w, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    lse = torch.logsumexp(x, dim=-1)
    if z_loss:
        loss = loss + torch.where(target == ignore_index, 0.0, z_loss * lse.square())
    return loss, lse


def _capped(logits: Tensor, softcap: float) -> Tensor:
    x = logits.to(wide(logits.dtype))
    return softcap * torch.tanh(x / softcap) if softcap else x
