"""The measure of a kernel's values: how far torch's own operations are off in the same dtype."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Inputs = Sequence[Tensor | None]


def judge(ours: Tensor, torchs: Tensor, truth: Tensor) -> None:
    """Assert error <= 2 x torch's error + eps of the dtype, for the largest and the root-mean-square error.

    Errors are taken relative to |truth| plus its root mean square over the tensor: next to larger numbers
    a sum that cancels has lost digits, in torch as in ours.
    """
    assert ours.shape == truth.shape
    assert ours.dtype == torchs.dtype
    assert not ours.isnan().any(), "not every element was written"
    if truth.numel() == 0:
        return
    scale = truth.abs() + _rms(truth) + torch.finfo(ours.dtype).tiny
    mine, theirs = (ours.double() - truth) / scale, (torchs.double() - truth) / scale
    eps = torch.finfo(ours.dtype).eps
    for name, size in (("largest", _largest), ("root-mean-square", _rms)):
        error, torch_error = size(mine), size(theirs)
        assert error <= 2 * torch_error + eps, (
            f"{name} error {error:.3g}, torch's {torch_error:.3g}, {eps=:.3g}"
        )


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _largest(x: Tensor) -> float:
    return x.abs().max().item()


def run(fn: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Inputs, grads: Inputs) -> list[Tensor]:
    """Outputs of fn(*inputs), then the gradients of its inputs (those that ask), given the outputs' grads."""
    leaves = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in inputs]
    outputs = fn(*leaves)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    used = [(out, g) for out, g in zip(outputs, grads, strict=True) if g is not None]
    found = torch.autograd.grad([out for out, _ in used], wanted, [g.to(out.dtype) for out, g in used])
    return [out.detach() for out in outputs] + list(found)


def to_double(tensors: Inputs) -> list[Tensor | None]:
    """The same values in float64, asking for gradients where they did."""
    return [
        x if x is None or not x.is_floating_point() else x.detach().double().requires_grad_(x.requires_grad)
        for x in tensors
    ]


def compare(
    ours: Callable[..., Tensor | tuple[Tensor, ...]],
    torchs: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Inputs,
    grads: Inputs,
) -> None:
    """Judge outputs and gradients of `ours` by `torchs` in the same dtype and in float64."""
    truth = run(torchs, to_double(inputs), to_double(grads))
    theirs = run(torchs, inputs, grads)
    for mine, other, true in zip(run(ours, inputs, grads), theirs, truth, strict=True):
        judge(mine, other, true)
