"""What saves have in common is planned once; and whatever changes in between is noticed."""

import gc
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor  # here, so that the forked ranks need not
from safetensors.torch import load_file
from torch import nn

import overlapkit.checkpoint.planner as planner_module
from overlapkit.checkpoint import Checkpointer, MismatchError
from overlapkit.checkpoint.codec import root
from overlapkit.checkpoint.planner import Planner
from overlapkit.lane import Lane
from tests.ranks import run_ranks


@pytest.fixture
def plans(monkeypatch):
    """Counts how often a state was taken apart."""
    taken = []
    real = planner_module.take_fixed

    def count(state, rank, *, late):
        taken.append(1)
        return real(state, rank, late=late)

    monkeypatch.setattr(planner_module, "take_fixed", count)
    return taken


def build(layers=3):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(layers)), nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "loose": torch.arange(4.0), "epoch": 0}


def train(state):
    state["optimizer"].zero_grad()
    state["model"](torch.randn(6, 5, dtype=next(state["model"].parameters()).dtype)).square().sum().backward()
    state["optimizer"].step()


def truth(state):
    """Every tensor that a checkpoint of this state must hold, by the name that it has there."""
    found = {f"model/{name}": value for name, value in state["model"].state_dict().items()}
    names = {parameter: f"model/{name}" for name, parameter in state["model"].named_parameters()}
    for parameter, moments in state["optimizer"].state.items():
        for key, value in moments.items():
            found[f"optimizer/state/{root(names[parameter])}/{key}"] = value
    found["loose"] = state["loose"]
    return {name: value.detach().clone() for name, value in found.items()}


def check(directory, step, expected):
    found = load_file(directory / f"step-{step}" / "rank-00000.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def replace_parameter(state):
    """Another tensor of the same shape, as initialisers make it."""
    layer, optimizer = state["model"][1], state["optimizer"]
    old, layer.weight = layer.weight, nn.Parameter(torch.full((5, 5), 7.0))
    optimizer.param_groups[0]["params"][2] = layer.weight
    optimizer.state[layer.weight] = optimizer.state.pop(old)


def all_data(state):
    for parameter in state["model"].parameters():
        parameter.data = parameter.data * 2


def one_datum(state):
    state["model"][2].bias.data = torch.full((5,), 3.0)


def buffer_data(state):
    state["model"][3].running_mean.data = torch.full((5,), 3.0)


def replace_buffer(state):
    state["model"][3].running_mean = torch.full((5,), 4.0)


def add_module(state):
    state["model"][0].adapter = nn.Linear(2, 2)  # to a module that had none


def add_buffer(state):
    state["model"][0].register_buffer("seen", torch.ones(3))


def remove_parameter(state):
    del state["model"][3].weight
    state["model"][3].register_parameter("weight", None)
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters(), lr=0.1)


def rename_parameter(state):
    layer = state["model"][0]
    bias, layer.bias = layer.bias, None
    layer.offset = bias


def tie(state):
    state["model"][1].weight = state["model"][0].weight
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters(), lr=0.1)


def to_double(state):
    state["model"].double()
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters(), lr=0.1)


def in_place_transpose(state):
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.data = parameter.data.clone().T if parameter.ndim == 2 else parameter.data.clone()


def replace_moment(state):
    optimizer = state["optimizer"]
    optimizer.state[state["model"][0].weight]["exp_avg"] = torch.full((5, 5), 9.0)


def moment_data(state):
    state["optimizer"].state[state["model"][0].weight]["exp_avg"].data = torch.full((5, 5), 9.0)


def equal_scalar(state):
    """One that compares equal, but has another dtype."""
    state["optimizer"].state[state["model"][0].weight]["step"] = torch.tensor(1, dtype=torch.int64)


def load_optimizer(state):
    state["optimizer"].load_state_dict(state["optimizer"].state_dict())
    for moments in state["optimizer"].state.values():
        moments["exp_avg"] = moments["exp_avg"] + 1


def new_group(state):
    state["model"].extra = nn.Linear(1, 1)
    state["optimizer"].add_param_group({"params": list(state["model"].extra.parameters())})


def forget_state(state):
    state["optimizer"].state.clear()


def other_model(state):
    fresh = build()
    state["model"], state["optimizer"] = fresh["model"], fresh["optimizer"]


def longer_loose(state):
    state["loose"] = torch.arange(9.0)


CHANGES = {change.__name__: change for change in (
    replace_parameter, all_data, one_datum, buffer_data, replace_buffer, add_module, add_buffer,
    remove_parameter, rename_parameter, tie, to_double, in_place_transpose, replace_moment, moment_data,
    equal_scalar, load_optimizer, new_group, forget_state, other_model, longer_loose,
)}  # fmt: skip


@pytest.mark.parametrize("stage", ["late", "now"])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_between_saves_is_noticed(tmp_path, change, stage):
    state = build()
    train(state)
    with Checkpointer(tmp_path, stage=stage) as checkpointer:
        checkpointer.save(1, state, block=True)
        check(tmp_path, 1, truth(state))
        CHANGES[change](state)
        expected = truth(state)
        if change == "tie":
            del expected["model/1.weight"]  # an alias in the part
        checkpointer.save(2, state, block=True)
        check(tmp_path, 2, expected)
        other = {"model": state["model"], "loose": torch.zeros_like(state["loose"])}
        checkpointer.restore(other, 2, only=("model", "loose"))
        assert torch.equal(other["loose"], state["loose"])


def test_a_parameter_that_moves_to_another_group_is_noticed(tmp_path):
    """The same tensors, the same states; only the part's JSON tells."""

    def build_two():
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}]
        return {"model": model, "optimizer": torch.optim.SGD(groups, lr=0.1)}

    state = build_two()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, block=True)
        groups = state["optimizer"].param_groups
        groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]
        checkpointer.save(2, state, block=True)
        checkpointer.restore(build_two(), 1)
        with pytest.raises(MismatchError, match="other groups"):
            checkpointer.restore(build_two(), 2)


@pytest.mark.parametrize("change", ["one_datum", "moment_data"])
def test_data_of_a_tensor_that_is_no_witness_is_followed(tmp_path, monkeypatch, plans, change):
    """With thousands of tensors most are looked at on the lane only: here none is in the save."""
    monkeypatch.setattr("overlapkit.checkpoint.late.WITNESSES", 1)
    state = build()
    train(state)
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state, block=True)
            check(tmp_path, step, truth(state))
            CHANGES[change](state)
    assert len(plans) == 1


def test_followed_data_is_not_lost_when_the_file_is_laid_out_anew(tmp_path, monkeypatch, plans):
    monkeypatch.setattr("overlapkit.checkpoint.late.WITNESSES", 1)
    state = build()
    train(state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, block=True)
        one_datum(state)
        checkpointer.save(2, state, block=True)
        longer_loose(state)
        for step in (3, 4):
            checkpointer.save(step, state, block=True)
            check(tmp_path, step, truth(state))
    assert len(plans) == 1


def test_what_stays_the_same_is_planned_once(tmp_path, plans):
    state = build()
    train(state)
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(4):
            state["epoch"] = step
            state["loose"] = state["loose"] + 1  # a new tensor of the same kind
            state["optimizer"].param_groups[0]["lr"] = 0.1 * step
            checkpointer.save(step, state)
            expected = truth(state)
            train(state)
            checkpointer.wait()
            check(tmp_path, step, expected)
        for step in range(4):
            other = build()
            checkpointer.restore(other, step)
            assert other["epoch"] == step
            assert other["optimizer"].param_groups[0]["lr"] == 0.1 * step
    assert len(plans) == 1 + 4  # and once after each restore


def test_a_reused_plan_calls_nothing_for_each_tensor():
    """Counted in calls of Python functions: time is not asserted."""

    def calls(layers):
        state = build(layers)
        train(state)
        planner = Planner(0, late=True)
        planner.take(state)
        count = [0]

        def profile(frame, event, argument):
            count[0] += event == "call"

        sys.setprofile(profile)
        try:
            share = planner.take(state)
            share.late.at_save.read()
        finally:
            sys.setprofile(None)
        return count[0]

    assert calls(300) == calls(3)


@pytest.mark.parametrize("why", ["extra state", "state_dict hook", "own state_dict"])
def test_what_a_module_makes_up_anew_is_never_reused(tmp_path, plans, why):
    class Extra(nn.Linear):
        scale = 0.0

        def get_extra_state(self):
            return {"scale": torch.full((3,), self.scale)}

        def set_extra_state(self, state):
            self.scale = state["scale"][0].item()

    class Own(nn.Linear):
        def state_dict(self, *args, **kwargs):
            return {**super().state_dict(*args, **kwargs), "more": self.weight.detach() * 2}

    layer = {"extra state": Extra, "own state_dict": Own}.get(why, nn.Linear)(2, 2)
    if why == "state_dict hook":
        layer._register_state_dict_hook(lambda module, found, prefix, meta: found.update(
            {"more": module.weight.detach() * 2}
        ))  # fmt: skip
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            with torch.no_grad():
                layer.weight.fill_(step)
            layer.scale = float(step)
            checkpointer.save(step, {"model": layer}, block=True)
            found = load_file(tmp_path / f"step-{step}" / "rank-00000.safetensors")
            name = "model/_extra_state/scale" if why == "extra state" else "model/more"
            assert found[name].flatten()[0] == (step if why == "extra state" else 2 * step)
    assert len(plans) == 2


def test_a_hook_that_comes_later_is_seen(tmp_path):
    layer = nn.Linear(2, 2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": layer}, block=True)

        def drop_bias(module, found, prefix, meta):
            del found["bias"]

        layer._register_state_dict_hook(drop_bias)
        checkpointer.save(2, {"model": layer}, block=True)
    assert list(load_file(tmp_path / "step-2" / "rank-00000.safetensors")) == ["model/weight"]


def test_steps_that_stop_passing_the_hook_are_copied_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(Lane, "delay_s", 0.02)
    state = build()
    train(state)
    with Checkpointer(tmp_path) as checkpointer:
        assert not checkpointer.save(1, state).staged.done()
        checkpointer.wait()
        state["optimizer"].param_groups[0]["capturable"] = True
        assert checkpointer.save(2, state).staged.done()


def test_a_model_that_is_gone_is_not_kept(tmp_path):
    state = build()
    train(state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, block=True)
        gone = weakref.ref(state["model"][0].weight)
        del state
        gc.collect()
        assert gone() is None


def test_a_save_that_is_not_due_prepares_for_a_state_that_has_grown(tmp_path, plans):
    state = build()
    with Checkpointer(tmp_path, every=10) as checkpointer:
        checkpointer.restore(state)  # AdamW has no state yet
        assert len(plans) == 1
        train(state)
        for step in range(1, 10):
            checkpointer.save(step, state)
        assert len(plans) == 2
        checkpointer._stager._warming.settle()
        ring = checkpointer._stager._ring
        memory = ring._slots[0]._memory
        checkpointer.save(10, state, block=True)
        assert len(plans) == 2
        assert ring._slots[0]._memory is memory
        check(tmp_path, 10, truth(state))


def test_sharded_states_are_planned_once_and_their_changes_noticed(tmp_path):
    """FSDP2 whose root stays gathered after forward: a save shows the sharded parameters again."""

    def run(rank):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
        counted, real = [], planner_module.take_fixed
        planner_module.take_fixed = lambda *a, **k: (counted.append(1), real(*a, **k))[1]

        def full():
            found = {name: value.full_tensor() for name, value in model.state_dict().items()}
            for index, moments in state["optimizer"].state_dict()["state"].items():
                found |= {
                    f"{index}.{key}": getattr(v, "full_tensor", lambda v=v: v)() for key, v in moments.items()
                }
            return {name: value.clone() for name, value in found.items()}

        def step():
            model(torch.ones(2, 7)).square().mean().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()

        step()
        expected = {}
        with Checkpointer(tmp_path) as checkpointer:
            for at in (1, 2, 3, 4):
                model(torch.ones(2, 7))  # leaves the root gathered
                checkpointer.save(at, state)
                expected[at] = full()
                step()
                checkpointer.wait()
                if at == 2:
                    assert len(counted) == 1
                    moments = state["optimizer"].state[model[0].weight]
                    moments["exp_avg"] = moments["exp_avg"] * 3
                if at == 3:
                    assert len(counted) == 2
                    with torch.no_grad():
                        local = model[1].weight._local_tensor
                        model[1].weight._local_tensor = local.clone() + 1
            for at, tensors in expected.items():
                checkpointer.restore(state, at)
                again = full()
                assert all(torch.equal(tensors[name], again[name]) for name in tensors), at

    run_ranks(2, run)


def transpose_parameter(state):
    layer = state["model"][1]
    layer.weight.data = layer.weight.data.T


def shrink_buffer(state):
    state["model"][3].running_mean.resize_(2)


@pytest.mark.parametrize("change", [transpose_parameter, shrink_buffer])
@pytest.mark.parametrize("stage", ["late", "now"])
def test_memory_that_is_read_in_another_way_is_noticed(tmp_path, change, stage):
    """It is where it was: addresses tell nothing."""
    state = build()
    train(state)
    with Checkpointer(tmp_path, stage=stage) as checkpointer:
        checkpointer.save(1, state, block=True)
        change(state)
        expected = truth(state)
        checkpointer.save(2, state, block=True)
    check(tmp_path, 2, expected)


@pytest.mark.parametrize("which", [0, 1])
def test_what_is_no_longer_tied_is_noticed(tmp_path, which):
    """Two parameters that share their memory, as `nn.Parameter(other.data)` makes them, among hundreds."""
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(150))
    model[101].weight = nn.Parameter(model[100].weight.data)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, block=True)
        model[100 + which].weight.data = torch.full((2, 2), 5.0)
        expected = {f"model/{name}": value.clone() for name, value in model.state_dict().items()}
        checkpointer.save(2, state, block=True)
    check(tmp_path, 2, expected)


def test_a_parameter_that_forward_changes_is_copied_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(Lane, "delay_s", 0.02)
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=0.5), nn.Linear(4, 1))
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    expected = {f"model/{name}": value.clone() for name, value in model.state_dict().items()}
    with Checkpointer(tmp_path) as checkpointer:
        save = checkpointer.save(1, state)
        model(torch.arange(10)).sum().backward()
        save.wait()
    assert not torch.equal(model[0].weight, expected["model/0.weight"])
    check(tmp_path, 1, expected)
