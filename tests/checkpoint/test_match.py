"""What a restore puts in place where a module or an optimizer does not take tensors as they are."""

import pytest
import torch
from torch import nn

from overlapkit.checkpoint import Checkpointer, MismatchError


class TensorExtra(nn.Linear):
    """As TransformerEngine's modules: the extra state is a tensor, whose length changes."""

    seen = 1

    def get_extra_state(self):
        return torch.full((self.seen,), self.seen)

    def set_extra_state(self, state):
        self.seen = len(state)


class CopiesInStateDict(nn.Linear):
    def state_dict(self, *args, **kwargs):
        return {name: value.detach().clone() for name, value in super().state_dict(*args, **kwargs).items()}


class CopiesWhatItSaves(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].detach().clone()


def with_hook(change):
    def made(*args):
        layer = nn.Linear(*args)
        layer.register_state_dict_post_hook(lambda module, found, prefix, meta: change(found, prefix))
        return layer

    return made


@with_hook
def copies_in_a_hook(found, prefix):
    found.update({name: value.detach().clone() for name, value in found.items()})


@with_hook
def derives_in_a_hook(found, prefix):
    found[f"{prefix}more"] = found[f"{prefix}weight"].detach() * 2


@with_hook
def drops_in_a_hook(found, prefix):
    del found[f"{prefix}bias"]


@with_hook
def renames_in_a_hook(found, prefix):
    found[f"{prefix}other"] = found.pop(f"{prefix}weight").detach().clone()


@pytest.mark.parametrize(
    "make", [TensorExtra, CopiesInStateDict, CopiesWhatItSaves, copies_in_a_hook, derives_in_a_hook]
)
def test_a_module_whose_state_dict_is_made_up_gets_its_values(tmp_path, make):
    model, other = nn.Sequential(make(3, 3)), nn.Sequential(make(3, 3))
    model, other = (model[0], other[0]) if make is CopiesInStateDict else (model, other)
    if make is TensorExtra:
        model[0].seen = 5
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model}, block=True)
        checkpointer.restore({"model": other})
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)
    assert make is not TensorExtra or other[0].seen == 5


def test_what_a_hook_leaves_out_is_left_alone(tmp_path):
    model, other = drops_in_a_hook(3, 3), drops_in_a_hook(3, 3)
    bias = other.bias.detach().clone()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model}, block=True)
        checkpointer.restore({"model": other})
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, bias)


def test_a_module_that_does_not_take_back_what_it_gives_is_an_error(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": renames_in_a_hook(3, 3)}, block=True)
        with pytest.raises(RuntimeError, match="Linear.load_state_dict does not take back .*'other'"):
            checkpointer.restore({"model": renames_in_a_hook(3, 3)})


def on_meta():
    with torch.device("meta"):
        return nn.Linear(3, 3)


def expanded():
    model = nn.Linear(3, 3)
    model.register_buffer("mask", torch.ones(1).expand(3))
    return model


@pytest.mark.parametrize(
    ("saved", "other", "why"),
    [
        (lambda: nn.Linear(3, 3), on_meta, "'model/weight' is on the meta device and has no memory yet"),
        (lambda: nn.Linear(3, 3), lambda: nn.LazyLinear(3), "'model/weight' has no shape yet"),
        (expanded, expanded, "'model/mask' was expanded"),
    ],
)
def test_what_cannot_take_values_is_told_and_nothing_is_changed(tmp_path, saved, other, why):
    state = {"model": other(), "loose": torch.zeros(2)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": saved(), "loose": torch.ones(2)}, block=True)
        with pytest.raises(MismatchError, match=why):
            checkpointer.restore(state, only=("model", "loose"))
    assert state["loose"].tolist() == [0.0, 0.0]


class Odd(torch.optim.Optimizer):
    """Keeps what torch's load_state_dict would cast to the parameter's dtype, or spoil."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {
                "count": torch.tensor(2**25 + 1),
                "codes": torch.tensor([200], dtype=torch.uint8),
                "master": parameter.detach().float() + 1 / 3,
                "nested": {"list": [torch.tensor(1 / 3, dtype=torch.float64)]},
                "text": "abc",
            }
        self.state["all"] = {"norm": torch.tensor(1 / 3), "steps": 3}


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("kind", [Odd, torch.optim.NAdam, torch.optim.ASGD])
def test_an_optimizers_state_keeps_its_dtypes(tmp_path, kind, fresh):
    def made(steps):
        model = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
        optimizer = kind(model.parameters())
        for _ in range(steps):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    state, other = made(3), made(0 if fresh else 1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, block=True)
        checkpointer.restore(other)
    one, same = (repr(it["optimizer"].state_dict()["state"]) for it in (state, other))
    assert one == same
