import copy
import gc
import io
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

from overlapkit.measure.hooks import Hook, differentiable, nodes


class Owner:
    def __init__(self):
        self.calls = []

    def note(self, *args):
        self.calls.append(args)


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_a_hook_calls_its_owner_for_as_long_as_it_lives():
    owner = Owner()
    hook = Hook(owner.note)
    assert hook(1, 2, also=3) is None
    assert owner.calls == [(1, 2)]
    del owner
    gc.collect()
    assert hook(1) is None


def test_a_copied_or_pickled_module_is_not_watched():
    owner, model = Owner(), nn.Linear(2, 2)
    model.register_forward_pre_hook(Hook(owner.note))
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        twin(torch.ones(1, 2))
    assert owner.calls == []
    model(torch.ones(1, 2))
    assert len(owner.calls) == 1


def test_a_module_that_is_compiled_in_place_is_traced_without_it():
    owner, model = Owner(), nn.Linear(2, 2)
    model.register_forward_pre_hook(Hook(owner.note))
    model.register_forward_hook(Hook(owner.note), always_call=True)
    torch._dynamo.reset()
    model.compile(backend="eager", fullgraph=True)
    x = torch.ones(1, 2)
    torch.testing.assert_close(model(x), nn.functional.linear(x, model.weight, model.bias))
    assert owner.calls == []


def made(x):
    return x * 2


@pytest.mark.parametrize(
    "wrap",
    [
        lambda a, b: [a, b],
        lambda a, b: (a, None, "text", b),
        lambda a, b: {"a": a, "n": 3, "b": b},
        lambda a, b: OrderedDict(a=a, b=b),
        lambda a, b: Output(a, b),
        lambda a, b: Pair(a, b),
        lambda a, b: {"nested": [(a, b)]},
    ],
)
def test_tensors_are_found_in_what_models_return(wrap):
    x = torch.ones(3, requires_grad=True)
    a, b = made(x), made(x)
    found = differentiable(wrap(a, b))
    assert [id(t) for t in found] == [id(a), id(b)]
    assert nodes(found) == [a.grad_fn, b.grad_fn]


@pytest.mark.parametrize("output", [None, 3, "x", [], {}, torch.ones(2), [torch.ones(1)], Owner()])
def test_where_no_gradient_can_come_nothing_is_found(output):
    assert differentiable(output) == []


def test_a_bare_tensor_and_too_many():
    x = torch.ones(3, requires_grad=True)
    (found,) = differentiable(y := made(x))
    assert found is y
    assert len(differentiable([made(x) for _ in range(100)])) == 4
