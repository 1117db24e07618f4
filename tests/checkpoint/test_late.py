"""Changes that come right after a save, when most tensors have not been looked at yet."""

import threading

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from overlapkit.checkpoint import Checkpointer, CheckpointError
from overlapkit.checkpoint.copying import Portion
from overlapkit.checkpoint.late import WITNESSES
from overlapkit.lane import Lane

LAYERS = 100  # 200 parameters and 600 optimizer states: far more than there are witnesses


@pytest.fixture
def state():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert 8 * LAYERS > 4 * WITNESSES
    return {"model": model, "optimizer": optimizer}


@pytest.fixture
def checkpointer(tmp_path, state, monkeypatch):
    with Checkpointer(tmp_path) as made:
        made.save(1, state, block=True)  # from here on the plan is reused
        monkeypatch.setattr(Lane, "delay_s", 0.1)
        yield made
        monkeypatch.setattr(Lane, "delay_s", 0.0)


def moments(state, key="exp_avg"):
    return [values[key] for values in state["optimizer"].state.values()]


def saved(checkpointer, step):
    return load_file(checkpointer._tiers.root / f"step-{step}" / "rank-00000.safetensors")


@pytest.mark.parametrize("place", range(0, LAYERS, 9))
def test_each_parameter_changed_by_hand_fails_the_save(checkpointer, state, place):
    save = checkpointer.save(2, state)
    with torch.no_grad():
        state["model"][place].bias.mul_(2)
    with pytest.raises(CheckpointError, match=rf"model/{place}\.bias"):
        save.wait()


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "step"])
def test_optimizer_states_changed_together_fail_the_save(checkpointer, state, key):
    save = checkpointer.save(2, state)
    for moment in moments(state, key):
        moment.zero_()
    with pytest.raises(CheckpointError, match="changed outside of optimizer.step"):
        save.wait()


@pytest.mark.parametrize("place", range(0, 2 * LAYERS, 21))
def test_each_optimizer_state_changed_while_it_is_copied_fails_the_save(
    checkpointer, state, place, monkeypatch
):
    begun, go_on = threading.Event(), threading.Event()
    real = Portion.copy

    def slow(portion, memory):
        begun.set()
        go_on.wait(20)
        real(portion, memory)

    monkeypatch.setattr(Portion, "copy", slow)
    save = checkpointer.save(2, state)
    assert begun.wait(20)
    moments(state)[place].add_(1)
    go_on.set()
    with pytest.raises(CheckpointError, match="changed outside of optimizer.step"):
        save.wait()


def test_parameters_swapped_for_an_evaluation_right_after_the_save(checkpointer, state):
    """`parameter.data = average`: the save has what was there before."""
    before = {f"model/{name}": value.clone() for name, value in state["model"].state_dict().items()}
    save = checkpointer.save(2, state)
    for parameter in state["model"].parameters():
        parameter.data = torch.full_like(parameter, 5.0)
    save.wait()
    found = saved(checkpointer, 2)
    assert all(torch.equal(found[name], value) for name, value in before.items())


def test_optimizer_states_moved_elsewhere_right_after_the_save(checkpointer, state):
    """As by an offload: `state[key] = other`, or `state[key].data = other`."""
    for how in ("item", "data"):
        step = 2 if how == "item" else 3
        before = torch.cat([moment.flatten() for moment in moments(state)])
        save = checkpointer.save(step, state)
        for values in state["optimizer"].state.values():
            if how == "item":
                values["exp_avg"] = values["exp_avg"] + 1
            else:
                values["exp_avg"].data = values["exp_avg"].data + 1
        save.wait()
        found = saved(checkpointer, step)
        names = [name for name in found if name.endswith("/exp_avg")]
        values = {name: found[name].flatten() for name in names}
        order = [
            f"optimizer/state/model%2F{i}.{kind}/exp_avg"
            for i in range(LAYERS)
            for kind in ("weight", "bias")
        ]
        assert torch.equal(torch.cat([values[name] for name in order]), before)


def test_data_of_another_shape_is_an_error_and_the_next_save_is_clean(checkpointer, state):
    bias = state["model"][50].bias  # no witness
    assert bias.shape == (2,)
    bias.data = torch.ones(3)
    save = checkpointer.save(2, state)
    with pytest.raises(CheckpointError, match=r"model/50.bias: its data was replaced.*\(3,\)"):
        save.wait()
    bias.data = torch.ones(2)
    checkpointer.save(3, state, block=True)
    assert saved(checkpointer, 3)["model/50.bias"].tolist() == [1, 1]
