"""Loops that hand the optimizer a closure, or a wrapper around it: hooks are found, and act at the update."""

import pytest
import torch
from torch import nn

import overlapkit as ok
from overlapkit.lane import Lane
from overlapkit.optimizer_step import at_update, before_update, with_hooks


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: it never calls Optimizer.__init__, and forwards what it is asked for."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)


class Sharpness(torch.optim.SGD):
    """Moves the parameters before it calls the closure."""

    def step(self, closure):
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(1.0)
        return super().step(closure)


def made(kind=ok.AdamW):
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    return model, kind(model.parameters(), lr=0.1)


def closure_of(model, optimizer, seen):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        seen.append("closure")
        return loss

    return closure


def test_the_optimizer_under_wrappers_is_found():
    _, optimizer = made()
    assert with_hooks(optimizer) is optimizer
    assert with_hooks(Wrapper(Wrapper(optimizer))) is optimizer
    with pytest.raises(TypeError, match=r"state\['o'\]=Wrapper has no hooks and wraps no optimizer that has"):
        with_hooks(Wrapper(None), "state['o']")


def step_with(optimizer, closure, how):
    """A step and what it returns; "none": the closure is called before it, and not given."""
    if how == "none":
        closure()
        return optimizer.step()
    return optimizer.step(closure) if how == "position" else optimizer.step(closure=closure)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (ok.AdamW, "none"),
        (ok.AdamW, "position"),
        (ok.AdamW, "keyword"),
        (torch.optim.SGD, "position"),
        (torch.optim.LBFGS, "keyword"),
    ],
)
def test_the_act_comes_after_the_closure_and_before_the_update(kind, how):
    model, optimizer = made(kind)
    seen, before = [], model.weight.detach().clone()
    first = []

    def act():
        seen.append("act")
        first.append(torch.equal(model.weight, before))

    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: at_update(args, kwargs, act))
    closure = closure_of(model, optimizer, seen)
    loss = step_with(optimizer, closure, how)
    assert loss is None or loss.item() > 0
    assert (loss is None) == (how == "none")
    assert seen[:2] == ["closure", "act"]
    assert first[0]
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("kind", "how", "at_once"),
    [
        (ok.AdamW, "none", False),
        (ok.AdamW, "position", False),
        (torch.optim.LBFGS, "keyword", False),
        (Sharpness, "position", True),
        (Sharpness, "keyword", True),
    ],
)
def test_what_must_come_before_any_change_waits_for_a_closure_that_comes_first(kind, how, at_once):
    model, optimizer = made(kind)
    seen, before = [], model.weight.detach().clone()

    def act():
        seen.append("act")
        if seen.count("act") == 1:
            assert torch.equal(model.weight, before)

    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: before_update(args, kwargs, act))
    closure = closure_of(model, optimizer, seen)
    step_with(optimizer, closure, how)
    assert (seen.index("act") < seen.index("closure")) == at_once
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Wrapper], ids=["itself", "wrapper"])
@pytest.mark.parametrize("kind", [ok.AdamW, Sharpness])
def test_a_checkpoint_is_of_the_step_it_names_where_the_closure_trains(tmp_path, monkeypatch, kind, wrap):
    """The copy is slow: forward and backward in the closure run beside it, the update waits for it."""
    model, inner = made(kind)
    optimizer, seen = wrap(inner), []
    copying = []
    monkeypatch.setattr(Lane, "delay_s", 0.2)
    with ok.Checkpointer(tmp_path) as checkpointer:
        state = {"model": model, "optimizer": optimizer, "note": 1}
        save = checkpointer.save(1, state)
        at_save = model.weight.detach().clone()

        def closure():
            copying.append(not save.staged.done())
            return closure_of(model, optimizer, seen)()

        optimizer.step(closure)
        assert save.staged.done()
        assert copying == [kind is ok.AdamW]
    assert not torch.equal(model.weight, at_save)
    with ok.Checkpointer(tmp_path) as checkpointer:
        state["note"] = 2
        assert checkpointer.restore(state) == 1
    assert torch.equal(model.weight, at_save)
    assert state["note"] == 1
    assert state["optimizer"] is optimizer


def test_the_meter_gives_the_closure_to_forward_and_backward():
    model, optimizer = made()
    turns = []
    meter = ok.StepMeter(model, Wrapper(optimizer))
    meter._phases.turn = turns.append
    with meter.step():
        Wrapper(optimizer).step(closure_of(model, optimizer, []))
    meter.close()
    assert [turn for turn in turns if turn != "inside"] == ["forward", "loss", "backward", "optimizer"]
