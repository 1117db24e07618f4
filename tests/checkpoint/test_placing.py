"""Long tensors are put in place as bytes: the same values, into every layout, and autograd sees it."""

import pytest
import torch

from overlapkit.checkpoint import placing
from overlapkit.checkpoint.placing import copy_in_place
from overlapkit.lane import Lane

INLINE = Lane("place", kind="inline")
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
    values = {"w": value, "beside": torch.ones(3)}
    copy_in_place({"w": target, "beside": (beside := torch.zeros(3))}, values, INLINE)
    assert torch.equal(target.detach(), value)
    assert torch.equal(beside, torch.ones(3))
    assert target._version > version
    assert target.requires_grad is isinstance(target, torch.nn.Parameter)


def test_what_lies_around_a_long_target_stays():
    whole = torch.zeros(LONG // 4 + 7)
    copy_in_place({"w": whole[3:-4]}, {"w": torch.ones(LONG // 4)}, INLINE)
    assert whole[3:-4].all()
    assert not whole[:3].any()
    assert not whole[-4:].any()


def test_autograd_refuses_a_graph_over_values_that_were_replaced():
    weight = torch.nn.Parameter(torch.ones(LONG // 4))
    loss = (weight * weight).sum()
    copy_in_place({"w": weight}, {"w": torch.zeros(LONG // 4)}, INLINE)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("inference", [False, True])
def test_two_threads_copy_what_is_short(monkeypatch, inference):
    monkeypatch.setattr(placing, "_TOGETHER", 3)
    with torch.inference_mode(inference), Lane("place", kind="thread") as helper:
        targets = {str(n): torch.nn.Parameter(torch.zeros(n)) for n in range(1, 101)}
        values = {name: torch.randn(target.shape) for name, target in targets.items()}
        copy_in_place(targets, values, helper)
        assert all(torch.equal(target, values[name]) for name, target in targets.items())


def test_of_targets_that_share_memory_the_last_one_wins(monkeypatch):
    monkeypatch.setattr(placing, "_TOGETHER", 1)
    calls = []
    real = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *lists: calls.append(len(lists[0])) or real(*lists))
    weight = torch.zeros(5)
    values = {"first": torch.ones(5), "part": torch.full((2,), 2.0)}
    copy_in_place({"first": weight, "part": weight[3:]}, values, INLINE)
    assert weight.tolist() == [1, 1, 1, 2, 2]
    assert calls == [2]
