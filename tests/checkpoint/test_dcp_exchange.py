"""A Checkpointer restores what dcp.save wrote, and dcp.load reads what a Checkpointer saved, key by key."""

import random
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import overlapkit.checkpoint.dcp
from overlapkit.checkpoint import (
    Checkpointer,
    MismatchError,
    SafetensorsLoadPlanner,
    SafetensorsReader,
    SafetensorsSavePlanner,
    SafetensorsWriter,
    export,
)
from tests.checkpoint.loop import assert_same, build, build_model, snapshot, train_step
from tests.ranks import one_rank_group, run_ranks

FORMS = ("named", "flattened", "numbered")
"""The forms in which torch gives an optimizer's state."""


class Optimizer:
    """An optimizer as DCP sees it, in one of the forms."""

    def __init__(self, model, optimizer, form):
        self.args, self.form = (model, optimizer), form
        self.options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")

    def state_dict(self):
        if self.form == "numbered":
            return self.args[1].state_dict()
        return get_optimizer_state_dict(*self.args, options=self.options)

    def load_state_dict(self, state):
        if self.form == "numbered":
            self.args[1].load_state_dict(state)
        else:
            set_optimizer_state_dict(*self.args, state, options=self.options)


class Model:
    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return get_model_state_dict(self.model)

    def load_state_dict(self, state):
        set_model_state_dict(self.model, state)


def as_dcp(state, form):
    return {
        **state,
        "model": Model(state["model"]),
        "optimizer": Optimizer(state["model"], state["optimizer"], form),
    }


def parts(found):
    """A snapshot without random generators, which DCP knows nothing of."""
    return {key: value for key, value in found.items() if key not in ("torch", "numpy", "random")}


def assert_same_parts(one, other):
    assert_same({**other, **parts(one)}, other)


def two_groups(seed):
    """A state whose optimizer has two groups, in another order than the model's parameters."""
    state = build(seed=seed)
    parameters = list(state["model"].parameters())
    groups = [{"params": parameters[3:], "lr": 0.3}, {"params": parameters[:3], "weight_decay": 0.5}]
    state["optimizer"] = torch.optim.AdamW(groups, lr=1e-2)
    state["scheduler"] = torch.optim.lr_scheduler.MultiStepLR(state["optimizer"], [2, 4, 7], gamma=0.5)
    return state


def next_loss(state):
    """The loss after one more step, from the same random numbers."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(11)
    train_step(state)
    return train_step(state)


@pytest.fixture
def trained():
    state = two_groups(0)
    for _ in range(2):
        train_step(state)
    return state


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpointer_restores_what_dcp_wrote(tmp_path, trained, form):
    with one_rank_group():
        dcp.save(
            as_dcp(trained, form),
            storage_writer=SafetensorsWriter(tmp_path / "step-2"),
            planner=SafetensorsSavePlanner(),
        )
    saved = snapshot(trained)
    state = two_groups(5)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest() == 2
        checkpointer.verify(2)
        assert checkpointer.restore(state) == 2
    assert_same_parts(saved, snapshot(state))
    assert next_loss(state) == next_loss(trained)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("taken_a_step", [True, False])
def test_dcp_loads_what_a_checkpointer_saved(tmp_path, trained, form, taken_a_step):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, trained, block=True)
    saved = snapshot(trained)
    state = two_groups(5)
    if taken_a_step or form == "numbered":  # torch's own functions make a new optimizer's state themselves
        train_step(state)
    with one_rank_group():
        dcp.load(
            as_dcp(state, form),
            storage_reader=SafetensorsReader(tmp_path / "step-2"),
            planner=SafetensorsLoadPlanner(),
        )
    assert_same_parts(saved, snapshot(state))
    assert next_loss(state) == next_loss(trained)


def sharded(rank, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    if dist.get_world_size() > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "loader": Cursor(rank)}


class Cursor:
    def __init__(self, at):
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def step(state):
    state["model"](torch.ones(2, 6)).square().sum().backward()
    state["optimizer"].step()


def whole(state):
    found = {f"model.{key}": value for key, value in state["model"].state_dict().items()}
    for index, moments in state["optimizer"].state_dict()["state"].items():
        found |= {f"{index}.{key}": value for key, value in moments.items()}
    return {key: getattr(value, "full_tensor", lambda v=value: v)().clone() for key, value in found.items()}


@pytest.mark.parametrize("loaded_on", [2, 1])
@pytest.mark.parametrize("writer", ["dcp", "checkpointer"])
def test_shards_go_either_way_at_any_number_of_ranks(tmp_path, writer, loaded_on):
    form = "named" if loaded_on == 2 else "numbered"

    def save(rank):
        state = sharded(rank, 1)
        step(state)
        if writer == "dcp":
            dcp.save(
                as_dcp(state, form),
                storage_writer=SafetensorsWriter(tmp_path / "step-1"),
                planner=SafetensorsSavePlanner(),
            )
        else:
            with Checkpointer(tmp_path) as checkpointer:
                checkpointer.save(1, state, block=True)
        return whole(state)

    def load(rank):
        state = sharded(7, 2)
        step(state)
        if writer == "checkpointer":
            dcp.load(
                as_dcp(state, form),
                storage_reader=SafetensorsReader(tmp_path / "step-1"),
                planner=SafetensorsLoadPlanner(),
            )
        else:
            with Checkpointer(tmp_path) as checkpointer:
                checkpointer.restore(state)
        assert state["loader"].at == rank  # of its own; rank 0's where the number of ranks differs
        return whole(state)

    saved = run_ranks(2, save)[0]
    for found in run_ranks(loaded_on, load):
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[key], saved[key]) for key in saved)


def test_objects_tensors_and_values_go_either_way(tmp_path):
    class Average:
        """Its keys are numbers, which DCP turns into strings above a tensor."""

        def __init__(self, value):
            self.state = {"shadow": {0: torch.full((2,), value), 1: [torch.tensor(value)]}, "n": {3: value}}

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    def make(value):
        return {
            "ema": Average(value),
            "loose": torch.full((3,), value),
            "config": {"a": (value,), 5: "x"},
            "n": value,
        }

    def check(state):
        assert str(state["ema"].state_dict()) == str(make(1.5)["ema"].state_dict())
        assert state["loose"].tolist() == [1.5] * 3
        assert (state["config"], state["n"]) == ({"a": (1.5,), 5: "x"}, 1.5)

    with one_rank_group():
        dcp.save(
            make(1.5), storage_writer=SafetensorsWriter(tmp_path / "step-1"), planner=SafetensorsSavePlanner()
        )
        with Checkpointer(tmp_path) as checkpointer:
            state = make(0.0)
            checkpointer.restore(state, 1)
            check(state)
            checkpointer.save(2, make(1.5), block=True)
        state = make(0.0)
        dcp.load(
            state, storage_reader=SafetensorsReader(tmp_path / "step-2"), planner=SafetensorsLoadPlanner()
        )
        check(state)


def test_a_module_and_an_optimizer_given_to_dcp_as_they_are(tmp_path):
    """What DCP calls Stateful: the very state that a Checkpointer takes."""
    state = build()
    train_step(state)
    with one_rank_group():
        dcp.save(
            state, storage_writer=SafetensorsWriter(tmp_path / "step-1"), planner=SafetensorsSavePlanner()
        )
        other = build(seed=3)
        train_step(other)
        dcp.load(
            other, storage_reader=SafetensorsReader(tmp_path / "step-1"), planner=SafetensorsLoadPlanner()
        )
    assert_same_parts(snapshot(state), snapshot(other))
    other = build(seed=4)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore(other)
    assert_same_parts(snapshot(state), snapshot(other))


def test_an_optimizer_without_moments(tmp_path):
    def make(lr):
        model = nn.Linear(2, 1)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=lr)}

    with one_rank_group():
        dcp.save(
            make(0.5), storage_writer=SafetensorsWriter(tmp_path / "step-1"), planner=SafetensorsSavePlanner()
        )
        with Checkpointer(tmp_path) as checkpointer:
            state = make(0.1)
            checkpointer.restore(state)
            assert state["optimizer"].param_groups[0]["lr"] == 0.5
            checkpointer.save(2, make(0.25), block=True)
        state = make(0.1)
        dcp.load(
            state, storage_reader=SafetensorsReader(tmp_path / "step-2"), planner=SafetensorsLoadPlanner()
        )
    assert state["optimizer"].param_groups[0]["lr"] == 0.25
    assert state["optimizer"].param_groups[0]["params"][0] is state["model"].weight


def test_what_does_not_fit_is_listed(tmp_path):
    with one_rank_group():
        dcp.save(
            {"model": nn.Linear(2, 3), "optimizer": {"x": 1}, "config": {"a": 1}},
            storage_writer=SafetensorsWriter(tmp_path / "step-1"),
            planner=SafetensorsSavePlanner(),
        )
    model = nn.Sequential(nn.Linear(2, 3))
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "other": 1}
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(MismatchError) as caught:
        checkpointer.restore(state)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "missing: 'other'",
        "unexpected: 'config'",
        "missing: 'model/0.weight'",
        "missing: 'model/0.bias'",
        "unexpected: 'model/weight'",
        "unexpected: 'model/bias'",
        "mismatch: 'optimizer' is a optimizer, and what torch.distributed.checkpoint saved of it has other "
        "parameters, groups or structure",
    ]


def test_parameters_of_another_model_are_listed(tmp_path):
    def make(*names):
        model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in names})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.ones(1, 1)
        return {"model": model, "optimizer": optimizer}

    with one_rank_group():
        dcp.save(
            as_dcp(make("a", "b"), "named"),
            storage_writer=SafetensorsWriter(tmp_path / "step-1"),
            planner=SafetensorsSavePlanner(),
        )
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(MismatchError, match=r"'optimizer' is a optimizer.*other parameters, groups"),
    ):
        checkpointer.restore(make("a", "c"))


def test_options_that_one_group_cannot_have_are_not_dropped(tmp_path, trained):
    """Saved flattened, parameter by parameter, from two groups; restored into one."""
    with one_rank_group():
        dcp.save(
            as_dcp(trained, "flattened"),
            storage_writer=SafetensorsWriter(tmp_path / "step-2"),
            planner=SafetensorsSavePlanner(),
        )
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(MismatchError, match=r"'optimizer' is a optimizer.*other parameters, groups"),
    ):
        checkpointer.restore(build())


def test_a_parameter_whose_name_is_anothers_number_is_never_guessed(tmp_path):
    model = nn.ParameterList([torch.zeros(2), torch.ones(2)])
    optimizer = torch.optim.SGD(reversed(list(model.parameters())), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = parameter.detach().clone()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer}, block=True)
    with (
        one_rank_group(),
        pytest.raises(CheckpointException, match=r"missing: 'optimizer\.state\.0\.momentum"),
    ):
        dcp.load(
            {"optimizer": {"state": {0: {"momentum_buffer": torch.zeros(2)}}}},
            storage_reader=SafetensorsReader(tmp_path / "step-1"),
            planner=SafetensorsLoadPlanner(),
        )


def test_two_things_that_have_one_key_are_never_guessed(tmp_path):
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1), "c": torch.ones(1)}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, block=True)
    with one_rank_group():
        found = {"a": {"c": torch.zeros(1)}}
        dcp.load(found, storage_reader=SafetensorsReader(tmp_path / "step-1"))
        assert found["a"]["c"].item() == 1
        with pytest.raises(CheckpointException, match=r"missing: 'a\.b'"):
            dcp.load(
                {"a.b": torch.zeros(1)},
                storage_reader=SafetensorsReader(tmp_path / "step-1"),
                planner=SafetensorsLoadPlanner(),
            )


def test_retention_and_fallback_count_what_dcp_wrote(tmp_path):
    with one_rank_group():
        for number in (1, 2):
            dcp.save(
                {"t": torch.tensor(number)}, storage_writer=SafetensorsWriter(tmp_path / f"step-{number}")
            )
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.verify(2)
        checkpointer.save(3, {"t": torch.tensor(3)}, block=True)
        assert checkpointer.steps() == [2, 3]
        (tmp_path / "step-3" / "rank-00000.safetensors").unlink()
        state = {"t": torch.tensor(0)}
        with pytest.warns(UserWarning, match="step-3 is damaged"):
            assert checkpointer.restore(state) == 2
    assert state["t"].item() == 2


def test_the_example_in_the_docs_runs(tmp_path, monkeypatch):
    """As torchtitan does it: Stateful objects, async_save with plan caching, a load in place."""
    text = overlapkit.checkpoint.dcp.__doc__
    code = textwrap.dedent(
        text[text.index("    import torch.distributed") : text.index("The planners are needed")]
    )
    monkeypatch.chdir(tmp_path)
    state = build()
    train_step(state)
    saved = snapshot(state)
    names = {key: state[key] for key in ("model", "optimizer", "scheduler")}
    save_part, load_part = code.split('states["step"] = 0\n')
    with one_rank_group():
        exec(save_part, names)
        assert Path("runs/a/step-100/manifest.json").exists()
        train_step(state)
        names["states"]["step"] = 0
        exec(load_part, names)
    assert names["states"]["step"] == 100
    now = snapshot(state)
    assert_same_parts({**saved, "loader": now["loader"]}, now)


def test_a_compiled_models_parameters_have_their_own_names(tmp_path):
    model = build_model()
    with one_rank_group():
        dcp.save(
            {"model": {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}},
            storage_writer=SafetensorsWriter(tmp_path / "step-1"),
        )
    other = build_model()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore({"model": other})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


class Tied(nn.Module):
    """Two names for one parameter, and a state of its own that is no tensor."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.seen = {}

    def forward(self, x):
        return self.head(self.embedding(x))

    def get_extra_state(self):
        return dict(self.seen)

    def set_extra_state(self, state):
        self.seen = state


@pytest.mark.parametrize("form", FORMS)
def test_tied_parameters_and_extra_state(tmp_path, form):
    def make(value):
        torch.manual_seed(value)
        model = Tied()
        model.seen = {value: (value,)}
        state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
        model(torch.tensor([1, 2])).square().sum().backward()
        state["optimizer"].step()
        return state

    def check(state):
        model, moments = state["model"], state["optimizer"].state_dict()["state"]
        assert torch.equal(model.head.weight, saved["model"].embedding.weight)
        assert model.head.weight is model.embedding.weight
        assert model.seen == {1: (1,)}
        assert torch.equal(moments[0]["exp_avg"], saved["optimizer"].state_dict()["state"][0]["exp_avg"])

    saved = make(1)
    with one_rank_group():
        dcp.save(
            as_dcp(saved, form),
            storage_writer=SafetensorsWriter(tmp_path / "step-1"),
            planner=SafetensorsSavePlanner(),
        )
        with Checkpointer(tmp_path) as checkpointer:
            state = make(2)
            checkpointer.restore(state, 1)
            check(state)
            checkpointer.save(2, saved, block=True)
        state = make(3)
        dcp.load(
            as_dcp(state, form),
            storage_reader=SafetensorsReader(tmp_path / "step-2"),
            planner=SafetensorsLoadPlanner(),
        )
        check(state)


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_dcp_saved_is_exported_without_being_asked_for_by_name(trained, tmp_path, form):
    state = {**as_dcp(trained, form), "step": 3, "t": torch.ones(2)}
    state = {
        key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()
    }
    writer = SafetensorsWriter(tmp_path / "step-1")
    with one_rank_group():
        dcp.save(state, storage_writer=writer, planner=SafetensorsSavePlanner())
    (file,) = export(tmp_path, tmp_path / "out").files
    torch.testing.assert_close(load_file(file), dict(trained["model"].state_dict()), rtol=0, atol=0)


def test_two_models_that_dcp_saved_must_be_told_apart(tmp_path):
    state = {"a": {"w": torch.ones(2)}, "b": {"w": torch.zeros(3)}, "deep": {"c": {"w": torch.zeros(4)}}}
    with one_rank_group():
        dcp.save(state, storage_writer=SafetensorsWriter(tmp_path / "step-1"))
    with pytest.raises(ValueError, match=r"2 modules: say which key with only=, \['a', 'b'\]"):
        export(tmp_path, tmp_path / "out")
    (file,) = export(tmp_path, tmp_path / "out", only="b").files
    torch.testing.assert_close(load_file(file), state["b"], rtol=0, atol=0)
