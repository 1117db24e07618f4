"""A model compiled in place: each call is told to each owner once, and nothing is left when they go."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from overlapkit import StepMeter
from overlapkit.measure.compiled_call import CompiledCall, unwatch, watch


class Owner:
    def __init__(self):
        self.told = []

    def before(self, module, args):
        self.told.append(("before", args[0].item()))

    def after(self, module, args, output):
        self.told.append(("after", None if output is None else output.item()))


class Doubling(nn.Module):
    def forward(self, x):
        if x == 9:
            raise LookupError("mine")
        return x * 2


@pytest.fixture
def model():
    made = Doubling()
    made._compiled_call_impl = made._call_impl  # what compile() does, without a compiler
    return made


@pytest.mark.parametrize("first", [0, 1])
def test_two_owners_are_told_of_each_call_once_and_go_in_any_order(model, first):
    compiled = model._compiled_call_impl
    owners = [Owner(), Owner()]
    for _ in range(3):  # as at every step
        for owner in owners:
            watch(model, owner.before, owner.after)
    assert model(torch.tensor(3)) == 6
    assert [owner.told for owner in owners] == [[("before", 3), ("after", 6)]] * 2
    unwatch(model, owners[first])
    model(torch.tensor(4))
    assert [len(owner.told) for owner in owners] == ([2, 4] if first == 0 else [4, 2])
    unwatch(model, owners[1 - first])
    assert model._compiled_call_impl == compiled


def test_a_call_that_fails_ends(model):
    owner = Owner()
    watch(model, owner.before, owner.after)
    with pytest.raises(LookupError, match="mine"):
        model(torch.tensor(9))
    assert owner.told == [("before", 9), ("after", None)]


def test_an_owner_that_is_gone_is_told_nothing_and_taken_out(model):
    compiled, owner, other = model._compiled_call_impl, Owner(), Owner()
    watch(model, owner.before, owner.after)
    del owner
    gc.collect()
    assert model(torch.tensor(3)) == 6
    unwatch(model, other)
    assert model._compiled_call_impl == compiled


def test_copies_and_pickles_are_not_watched(model):
    owner = Owner()
    watch(model, owner.before, owner.after)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not isinstance(other._compiled_call_impl, CompiledCall)
        assert other(torch.tensor(3)) == 6
    assert owner.told == []


def test_a_module_that_is_not_compiled_is_left_alone():
    model, owner = Doubling(), Owner()
    watch(model, owner.before, owner.after)
    assert model._compiled_call_impl is None
    meter = StepMeter(nn.Linear(1, 1))
    meter.close()
