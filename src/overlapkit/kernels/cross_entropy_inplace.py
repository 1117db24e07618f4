"""cross_entropy_: cross entropy that leaves its gradient where the logits were, and needs no more memory."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from overlapkit.kernels.arguments import check_no_gradient
from overlapkit.kernels.cross_entropy import check_logits, check_target, cross_entropy, divisor
from overlapkit.kernels.cross_entropy_ops import cross_entropy_ as _cross_entropy_
from overlapkit.kernels.cross_entropy_ops import scale_rows_
from overlapkit.kernels.cross_entropy_options import Options, check_options, group_name
from overlapkit.kernels.cross_entropy_plain import wide
from overlapkit.kernels.cross_entropy_rows import count
from overlapkit.kernels.sharded import loss_by_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@loss_by_rows("logits", classes=1, whole=("weight",), count=divisor)
def cross_entropy_(
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
    """`cross_entropy` whose gradient is written over the logits, in the pass that computes the loss.

    It halves the memory of the loss, and on a GPU moves two thirds of its bytes (up to 32,768 classes).
    After the call logits holds no logits: read it before. Autograd notices an operation that saved them
    for its own backward. Where no gradient is asked for (no_grad, logits that require none) nothing is
    written. In the last step, backward multiplies the rows whose incoming gradient is not 1.

    float16 logits with a GradScaler: a gradient too small for float16 is lost here before the scaler's
    factor reaches it; `cross_entropy` multiplies first.

    Args:
        logits: As in `cross_entropy`, but no leaf that requires grad, no view of one, and no element twice
            (expand, unfold). The memory is saved for (N, V) with dense rows; others are copied there and
            back.
        target: As in `cross_entropy`; int64 or uint8, no class probabilities.
        weight: As in `cross_entropy`, like all that follow.
        ignore_index: A target that counts for nothing.
        reduction: "mean", "sum" or "none".
        label_smoothing: 0 to 1.
        z_loss: Adds z_loss * lse^2 to the loss of each row.
        softcap: Replaces the logits by softcap * tanh(logits / softcap).
        return_lse: Also return the log-sum-exp of each row, which is not differentiable here.
        vocab_group: The process group that the classes are sharded over.

    Returns:
        The loss, or the pair (loss, lse), as `cross_entropy`.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: As `cross_entropy`; or logits cannot be written to, or target holds probabilities.
        RuntimeError: A second backward (retain_graph), or a second derivative.
    """
    check_options(ignore_index, reduction, label_smoothing, z_loss, softcap)
    group, ranks = group_name(vocab_group)
    check_logits(logits, weight, ranks)
    target = check_target(logits, target)
    check_no_gradient("weight", weight, "cross_entropy_")
    options = Options(ignore_index, label_smoothing, z_loss, softcap or 0.0, group)
    if not (torch.is_grad_enabled() and logits.requires_grad):
        loss, lse = cross_entropy(
            logits,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            return_lse=True,
            vocab_group=vocab_group,
        )
    else:
        _check_writable(logits)
        loss, lse = _InPlace.apply(logits, target, weight, options, reduction)  # type: ignore[no-untyped-call]
    return (loss, lse) if return_lse else loss


def _check_writable(logits: Tensor) -> None:
    base = logits._base
    if logits.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
        what = "leaf" if logits.is_leaf else "view of a leaf"
        raise ValueError(
            f"logits is a {what} that requires grad: its values would be lost; use cross_entropy for it"
        )
    if _shares_memory(logits):
        raise ValueError(
            f"logits has strides {logits.stride()}: elements that share memory cannot hold their gradients; "
            "use cross_entropy, or logits.contiguous()"
        )


def _shares_memory(x: Tensor) -> bool:
    """Whether two elements may lie in one place, as those of expand, unfold and some of as_strided do."""
    dims = [(stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    return any(
        # all that a dimension of smaller strides, or of as large ones and before it, reaches
        stride <= sum((m - 1) * s for j, (s, m) in enumerate(dims) if s < stride or (s == stride and j < i))
        for i, (stride, _) in enumerate(dims)
    )


class _InPlace(torch.autograd.Function):
    """The gradient lies in the saved logits; of whoever changes them before backward autograd tells."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        options: Options,
        reduction: str,
    ) -> tuple[Tensor, Tensor]:
        n = None
        if reduction == "mean":
            n = count(target, weight, options.ignore_index, wide(logits.dtype)).to(wide(logits.dtype))
        logits = logits.detach()  # the same memory and version, no view whose creator would mind
        rows = _classes_last(logits)
        flat = rows.reshape(-1, rows.shape[-1])
        dense = flat if _is_dense(logits) else flat.clone(memory_format=torch.contiguous_format)
        loss, lse = _cross_entropy_(
            dense, target.reshape(-1), weight, None if n is None else 1.0 / n, *options
        )
        if dense is not flat:
            rows.copy_(dense.view(rows.shape))
        loss, lse = loss.view(target.shape), lse.view(target.shape)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits)
        ctx.spent = False
        if reduction != "none":
            loss = loss.sum()
        return (loss if n is None else loss / n), lse

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if dloss is None:
            return None, None, None, None, None
        if ctx.spent:
            raise RuntimeError(
                "cross_entropy_ has one backward only: the first one multiplied the gradient in place; "
                "with retain_graph=True use cross_entropy"
            )
        compiling = torch.compiler.is_compiling()
        if torch.is_grad_enabled() and not compiling:  # create_graph=True; the compiler refuses it by itself
            raise RuntimeError(
                "cross_entropy_ cannot be differentiated twice: for second derivatives (create_graph=True) "
                "use torch's own function"
            )
        (dlogits,) = ctx.saved_tensors
        if compiling or not _is_dense(dlogits):  # the compiler reuses memory by itself
            dloss = dloss if dlogits.dim() == 1 or dloss.dim() == 0 else dloss.unsqueeze(1)
            scaled = dlogits.to(wide(dlogits.dtype)) * dloss
            return scaled.to(dlogits.dtype), None, None, None, None
        ctx.spent = True
        rows = dlogits.reshape(-1, dlogits.shape[-1])
        scale_rows_(rows, dloss.reshape(-1).expand(rows.shape[0]))
        return dlogits, None, None, None, None


def _classes_last(logits: Tensor) -> Tensor:
    return logits if logits.dim() <= 2 else logits.movedim(1, -1)


def _is_dense(logits: Tensor) -> bool:
    """Whether rows of classes lie in memory as the kernel needs them."""
    return logits.dim() <= 2 and (logits.stride(-1) == 1 or logits.shape[-1] == 1)
