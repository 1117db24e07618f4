"""Long tensors are put in place as bytes: the same values, into every layout, and autograd sees it."""

import pytest
import torch

from overlapkit.checkpoint import placing
from overlapkit.checkpoint.placing import copy_in_place

LONG = placing._LONG
TARGETS = {
    "long": lambda: torch.zeros(LONG // 4 + 1),
    "just short": lambda: torch.zeros(LONG // 4 - 1),
    "transposed": lambda: torch.zeros(2048, 2560).t(),
    "channels last": lambda: torch.zeros(2, 3, 1024, 1024).to(memory_format=torch.channels_last),
    "every other": lambda: torch.zeros(LONG // 2)[::2],
    "within another": lambda: torch.zeros(LONG // 4 + 7)[3:],
    "bool": lambda: torch.zeros(LONG + 1, dtype=torch.bool),
    "bfloat16": lambda: torch.zeros(3, LONG // 4, dtype=torch.bfloat16),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(LONG // 4)),
    "scalar": lambda: torch.zeros(()),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_values_and_versions(kind):
    target = TARGETS[kind]()
    value = torch.randn(target.shape).to(target.dtype)
    version = target._version
    copy_in_place({"w": target, "beside": (beside := torch.zeros(3))}, {"w": value, "beside": torch.ones(3)})
    assert torch.equal(target.detach(), value)
    assert torch.equal(beside, torch.ones(3))
    assert target._version > version
    assert target.requires_grad is isinstance(target, torch.nn.Parameter)


def test_what_lies_around_a_long_target_stays():
    whole = torch.zeros(LONG // 4 + 7)
    copy_in_place({"w": whole[3:-4]}, {"w": torch.ones(LONG // 4)})
    assert whole[3:-4].all()
    assert not whole[:3].any()
    assert not whole[-4:].any()


def test_autograd_refuses_a_graph_over_values_that_were_replaced():
    weight = torch.nn.Parameter(torch.ones(LONG // 4))
    loss = (weight * weight).sum()
    copy_in_place({"w": weight}, {"w": torch.zeros(LONG // 4)})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
