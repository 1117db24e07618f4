"""Saving and restoring in one process: bit for bit, late or now, with every error at the right moment."""

import gc
import json
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from overlapkit.checkpoint import Checkpointer, MismatchError
from overlapkit.checkpoint.disk import Disk
from overlapkit.lane import Lane
from tests.checkpoint.loop import assert_same, build, build_model, snapshot, train_step
from tests.leftovers import Leftovers


def files(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("stage", ["late", "now"])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, stage, stop):
    state = build()
    losses = [train_step(state) for _ in range(6)]
    final = snapshot(state)
    state = build()
    with Checkpointer(tmp_path, stage=stage) as checkpointer:
        assert checkpointer.restore(state) == 0
        for _ in range(stop):
            train_step(state)
        checkpointer.save(stop, state)
        train_step(state)  # goes on while the save is staged and written
    state = build(seed=7)  # other weights, other generators; AdamW has no state yet
    with Checkpointer(tmp_path, stage=stage) as checkpointer:
        assert checkpointer.restore(state) == stop
    assert [train_step(state) for _ in range(stop, 6)] == losses[stop:]
    assert_same(snapshot(state), final)


@pytest.mark.parametrize("stage", ["late", "now"])
def test_the_values_saved_are_those_at_the_save(tmp_path, monkeypatch, stage):
    """The race: steps, and forwards that move BatchNorm's buffers, come right after save()."""
    monkeypatch.setattr(Lane, "delay_s", 0.05)
    state = build()
    train_step(state)
    with Checkpointer(tmp_path, stage=stage) as checkpointer:
        for step in (1, 2, 3):
            at_save = snapshot(state)
            save = checkpointer.save(step, state)
            assert save.staged.done() == (stage == "now")  # the lane's delay: the copy is still to come
            train_step(state)
            assert save.staged.done()
            train_step(state)
            save.wait()
            restored = build(seed=9)
            with Checkpointer(tmp_path) as other:
                assert other.restore(restored, step) == step
            assert_same(snapshot(restored), at_save)


def test_without_the_hook_the_race_is_lost(tmp_path, monkeypatch):
    """The test above can fail: with the hooks taken out, the saved values are not those at the save."""
    monkeypatch.setattr(Lane, "delay_s", 0.05)
    monkeypatch.setattr(torch.optim.Optimizer, "register_step_pre_hook", lambda self, hook: None)
    state = build()
    train_step(state)
    checkpointer = Checkpointer(tmp_path)
    before = state["model"][0].weight.detach().clone()
    save = checkpointer.save(1, state)
    train_step(state)
    save.staged.wait()
    with pytest.raises(Exception, match="changed outside of optimizer.step"):
        save.wait()
    assert not torch.equal(before, state["model"][0].weight)
    checkpointer._stager._hooks.clear()
    checkpointer.close()


def test_a_parameter_changed_by_hand_fails_that_save_only(tmp_path, monkeypatch):
    monkeypatch.setattr(Lane, "delay_s", 0.05)
    state = build()
    train_step(state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        with torch.no_grad():
            state["model"][3].weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"model/3\.weight.*stage='now'"):
            checkpointer.wait()
        save = checkpointer.save(2, state)
        save.staged.wait()
        with torch.no_grad():
            state["model"][3].weight.mul_(2)  # allowed from here on
        save.wait()
        assert checkpointer.steps() == [2]


def test_a_parameter_of_another_shape_fails_one_save_only(tmp_path):
    state = build()
    train_step(state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, block=True)
        weight = state["model"][0].weight
        weight.data = weight.data.t()
        with pytest.raises(RuntimeError, match=r"model/0\.weight: its data was replaced"):
            checkpointer.save(2, state, block=True)
        checkpointer.save(3, state, block=True)
        assert checkpointer.steps() == [1, 3]


def test_parameters_may_be_changed_as_soon_as_they_are_staged(tmp_path, monkeypatch):
    """Even when the writer is still busy with an earlier save and has not looked at this one."""
    go_on = threading.Event()

    class Slow(Disk):
        def create(self, path):
            go_on.wait(30)
            return super().create(path)

    monkeypatch.setattr(Checkpointer, "_disk", Slow())
    state = build()
    with Checkpointer(tmp_path, in_flight=2) as checkpointer:
        checkpointer.save(1, {"x": 1})
        at_save = snapshot(state)
        checkpointer.save(2, state).staged.wait()
        with torch.no_grad():
            state["model"][3].weight.mul_(2)
        go_on.set()
        checkpointer.wait()
        checkpointer.restore(state)
    assert_same(snapshot(state), at_save)


def test_a_failed_copy_fails_the_save_and_not_the_step(tmp_path, monkeypatch):
    state = {"model": nn.Linear(3, 3)}  # nothing in it is copied inside save()
    state["optimizer"] = torch.optim.SGD(state["model"].parameters())
    checkpointer = Checkpointer(tmp_path)
    with monkeypatch.context() as patch:

        def no_memory(self, nbytes):
            raise MemoryError("no pages")

        patch.setattr("overlapkit.pinned.PinnedRing.take", no_memory)
        save = checkpointer.save(1, state)
        state["optimizer"].step()
        with pytest.raises(MemoryError, match="no pages"):
            save.wait()
    checkpointer.save(2, state, block=True)
    assert checkpointer.steps() == [2]
    checkpointer.close()


@pytest.mark.parametrize("end", ["step", "seal after release"])
def test_a_step_beside_the_end_of_a_failed_copy_does_not_fail(tmp_path, monkeypatch, end):
    """The pre-hook may reach the staging when the save has just released it, never sealed."""
    state = {"model": nn.Linear(3, 3)}
    state["optimizer"] = torch.optim.SGD(state["model"].parameters())
    checkpointer = Checkpointer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("overlapkit.pinned.PinnedRing.take", lambda self, nbytes: 1 / 0)
        save = checkpointer.save(1, state)
        with pytest.raises(ZeroDivisionError):
            save.wait()
    checkpointer.wait()
    if end == "step":
        checkpointer._stager._active.append(save._staging)  # where the hook's copy of the list still has it
        state["optimizer"].step()
    else:
        save._staging.seal()
    checkpointer.close()


@pytest.mark.parametrize("how", ["capturable", "in backward", "not in the state"])
def test_steps_that_pass_no_hook_are_copied_at_once(tmp_path, monkeypatch, how):
    monkeypatch.setattr(Lane, "delay_s", 0.05)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "capturable":
        optimizer.param_groups[0]["capturable"] = True
    if how == "in backward":
        model.weight._in_backward_optimizers = [optimizer]
    state = {"model": model} if how == "not in the state" else {"model": model, "optimizer": optimizer}
    before = model.weight.detach().clone()
    with Checkpointer(tmp_path) as checkpointer:
        save = checkpointer.save(1, state)
        assert save.staged.done()
        model.weight.data.zero_()
        save.wait()
        checkpointer.restore(state)
    assert torch.equal(model.weight, before)


def test_memory_is_reused_and_bounded(tmp_path):
    state = {"model": nn.Linear(300, 300)}
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), momentum=0.9)
    state["model"](torch.ones(1, 300)).sum().backward()
    state["optimizer"].step()
    nbytes = 2 * 4 * (300 * 300 + 300)
    with Checkpointer(tmp_path, keep=1, in_flight=2) as checkpointer:
        assert checkpointer.restore(state) == 0
        ring = checkpointer._stager._ring
        addresses = {slot._memory.data_ptr() for slot in ring._slots}
        for step in range(6):
            checkpointer.save(step, state)
            state["optimizer"].step()
        checkpointer.wait()
        assert {slot._memory.data_ptr() for slot in ring._slots} == addresses
        assert ring.nbytes <= 2 * (nbytes + 4096)
        assert len(checkpointer._stager._active) == 0


def test_what_was_restored_does_not_live_in_the_staging_memory(tmp_path):
    """Else the next save would overwrite the moments that the optimizer goes on with."""

    def wide(seed):  # large enough that the memory of the restore is that of the saves
        return build(nn.Sequential(nn.Linear(6, 200), nn.Linear(200, 30)), seed=seed)

    state = wide(0)
    train_step(state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, block=True)
        other = wide(6)
        checkpointer.restore(other)
        other["model"][0].weight.data.fill_(7)
        before = snapshot(other)
        memory = checkpointer._stager._ring._slots[0]._memory
        checkpointer.save(2, other, block=True)
        assert checkpointer._stager._ring._slots[0]._memory is memory
        assert_same(snapshot(other), before)
        third = wide(8)
        checkpointer.restore(third)
        assert_same(snapshot(third), before)


def test_saves_beyond_in_flight_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(Lane, "delay_s", 0.02)
    state = build()
    with Checkpointer(tmp_path, in_flight=2) as checkpointer:
        saves = [checkpointer.save(step, state) for step in range(3)]
        assert saves[0].committed.done()
        assert not saves[2].committed.done()
    assert all(save.committed.done() for save in saves)


def test_every_kind_of_tensor_comes_back(tmp_path):
    dtypes = [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.int64,
        torch.int32,
    ]
    dtypes += [torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64]
    dtypes += [torch.float8_e4m3fn, torch.float8_e5m2]
    base = torch.arange(24).view(4, 6)
    state = {f"{dtype}": (base % 3).to(dtype) for dtype in dtypes}
    state |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "one": torch.ones(1, dtype=torch.int8),
        "odd": torch.arange(7, dtype=torch.uint8),
        "transposed": base.t(),
        "strided": torch.arange(20.0)[::3],
        "expanded": torch.ones(1).expand(4),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "needs grad": torch.ones(2, requires_grad=True),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "a/b": torch.zeros(1),
        "a": {"b": torch.ones(1), "list": [torch.tensor(2)]},
    }
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state, block=True)
        checkpointer.verify(0)

        def blank(value):
            if isinstance(value, torch.Tensor):
                return (
                    torch.empty_like(value.contiguous()).view(torch.uint8).fill_(77).view(value.dtype)
                    if (value.ndim)
                    else torch.zeros_like(value)
                )
            return (
                {k: blank(v) for k, v in value.items()}
                if isinstance(value, dict)
                else [blank(v) for v in value]
            )

        other = blank(state)
        other["channels last"] = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
        held = other["a"], other["strided"]
        checkpointer.restore(other)

    def same(one, two):
        if isinstance(one, dict):
            return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
        if isinstance(one, list):
            return all(map(same, one, two))
        as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, two)]
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(*as_bytes)

    assert all(same(state[key], other[key]) for key in state)
    assert held[0] is other["a"]  # in place, for whoever holds them
    assert held[1] is other["strided"]
    assert other["channels last"].is_contiguous(memory_format=torch.channels_last)


def test_files_are_plain_safetensors_and_json(tmp_path):
    state = build()
    train_step(state)
    with Checkpointer(tmp_path) as checkpointer:
        path = checkpointer.save(5, state, metrics={"loss": 1.5}).committed.wait()
    assert path == tmp_path / "step-5"
    assert files(tmp_path) == ["step-5"]
    assert files(path) == ["manifest.json", "rank-00000.json", "rank-00000.safetensors"]
    tensors = load_file(path / "rank-00000.safetensors")
    for name, value in state["model"].state_dict().items():
        assert torch.equal(tensors[f"model/{name}"], value)
    assert json.loads((path / "manifest.json").read_text())["checkpoint"]["metrics"] == {"loss": 1.5}


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    state = build()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, block=True)

        def refuse(*args, **kwargs):
            raise AssertionError("unpickled")

        monkeypatch.setattr("pickle.load", refuse)
        monkeypatch.setattr("pickle.loads", refuse)
        monkeypatch.setattr("pickle.dumps", refuse)
        monkeypatch.setattr("torch.load", refuse)
        assert checkpointer.restore(build()) == 1


def test_tied_parameters_are_written_once(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 8)
            self.head = nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight

    tied = Tied()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": tied}, block=True)
        tensors = load_file(tmp_path / "step-1/rank-00000.safetensors")
        assert list(tensors) == ["model/embed.weight"]
        other = Tied()
        checkpointer.restore({"model": other})
        assert torch.equal(other.head.weight, tied.embed.weight)
        assert other.head.weight is other.embed.weight
        untied = Tied()
        untied.head.weight = nn.Parameter(torch.zeros(50, 8))
        checkpointer.restore({"model": untied})
        assert torch.equal(untied.head.weight, tied.embed.weight)


def test_wrapped_modules_have_the_same_names(tmp_path):
    model = build_model()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": torch.compile(model, backend="eager")}, block=True)
        other = build_model()
        checkpointer.restore({"model": other})
        assert torch.equal(other[0].weight, model[0].weight)
        inner = build_model()
        inner[3] = torch.compile(inner[3], backend="eager")
        checkpointer.restore({"model": inner})
        assert torch.equal(inner[3].weight, model[3].weight)


def test_extra_state_of_modules_comes_back(tmp_path):
    class Extra(nn.Linear):
        seen = (0, None)

        def get_extra_state(self):
            return {"seen": self.seen, "scale": torch.full((2,), float(self.seen[0]))}

        def set_extra_state(self, state):
            self.seen, self.scale = state["seen"], state["scale"]

    model = nn.Sequential(Extra(2, 2))
    model[0].seen = (3, "x")
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model}, block=True)
        other = nn.Sequential(Extra(2, 2))
        checkpointer.restore({"model": other})
    assert other[0].seen == (3, "x")
    assert other[0].scale.tolist() == [3.0, 3.0]


OPTIMIZERS = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adafactor, {}),
    (torch.optim.LBFGS, {}),
    (torch.optim.Rprop, {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", None))
def test_every_optimizer_resumes(tmp_path, kind, options):
    def made():
        torch.manual_seed(3)
        model = nn.Linear(5, 4)
        groups = model.parameters()
        if kind is not torch.optim.LBFGS:
            groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}]
        return {"model": model, "optimizer": kind(groups, lr=0.01, **options)}

    def step(state):
        def closure():
            state["optimizer"].zero_grad()
            loss = state["model"](torch.arange(10.0).view(2, 5)).square().mean()
            loss.backward()
            return loss

        return state["optimizer"].step(closure).item()

    state = made()
    step(state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        after = [step(state) for _ in range(3)]
        checkpointer.wait()
        other = made()
        checkpointer.restore(other)
    assert [step(other) for _ in range(3)] == after
    assert torch.equal(other["model"].weight, state["model"].weight)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", ["channels_last", "transposed"])
def test_moments_keep_their_parameters_strides(tmp_path, layout, fused):
    """torch's fused step walks parameter and moments as flat memory."""

    def made():
        torch.manual_seed(3)
        if layout == "channels_last":
            model = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        else:
            model = nn.Linear(7, 4)
            model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)}

    x = torch.randn((2, 3, 6, 6) if layout == "channels_last" else (2, 7))

    def train(state):
        for _ in range(3):
            state["optimizer"].zero_grad()
            state["model"](x).square().mean().backward()
            state["optimizer"].step()

    unbroken, other = made(), made()
    train(unbroken)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, unbroken, block=True)
        checkpointer.restore(other)
    moments = other["optimizer"].state[other["model"].weight]
    assert moments["exp_avg"].stride() == other["model"].weight.stride()
    train(unbroken)
    train(other)
    for one, same in zip(unbroken["model"].parameters(), other["model"].parameters(), strict=True):
        assert torch.equal(one, same)


def test_every_restored_tensor_has_memory_of_its_own(tmp_path):
    """The next save overwrites the memory that a restore was read into."""

    class Keeper:
        def __init__(self, value):
            self.value = torch.full((500,), value)

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    class Extra(nn.Linear):
        scale = torch.zeros(9)

        def get_extra_state(self):
            return {"scale": self.scale}

        def set_extra_state(self, state):
            self.scale = state["scale"]

    def made(value):
        model = Extra(3, 2000)
        model.scale = torch.full((9,), value)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(value), momentum=0.9)
        return {
            "model": model,
            "optimizer": optimizer,
            "object": Keeper(value),
            "value": [Keeper(value).value],
        }

    state, other = made(1.0), made(2.0)
    state["model"](torch.ones(1, 3)).sum().backward()
    state["optimizer"].step()
    other["value"] = None  # a new tensor is made
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, block=True)
        checkpointer.restore(other)
        for slot in checkpointer._stager._ring._slots:
            slot._memory.fill_(0)
    assert other["object"].value.eq(1).all()
    assert other["model"].scale.eq(1).all()
    assert other["value"][0].eq(1).all()
    assert other["optimizer"].param_groups[0]["lr"] == 1
    assert other["optimizer"].state[other["model"].weight]["momentum_buffer"].eq(1).all()


def test_a_default_device_changes_nothing(tmp_path):
    other, state = build(seed=4), build()
    train_step(state)
    before = snapshot(state)
    with torch.device("meta"), Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, block=True)
        checkpointer.verify(1)
        checkpointer.restore(other)
    assert_same(snapshot(other), before)


SCHEDULERS = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lambda o: torch.optim.lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.8)], [3]
    ),
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.8)]
    ),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=3),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:To get the last learning rate")
def test_every_scheduler_resumes(tmp_path, name):
    def made():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}

    def rates(state, steps):
        found = []
        for _ in range(steps):
            state["optimizer"].step()
            state["scheduler"].step(*([1.0] if name == "ReduceLROnPlateau" else []))
            found.append(
                (state["optimizer"].param_groups[0]["lr"], state["optimizer"].param_groups[0]["momentum"])
            )
        return found

    state = made()
    rates(state, 3)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state)
        expected = rates(state, 6)
        checkpointer.wait()
        other = made()
        checkpointer.restore(other)
    assert rates(other, 6) == expected


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_dataloader_resumes(tmp_path):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        torch.manual_seed(5)
        return stateful.StatefulDataLoader(list(range(20)), batch_size=2, shuffle=True)

    def batches(loader):
        return [batch.tolist() for batch in loader]

    state = {"loader": loader()}
    walk = iter(state["loader"])
    for _ in range(3):
        next(walk)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state, block=True)
        rest = [batch.tolist() for batch in walk]
        other = {"loader": loader()}
        checkpointer.restore(other)
        assert batches(other["loader"]) == rest


def test_objects_with_bytes_and_tensors_come_back(tmp_path):
    class Pipeline:
        state = None

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    one, other = Pipeline(), Pipeline()
    one.state = {"dali": b"\x00\xff", "generator": torch.arange(5, dtype=torch.uint8), 3: (np.int32(4),)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"pipe": one})
        one.state["generator"].zero_()  # loose tensors are copied inside save()
        one.state[3] = None
        checkpointer.wait()
        checkpointer.restore({"pipe": other})
        kept = other.state["generator"].clone()
        checkpointer.save(2, {"pipe": one}, block=True)  # fills the buffers again
    assert other.state["dali"] == b"\x00\xff"
    assert kept.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(other.state["generator"], kept)
    assert type(other.state[3][0]) is np.int32


def test_plain_values_are_put_into_the_state(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"epoch": 3, "best": None, "log": {1: [0.5]}}, block=True)
        log = {7: "old"}
        state = {"epoch": 0, "best": 1.0, "log": log}
        checkpointer.restore(state)
    assert state == {"epoch": 3, "best": None, "log": {1: [0.5]}}
    assert state["log"] is log


def test_only_restores_what_is_named(tmp_path):
    state = build()
    train_step(state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, block=True)
        other = build(seed=8)
        generators = torch.get_rng_state()
        assert checkpointer.restore(other, only=("model",)) == 1
        assert torch.equal(torch.get_rng_state(), generators)
        assert torch.equal(other["model"][0].weight, state["model"][0].weight)
        assert other["loader"].at == 0
        assert not other["optimizer"].state
        assert checkpointer.restore({"model": other["model"]}, only=("model",)) == 1
        with pytest.raises(ValueError, match="no 'nothing'"):
            checkpointer.restore(other, only=("nothing",))
        with pytest.raises(TypeError, match="only='model': give a tuple"):
            checkpointer.restore(other, only="model")


def test_what_does_not_fit_is_listed_and_changes_nothing(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        saved = {"model": nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), "gone": 1, "t": torch.ones(2)}
        checkpointer.save(1, saved, block=True)
        model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2, bias=False), nn.Linear(1, 1)).bfloat16()
        state = {"model": model, "new": 2, "t": 5}
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(MismatchError) as caught:
            checkpointer.restore(state)
        for problem in (
            "missing: 'new'",
            "unexpected: 'gone'",
            "'t' is a value, in the checkpoint a tensor",
            "'model/0.weight' is torch.bfloat16 (2, 4), in the checkpoint torch.float32 (2, 3)",
            "'model/1.weight' is torch.bfloat16 (2, 2), in the checkpoint torch.float32",
            "unexpected: 'model/1.bias'",
            "missing: 'model/2.weight'",
        ):
            assert problem in str(caught.value)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_not_strict_warns_and_restores_what_fits(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        saved = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        checkpointer.save(1, {"model": saved, "epoch": 3}, block=True)
        model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
        untouched = model[0].weight.detach().clone()
        state = {"model": model, "epoch": 0, "new": 1}
        with pytest.warns(UserWarning, match=r"missing: 'new'; mismatch: tensor 'model/0.weight'") as caught:
            assert checkpointer.restore(state, strict=False) == 1
        assert caught[0].filename == __file__
    assert torch.equal(model[0].weight, untouched)
    assert torch.equal(model[1].weight, saved[1].weight)
    assert state["epoch"] == 3


def test_not_strict_leaves_an_optimizer_that_does_not_fit_alone(tmp_path):
    state = build()
    train_step(state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, block=True)
        other = build(seed=3)
        train_step(other)
        other["optimizer"] = torch.optim.SGD([other["model"][0].weight], lr=0.25, momentum=0.9)
        with pytest.warns(UserWarning, match="unexpected: parameter 'model/0.bias' of 'optimizer'"):
            assert checkpointer.restore(other, strict=False) == 1
    assert other["optimizer"].param_groups[0]["lr"] == 0.25
    assert torch.equal(other["model"][0].weight, state["model"][0].weight)


def test_a_compiled_step_waits_too(tmp_path, monkeypatch):
    monkeypatch.setattr(Lane, "delay_s", 0.05)
    state = build()
    train_step(state)
    compiled = torch.compile(state["optimizer"].step, backend="eager")
    before = state["model"][0].weight.detach().clone()
    with warnings.catch_warnings(), Checkpointer(tmp_path) as checkpointer:
        warnings.simplefilter("ignore")  # torch's own, about its own code
        save = checkpointer.save(1, state)
        assert not save.staged.done()
        state["model"][0].weight.grad = torch.ones_like(before)
        compiled()
        assert save.staged.done()
        assert not torch.equal(before, state["model"][0].weight)
        checkpointer.restore(state)
    assert torch.equal(before, state["model"][0].weight)


def test_the_optimizer_of_another_model_is_told(tmp_path):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": torch.optim.SGD(model.parameters())}, block=True)
        wrong = {"model": model, "optimizer": torch.optim.SGD(other.parameters())}
        with pytest.raises(MismatchError, match="'#1' of 'optimizer', which no module .* another model's"):
            checkpointer.restore(wrong)


def test_an_optimizer_with_other_groups_is_a_mismatch(tmp_path):
    model = nn.Linear(2, 2)
    one = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": one}, block=True)
        swapped = torch.optim.SGD([model.bias, model.weight], lr=0.1)
        with pytest.raises(MismatchError, match="another order"):
            checkpointer.restore({"model": model, "optimizer": swapped})
        fewer = torch.optim.SGD([model.weight], lr=0.1)
        with pytest.raises(MismatchError, match="unexpected: parameter 'model/bias' of 'optimizer'"):
            checkpointer.restore({"model": model, "optimizer": fewer})


def test_every_and_retention(tmp_path):
    state = {"model": nn.Linear(2, 2)}
    (tmp_path / "step-1").mkdir()  # somebody else's
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    (tmp_path / "7").mkdir()
    with Checkpointer(tmp_path, every=10, keep=2, keep_every=40) as checkpointer:
        saves = [checkpointer.save(step, state) for step in range(1, 101)]
        checkpointer.wait()
        assert [save.step for save in saves if save.due] == list(range(10, 101, 10))
        assert all(save.committed.done() and save.staged.done() for save in saves)
        assert checkpointer.steps() == [40, 80, 90, 100]
        assert checkpointer.latest() == 100
    assert files(tmp_path) == ["7", "step-1", "step-100", "step-40", "step-80", "step-90"]
    assert (tmp_path / "step-1" / "notes.txt").read_text() == "mine"


def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": 1})
    with pytest.raises(RuntimeError, match="is no checkpoint: move it away"):
        checkpointer.close()
    assert files(tmp_path) == ["step-1"]


def test_a_step_saved_again_replaces_the_first(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        for value in (1, 2, 3):
            checkpointer.save(7, {"x": value}, block=True)
        state = {"x": 0}
        assert checkpointer.restore(state, 7) == 7
    assert state == {"x": 3}
    assert files(tmp_path) == ["step-7"]


def test_restore_waits_for_a_save_in_flight(tmp_path, monkeypatch):
    monkeypatch.setattr(Lane, "delay_s", 0.05)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, {"x": torch.ones(2)})
        state = {"x": torch.zeros(2)}
        assert checkpointer.restore(state) == 3
    assert state["x"].tolist() == [1, 1]


def test_restoring_a_step_that_is_not_there(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, {"x": 1}, block=True)
        with pytest.raises(FileNotFoundError, match=r"step=4: .* but \[3\]"):
            checkpointer.restore({"x": 0}, 4)
        with pytest.raises(FileNotFoundError, match="step=5"):
            checkpointer.verify(5)


def test_the_spans_tell_exposed_from_hidden(tmp_path, monkeypatch):
    monkeypatch.setattr(Lane, "delay_s", 0.03)
    state = build()
    train_step(state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        train_step(state)
        checkpointer.wait()
        spans = {span.name: span for span in checkpointer.timings()}
        assert checkpointer.timings() == []
    assert {name for name, span in spans.items() if span.exposed} == {"save", "wait for staging"}
    assert {name for name, span in spans.items() if not span.exposed} == {"stage", "write", "commit"}
    assert {span.lane for span in spans.values()} == {"checkpoint"}
    moments = 3 * 4 * sum(p.numel() for p in state["model"].parameters()) + 4 * 6  # and six step counts
    assert spans["stage"].bytes == moments
    assert spans["write"].bytes == moments + sum(b.nbytes for b in state["model"].buffers())


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"every": 0}, ValueError, "every=0"),
        ({"every": 2.5}, ValueError, "every=2.5"),
        ({"every": True}, ValueError, "every=True"),
        ({"every": "often"}, ValueError, "every='often': .* of at least 1, None or 'auto'"),
        ({"every": "auto"}, ValueError, "every='auto', mtbf=None: 'auto', .*, takes the mean time between"),
        ({"every": 10, "mtbf": 60}, ValueError, "every=10, mtbf=60"),
        ({"every": "auto", "mtbf": 0}, ValueError, "mtbf=0"),
        ({"every": "auto", "mtbf": "1h"}, ValueError, "mtbf='1h'"),
        ({"keep": 0}, ValueError, "keep=0"),
        ({"keep_every": 5}, ValueError, "without keep="),
        ({"keep": 1, "keep_every": -1}, ValueError, "keep_every=-1"),
        ({"best": "acc"}, ValueError, r"best='acc' does not say .*: give \('acc', 'max'\)"),
        ({"best": ("acc", "most")}, ValueError, "the second is 'min' or 'max'"),
        ({"best": ("acc",)}, TypeError, r"best=\('acc',\): give a pair"),
        ({"best": 3}, TypeError, "best=3"),
        ({"in_flight": 0}, ValueError, "in_flight=0"),
        ({"in_flight": None}, ValueError, "in_flight=None"),
        ({"stage": "later"}, ValueError, "stage='later'"),
        ({"timeout": 0}, ValueError, "timeout=0"),
        ({"timeout": True}, ValueError, "timeout=True"),
        ({"timeout": float("nan")}, ValueError, "timeout=nan"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, error, match):
    with pytest.raises(error, match=match):
        Checkpointer(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_wrong_directories_are_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path in ("file", "file/inside"):
        with pytest.raises(ValueError, match="is a file"):
            Checkpointer(tmp_path / path)
    with pytest.raises(NotImplementedError, match="give it as text"):
        Checkpointer(Path("gs://bucket/run"))
    for nowhere in ("", "a\0b"):
        with pytest.raises(ValueError, match="is no path"):
            Checkpointer(nowhere)
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="gone', which does not exist"):
        Checkpointer(tmp_path / "dangling")
    with pytest.raises(PermissionError, match="cannot be made: .* name too long"):
        Checkpointer(tmp_path / ("x" * 300))
    with pytest.raises(TypeError, match="directory=3"):
        Checkpointer(3)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(PermissionError, match="cannot be read and written to"):
        Checkpointer(tmp_path / "dir")


def test_launched_without_a_process_group(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        Checkpointer(tmp_path)


@pytest.mark.parametrize(
    ("step", "state", "error", "match"),
    [
        (-1, {"x": 1}, ValueError, "step=-1"),
        (1.5, {"x": 1}, TypeError, "step=1.5"),
        (1, [1], TypeError, "state is a list"),
        (1, {}, ValueError, "empty dict"),
        (1, {3: 1}, TypeError, "key 3"),
        (1, {"x": {"y": object()}}, TypeError, "'x/y' is a builtins.object"),
        (1, {"models": [nn.Linear(1, 1)]}, TypeError, "'models/0' is a torch.nn.*top level"),
        (1, {"x": torch.zeros(2, device="meta")}, ValueError, "'x' is on the meta device"),
        (1, {"m": nn.LazyLinear(2)}, ValueError, "'m/weight' has no shape yet"),
        (1, {"x": torch.zeros(2).to_sparse()}, TypeError, "'x' is a tensor of dtype .* layout torch.sparse"),
        (1, {"x": torch.zeros(2, dtype=torch.complex128)}, TypeError, "complex128"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(tmp_path, step, state, error, match):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(error, match=match):
            checkpointer.save(step, state)
        checkpointer.save(2, {"x": 1}, block=True)
        assert checkpointer.steps() == [2]


def test_metrics_must_be_numbers(tmp_path):
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(TypeError, match=r"'loss'.*\.item\(\)"):
        checkpointer.save(1, {"x": 1}, metrics={"loss": torch.tensor(1.0)})
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(TypeError, match="metrics=5"):
            checkpointer.save(1, {"x": 1}, metrics=5)
        with pytest.raises(TypeError, match="only=5"):
            checkpointer.restore({"x": 1}, only=5)


def test_a_closed_checkpointer_refuses(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": 1})
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(RuntimeError, match="closed"):
        checkpointer.save(2, {"x": 1})
    assert files(tmp_path) == ["step-1"]


def test_an_interrupted_close_goes_on_at_the_next_call(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": 1})
    with monkeypatch.context() as patch:

        def interrupt(self):
            raise KeyboardInterrupt

        patch.setattr("overlapkit.checkpoint.save.Unfinished.settle", interrupt)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.close()
    with pytest.raises(RuntimeError, match="closed"):
        checkpointer.save(2, {"x": 1})
    checkpointer.close()
    assert files(tmp_path) == ["step-1"]  # and no lock


@pytest.mark.parametrize("stage", ["late", "now"])
@pytest.mark.parametrize("where", ["overlapkit.checkpoint.rng.capture", "overlapkit.checkpoint.tiers.Job"])
def test_an_interrupt_inside_save_leaves_the_next_one_clean(tmp_path, monkeypatch, where, stage):
    def interrupt(*args):
        raise KeyboardInterrupt

    state = build()
    train_step(state)
    with Checkpointer(tmp_path, stage=stage) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(where, interrupt)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(1, state)
        train_step(state)
        checkpointer.save(2, state)
        checkpointer.wait()
        assert checkpointer.steps() == [2]
        assert checkpointer._stager._active == []


AT_EXIT = """
import sys, time, torch, overlapkit.lane as lane
from overlapkit.checkpoint import Checkpointer
from overlapkit.checkpoint.disk import Disk

class Slow(Disk):
    def sync(self, fd):
        time.sleep(0.3)
        if sys.argv[2] == "full":
            raise OSError(28, "No space left on device")
        super().sync(fd)

join = lane.threading.Thread.join
lane.threading.Thread.join = lambda self, timeout=None: join(self, timeout and 0.01)  # 10 s are 0.01 s
Checkpointer._disk = Slow()
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, {"x": torch.ones(3)})
"""


@pytest.mark.parametrize("disk", ["slow", "full"])
def test_a_slow_save_at_exit_is_finished_or_its_loss_reported(tmp_path, disk):
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path), disk]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert ("No space left on device" in done.stderr) == (disk == "full")
    assert files(tmp_path) == (["step-1"] if disk == "slow" else [])


def test_a_forgotten_checkpointer_leaves_no_thread_hook_or_lock(tmp_path):
    def threads():
        return [thread for thread in threading.enumerate() if "checkpoint" in thread.name]

    before = len(threads())
    state = build()
    train_step(state)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state).wait()
    workers = threads()
    gone = weakref.ref(checkpointer)
    del checkpointer
    gc.collect()
    for worker in workers:
        worker.join(5)
    gc.collect()
    assert gone() is None
    assert len(threads()) <= before
    assert files(tmp_path) == ["step-1"]
    train_step(state)  # its hook does nothing


def test_many_saves_hold_memory_threads_and_files_flat(tmp_path):
    state = build()
    train_step(state)
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in range(5):
            checkpointer.save(step, state, block=True)
        before = Leftovers()
        for step in range(5, 40):
            checkpointer.save(step, state)
            train_step(state)
        checkpointer.wait()
        before.check()
        assert len(checkpointer._unfinished) == 0
        assert checkpointer.steps() == [38, 39]


def test_importing_it_is_light():
    code = (
        "import sys, torch; before = set(sys.modules); import overlapkit.checkpoint; "
        "new = set(sys.modules) - before; "
        "bad = [m for m in new if m.startswith(('torch.distributed.fsdp', 'torch.distributed.checkpoint', "
        "'torch.distributed.tensor', 'triton', 'safetensors'))]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_save_that_fails_at_once_says_so_through_its_handle(tmp_path, monkeypatch):
    """However fast the writer is: save() itself raises what earlier saves left behind."""
    checkpointer = Checkpointer(tmp_path)
    add = checkpointer._unfinished.add

    def add_when_it_has_failed(save):
        add(save)
        save.committed.settle()

    monkeypatch.setattr(checkpointer._unfinished, "add", add_when_it_has_failed)
    state = {"model": nn.Linear(3, 3)}  # nothing in it is copied inside save()
    state["optimizer"] = torch.optim.SGD(state["model"].parameters())
    with monkeypatch.context() as patch:
        patch.setattr("overlapkit.pinned.PinnedRing.take", lambda self, nbytes: 1 / 0)
        save = checkpointer.save(1, state)
        with pytest.raises(ZeroDivisionError):
            save.wait()
    checkpointer.save(2, state)
    checkpointer.close()
    assert Checkpointer(tmp_path).steps() == [2]


@pytest.mark.parametrize("keys", [(1, "1"), ((1, 2), "(1, 2)"), (None, "None")])
def test_two_keys_that_read_the_same_are_refused(tmp_path, keys):
    """Their tensors would have one name, and one of them would be lost."""
    state = {"x": {key: torch.full((2,), float(place)) for place, key in enumerate(keys)}}
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match="'x/.*' twice: two keys"):
        checkpointer.save(1, state)


def test_names_that_end_as_wrappers_begin_stay(tmp_path):
    def made(value):
        model = nn.Module()
        model.a_orig_mod = nn.Linear(2, 2, bias=False)
        model.aweight = nn.Parameter(torch.full((2, 2), value))
        return model

    model, other = made(1.0), made(2.0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model}, block=True)
        checkpointer.restore({"model": other})
    for one, same in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, same)


def test_another_working_directory_changes_nothing(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with Checkpointer("run") as checkpointer:
        checkpointer.save(1, {"x": torch.ones(2)}, block=True)
        monkeypatch.chdir(tmp_path)
        checkpointer.save(2, {"x": torch.ones(2)}, block=True)
        assert checkpointer.steps() == [1, 2]
    assert files(tmp_path) == ["a"]


@pytest.mark.parametrize("stage", ["late", "now"])
def test_a_first_save_in_inference_mode_spoils_none_after_it(tmp_path, stage):
    state = build()
    train_step(state)
    with Checkpointer(tmp_path, stage=stage) as checkpointer:
        with torch.inference_mode():
            checkpointer.save(1, state, block=True)
        train_step(state)
        checkpointer.save(2, state, block=True)
        assert checkpointer.steps() == [1, 2]


def test_a_forgotten_checkpointer_holds_its_lock_until_its_save_is_there(tmp_path, monkeypatch):
    """The next one on the directory would sweep the files that are being written."""
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(Disk):
        def sync(self, fd):
            begun.set()
            goes_on.wait(10)
            super().sync(fd)

    monkeypatch.setattr(Checkpointer, "_disk", Slow())
    checkpointer = Checkpointer(tmp_path)
    save = checkpointer.save(1, {"x": torch.ones(2)})
    del checkpointer
    begun.wait(10)
    with Checkpointer(tmp_path) as other:
        goes_on.set()
        save.wait()
        assert other.steps() == [1]
