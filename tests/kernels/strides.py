"""Layouts that a caller may hand down, gradients included."""

import torch
from torch import Tensor

KINDS = ["sliced", "every second row", "transposed", "permuted", "one row for all", "one value for all"]


def strided(kind: str) -> Tensor:
    if kind == "sliced":
        return torch.randn(6, 50)[:, 5:42]
    if kind == "every second row":
        return torch.randn(12, 37)[::2]
    if kind == "transposed":
        return torch.randn(37, 6).t()
    if kind == "permuted":
        return torch.randn(2, 37, 3).permute(0, 2, 1)
    if kind == "one row for all":
        return torch.randn(1, 37).expand(6, 37)
    return torch.randn(()).expand(6, 37)  # what sum().backward() hands down
