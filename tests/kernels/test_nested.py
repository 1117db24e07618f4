"""Nested tensors, whose sequences have lengths of their own: no kernel knows them, and torch takes them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from overlapkit import kernels

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: kernels.layer_norm(x, torch.ones(8), torch.zeros(8)),
    "rms_norm": lambda x: kernels.rms_norm(x, torch.ones(8)),
    "softmax": lambda x: kernels.softmax(x),
    "swiglu": lambda x: kernels.swiglu(x, x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_sequence_is_as_by_itself(path: str, name: str) -> None:
    parts = [torch.randn(length, 8, requires_grad=True) for length in (3, 5)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    found = FUNCTIONS[name](nested)
    alone = torch.cat([FUNCTIONS[name](part) for part in parts])
    torch.testing.assert_close(found.values(), alone)
    upstream = torch.randn(8, 8)
    grads = [torch.autograd.grad(out, parts, upstream) for out in (found.values(), alone)]
    torch.testing.assert_close(*grads)
