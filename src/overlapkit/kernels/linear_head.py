"""Cross entropy of a linear layer's output that never holds the output: the head of a language model."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from overlapkit.kernels.arguments import check_floating, check_like, check_no_gradient, check_not_transformed
from overlapkit.kernels.cross_entropy_options import as_indices, check_options, group_name
from overlapkit.kernels.cross_entropy_plain import wide
from overlapkit.kernels.cross_entropy_rows import count, kept
from overlapkit.kernels.linear_cross_entropy_ops import INSTEAD, linear_cross_entropy_rows
from overlapkit.kernels.linear_cross_entropy_ops import linear_cross_entropy as _linear_cross_entropy
from overlapkit.kernels.sharded import LAST, loss_by_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Function = TypeVar("Function", bound=Callable[..., Any])
CHUNK_BYTES = 2**29


def _divisor(arguments: dict[str, Any]) -> Tensor:
    """What the mean divides the sum by: the summed weights of the kept targets, or 0."""
    ignore_index = arguments.get("ignore_index")
    ignore_index = -100 if ignore_index is None else ignore_index
    input, target, weight = arguments["input"], arguments["target"], arguments.get("weight")
    return kept(target, weight, ignore_index, wide(input.dtype))


def _whole_head(fn: Function) -> Function:
    """Refuse a head that is sharded over ranks, with what one does about it."""

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip(("input", "linear_weight"), args, strict=False)) | kwargs
        for name in ("linear_weight", "linear_bias"):
            placements = getattr(named.get(name), "placements", ())  # a DTensor has them
            if not all(p.is_replicate() for p in placements):
                raise TypeError(
                    f"{name} is a DTensor with placements {placements}: call this inside the forward of the "
                    "FSDP2 unit that the head belongs to, where it is whole; or pass .full_tensor(), or a "
                    "head sharded over classes as .to_local() with vocab_group="
                )
        return fn(*args, **kwargs)

    return cast(Function, checked)


@_whole_head
@loss_by_rows("input", classes=LAST, whole=("linear_weight", "linear_bias", "weight"), count=_divisor)
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    return_lse: bool = False,
    vocab_group: "ProcessGroup | None" = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Any:
    """`cross_entropy` of linear(input, linear_weight, linear_bias), computed in chunks of rows.

    As torch.nn.functional.linear_cross_entropy (torch 2.13) for class indices. The N x V logits never
    exist. Beside its inputs a call needs chunk_bytes at the most (or one row of logits, where that is
    more) and its gradients: for input as large as it is, for linear_weight and linear_bias in float32, in
    which the chunks' shares are summed. The backward pass writes them once more, in the inputs' dtypes.

    For "mean" and "sum" the gradients are made in the forward pass, from each chunk's logits while they
    are there; the backward pass multiplies them by the loss's own gradient. With "none" or return_lse the
    rows' gradients are not known yet, so that the backward pass computes the logits once more: a third
    more arithmetic. Inputs that require no gradient cost nothing.

    Under autocast input, linear_weight and linear_bias take the autocast dtype, as in F.linear. torch's
    FlopCounterMode counts the matrix products, if this name was imported before it was opened.

    FSDP2: linear_weight must be whole, which a parameter is inside the forward of the unit that it
    belongs to (LinearCrossEntropyLoss as a unit of its own, or the root). Tied to an embedding: pass that
    module's weight; autograd adds up both gradients.

    Args:
        input: (..., D), floating point, any strides.
        linear_weight: (V, D), dtype of input.
        target: (...), int64 or uint8.
        linear_bias: (V,), dtype of input, or None.
        weight: (V,), the weight of each class, or None for 1. It must not require a gradient.
        reduction: "mean" (over the weights of the targets that are not ignored), "sum" or "none".
        ignore_index: A target that counts for nothing; None is -100, as in torch.
        label_smoothing: 0 to 1, the share of the loss that goes to all classes alike.
        z_loss: Adds z_loss * lse^2 to the loss of each row.
        softcap: Replaces the logits by softcap * tanh(logits / softcap); None for not.
        return_lse: Also return the log-sum-exp of each row, differentiable.
        vocab_group: The process group that the classes are sharded over, or None, as in `cross_entropy`.
            linear_weight and linear_bias are those of this rank's classes, input, target and weight are the
            same on all ranks, and so is input's gradient: it is summed over the group, by one all-reduce in
            input's dtype.
        chunk_bytes: What a chunk's logits, and in torch's operations their copies, may take.

    Returns:
        The loss, float32 (float64 for float64 input): () or, for "none", target's shape. With return_lse
        the pair (loss, lse), lse with target's shape.

    Raises:
        TypeError: An argument is of a wrong type, or the head is a sharded DTensor.
        ValueError: An option is out of range; shapes, devices or dtypes do not fit; target holds class
            probabilities.
        RuntimeError: A second derivative was asked for, or it is inside a transform of torch.func.
    """
    ignore_index = -100 if ignore_index is None else ignore_index
    check_options(ignore_index, reduction, label_smoothing, z_loss, softcap)
    check_not_transformed("linear_cross_entropy", INSTEAD)
    group, ranks = group_name(vocab_group)
    _check_head(input, linear_weight, linear_bias, weight, ranks, chunk_bytes)
    input, linear_weight, linear_bias = _autocast(input, linear_weight, linear_bias)
    _check_dtypes(input, linear_weight, linear_bias)
    target = _check_target(input, target)
    x, flat = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    head = (x, linear_weight, flat, linear_bias, weight)
    options = (ignore_index, label_smoothing, z_loss, softcap or 0.0, group, chunk_bytes)
    if reduction == "none" or return_lse:
        loss, lse, _ = linear_cross_entropy_rows(*head, *options)
        loss, lse = loss.view(target.shape), lse.view(target.shape)
        loss = loss if reduction == "none" else loss.sum()
    else:
        leaves = (x, linear_weight, linear_bias)
        needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in leaves]
        loss, lse = _linear_cross_entropy(*head, *options, *needs)[0], None
    if reduction == "mean":
        loss = loss / count(flat, weight, ignore_index, loss.dtype)
    return (loss, lse) if return_lse else loss


class LinearCrossEntropyLoss(nn.Module):
    """A linear layer and its cross entropy through `linear_cross_entropy`, as torch.nn's (torch 2.13).

    Args:
        in_features: D.
        num_classes: V, of all ranks together where there is a vocab_group.
        bias: Whether the layer has a bias.
        device: Where the layer is made.
        dtype: The layer's dtype.
        reduction: As in `linear_cross_entropy`, like all that follow.
        weight: (V,), the weight of each class, kept as a buffer.
        ignore_index: A target that counts for nothing; None is -100.
        label_smoothing: 0 to 1.
        z_loss: Adds z_loss * lse^2 to the loss of each row.
        softcap: Replaces the logits by softcap * tanh(logits / softcap).
        return_lse: Also return the log-sum-exp of each row.
        vocab_group: The process group that the classes are sharded over; `linear` has this rank's.
        chunk_bytes: What a chunk's logits may take.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        return_lse: bool = False,
        vocab_group: "ProcessGroup | None" = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__()
        _, ranks = group_name(vocab_group)
        if num_classes % ranks:
            raise ValueError(
                f"num_classes={num_classes} cannot be shared by {ranks} ranks: pad it to a multiple, "
                "and the bias of the added classes with -inf"
            )
        self.linear = nn.Linear(in_features, num_classes // ranks, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.options: dict[str, Any] = {
            "reduction": reduction,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "softcap": softcap,
            "return_lse": return_lse,
            "vocab_group": vocab_group,
            "chunk_bytes": chunk_bytes,
        }

    def forward(self, input: Tensor, target: Tensor) -> Any:
        """Return what `linear_cross_entropy` returns, for input (..., D) and target (...)."""
        linear = self.linear
        return linear_cross_entropy(
            input, linear.weight, target, linear_bias=linear.bias, weight=self.weight, **self.options
        )

    def extra_repr(self) -> str:
        """The options that are set."""
        return ", ".join(f"{name}={value}" for name, value in self.options.items() if value is not None)


def _check_head(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ranks: int,
    chunk_bytes: int,
) -> None:
    check_floating("input", input)
    check_floating("linear_weight", linear_weight)
    if linear_weight.dim() != 2 or linear_weight.shape[0] == 0:
        raise ValueError(f"linear_weight has shape {tuple(linear_weight.shape)}: it needs (V, D) with V > 0")
    v, d = linear_weight.shape
    if input.shape[-1] != d:
        raise ValueError(f"input has shape {tuple(input.shape)}: linear_weight {(v, d)} needs (..., {d})")
    check_like("linear_weight", linear_weight, (v, d), "input", input)
    if linear_bias is not None:
        check_like("linear_bias", linear_bias, (v,), "linear_weight", input)
    if weight is not None:
        of = "linear_weight" if ranks == 1 else f"linear_weight on {ranks} ranks"
        check_like("weight", weight, (v * ranks,), of, input)
        check_no_gradient("weight", weight, "linear_cross_entropy")
    if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1:
        raise ValueError(f"chunk_bytes={chunk_bytes!r}: pass a positive number of bytes, e.g. 2**28")


def _check_dtypes(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> None:
    for name, tensor in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if tensor is not None and tensor.dtype != input.dtype:
            raise ValueError(
                f"{name} has dtype {tensor.dtype}, input {input.dtype}: convert one of them with .to(...), "
                "or use torch.autocast"
            )


def _check_target(input: Tensor, target: Tensor) -> Tensor:
    if isinstance(target, Tensor) and target.is_floating_point():
        raise ValueError(
            "target holds class probabilities, which are as large as the logits: use "
            "cross_entropy(F.linear(input, linear_weight, linear_bias), target)"
        )
    return as_indices(target, tuple(input.shape[:-1]), "input", input)


def _autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What F.linear's arguments become under autocast; float64 stays."""
    kind = tensors[0].device.type if tensors[0] is not None else "cpu"
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)
