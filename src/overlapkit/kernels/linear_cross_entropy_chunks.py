"""The linear layer and its cross entropy, a chunk of rows at a time: what never holds all logits.

Nothing here is known to autograd: these are the bodies of the operators.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from overlapkit.kernels import cross_entropy_rows as rows
from overlapkit.kernels.cross_entropy_options import Options
from overlapkit.kernels.cross_entropy_plain import wide
from overlapkit.launch import through_triton

_ALIGNED = 128  # rows: a tile of a matrix product


class Head(NamedTuple):
    """input (N, D), linear_weight (V, D), target (N,), linear_bias (V,), class weights (V,).

    With a process group V is this rank's share, but weight is of all classes.
    """

    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None
    weight: Tensor | None


def chunk_rows(x: Tensor, n_classes: int, chunk_bytes: int) -> int:
    """How many rows of x (N, D) make logits (rows, n_classes) that need up to chunk_bytes, 1 at least.

    A kernel needs the logits only; torch's operations two tensors of their size in fp32 beside them.
    """
    element = x.element_size()
    if not through_triton(x):
        element += 2 * wide(x.dtype).itemsize
    most = max(1, chunk_bytes // (n_classes * element))
    if most >= _ALIGNED:
        most -= most % _ALIGNED
    chunks = max(1, -(-x.shape[0] // most))
    even = -(-x.shape[0] // chunks)  # no small chunk at the end
    return min(most, max(1, -(-even // _ALIGNED)) * _ALIGNED)


def _logits(head: Head, chunk_bytes: int) -> Iterator[tuple[slice, Tensor]]:
    """The rows' logits in one buffer, which the next chunk overwrites."""
    x, w = head.input, head.linear_weight
    step = chunk_rows(x, w.shape[0], chunk_bytes)
    buffer = x.new_empty((min(step, x.shape[0]), w.shape[0]))
    for start in range(0, x.shape[0], step):
        part = slice(start, min(start + step, x.shape[0]))
        out = buffer[: part.stop - start]
        if head.linear_bias is None:
            torch.mm(x[part], w.t(), out=out)
        else:
            torch.addmm(head.linear_bias, x[part], w.t(), out=out)
        yield part, out


class _Gradients:
    """Sums of the chunks' gradients: that of input in its dtype, those of weight and bias in fp32.

    What nobody needs is an empty tensor.
    """

    def __init__(self, head: Head, needs: tuple[bool, bool, bool]) -> None:
        x, w, b = head.input, head.linear_weight, head.linear_bias
        make = Tensor.new_empty if x.shape[0] else Tensor.new_zeros  # without rows nothing is ever added
        self.head, self.needs = head, needs
        self.input = make(x, x.shape if needs[0] else (0,))
        self.weight = make(w, w.shape if needs[1] else (0,), dtype=wide(w.dtype))
        self.bias = make(w, w.shape[:1] if b is not None and needs[2] else (0,), dtype=wide(w.dtype))

    def add(self, part: slice, dlogits: Tensor) -> None:
        need_input, need_weight, need_bias = self.needs
        first = part.start == 0  # written, not added
        if need_input:
            torch.mm(dlogits, self.head.linear_weight, out=self.input[part])
        if need_weight:
            _add_product(self.weight, dlogits.t(), self.head.input[part], first)
        if need_bias:
            share = dlogits.sum(0, dtype=self.bias.dtype)
            self.bias.copy_(share) if first else self.bias.add_(share)

    def finish(self, group: str) -> tuple[Tensor, Tensor, Tensor]:
        """All three. Each rank of a group has its classes' share of the input's gradient: add them up."""
        if group and self.needs[0]:
            torch.distributed.all_reduce(self.input, group=rows.process_group(group))
        return self.input, self.weight, self.bias


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add a @ b to total, summing in total's dtype, which may be wider; the first one is written."""
    beta = 0 if first else 1
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=beta)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def total(
    head: Head, options: Options, chunk_bytes: int, needs: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the summed loss () and its gradients of input, linear_weight and linear_bias, one pass."""
    x = head.input
    losses = x.new_empty(x.shape[0], dtype=wide(x.dtype))
    gradients = _Gradients(head, needs)
    with torch.autocast(x.device.type, enabled=False):
        for part, logits in _logits(head, chunk_bytes):
            target = head.target[part]
            if any(needs):
                losses[part] = rows.forward_and_gradient_(logits, target, head.weight, None, options)[0]
                gradients.add(part, logits)
            else:
                losses[part] = rows.forward(logits, target, head.weight, options)[0]
    return losses.sum(), *gradients.finish(options.group)


def rowwise(head: Head, options: Options, chunk_bytes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, lse and what lse lost to rounding, each (N,)."""
    x = head.input
    found = x.new_empty((3, x.shape[0]), dtype=wide(x.dtype))
    with torch.autocast(x.device.type, enabled=False):
        for part, logits in _logits(head, chunk_bytes):
            target = head.target[part]
            for row, values in zip(found, rows.forward(logits, target, head.weight, options), strict=True):
                row[part] = values
    loss, lse, low = (row.clone() for row in found)  # an operator's outputs share no memory
    return loss, lse, low


def rowwise_gradients(
    dloss: Tensor,
    dlse: Tensor | None,
    head: Head,
    lse: Tensor,
    low: Tensor,
    options: Options,
    chunk_bytes: int,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, linear_weight and linear_bias, with the logits computed once more."""
    gradients = _Gradients(head, needs)
    with torch.autocast(head.input.device.type, enabled=False):
        for part, logits in _logits(head, chunk_bytes):
            dl = None if dlse is None else dlse[part]
            target = head.target[part]
            rows.gradient(dloss[part], dl, logits, target, head.weight, lse[part], low[part], options, logits)
            gradients.add(part, logits)
    return gradients.finish(options.group)
