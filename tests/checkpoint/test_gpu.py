"""What needs a CUDA device: the lane is a side stream, the buffers are page-locked, the host never waits."""

from itertools import count

import pytest
import torch
from torch import nn

from overlapkit.checkpoint import Checkpointer
from overlapkit.lane import Lane
from overlapkit.optim import AdamW
from tests.checkpoint.loop import assert_same, build, build_model, forward_backward, snapshot, train_step
from tests.on_gpu import assert_flat, no_waits, spin

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch):
    monkeypatch.setattr("tests.checkpoint.loop.DATA", torch.randn(64, 6, device="cuda"))
    torch.cuda.manual_seed(0)


def on_device(seed=0):
    return build(build_model().cuda(), seed=seed)


def step_of(state, late):
    """A training step whose optimizer may come late."""
    forward_backward(state)
    if late:
        spin(0.02)
    state["optimizer"].step()
    state["scheduler"].step()
    state["optimizer"].zero_grad()


@pytest.mark.parametrize("late", ["copy", "step", "both"])
@pytest.mark.parametrize("stage", ["late", "now"])
def test_the_values_saved_are_those_at_the_save(tmp_path, monkeypatch, stage, late):
    """Whether the copies come late, or the optimizer's steps before and after the save."""
    monkeypatch.setattr(Lane, "delay_s", 0.05 if late != "step" else 0.0)
    state = on_device()
    train_step(state)
    with Checkpointer(tmp_path, stage=stage) as checkpointer:
        for step in (1, 2, 3):
            step_of(state, late != "copy")
            at_save = snapshot(state)
            save = checkpointer.save(step, state)
            if late == "copy":
                assert not save.staged.done()  # queued behind the lane's delay; the host has gone on
            for _ in range(2):
                step_of(state, late != "copy")
            save.wait()
            with Checkpointer(tmp_path) as other:
                restored = on_device(seed=9)
                other.restore(restored, step)
            assert_same(snapshot(restored), at_save)


@pytest.mark.parametrize("stage", ["late", "now"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, stage):
    state = on_device()
    with Checkpointer(tmp_path, stage=stage) as checkpointer:
        for _ in range(3):
            train_step(state)
        checkpointer.save(3, state)
        losses = [train_step(state) for _ in range(3)]
    other = on_device(seed=4)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(other) == 3
    assert [train_step(other) for _ in range(3)] == losses


def test_staging_memory_is_page_locked_and_reused(tmp_path):
    state = on_device()
    train_step(state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore(state)
        first = checkpointer._stager._ring._slots[0]._memory
        assert first.is_pinned()
        for step in range(3):
            checkpointer.save(step, state)
            train_step(state)
        checkpointer.wait()
        assert checkpointer._stager._ring._slots[0]._memory.data_ptr() == first.data_ptr()
        spans = {span.name: span for span in checkpointer.timings()}
        assert {"save", "stage", "write", "commit"} <= set(spans)


class Training:
    """A model and our optimizer, trained without reading anything back."""

    def __init__(self):
        torch.manual_seed(0)
        parts = (nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 256))
        self.model = nn.Sequential(*parts).cuda()
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2, max_norm=1.0)
        self.x = torch.randn(32, 256, device="cuda")
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self):
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("stage", ["late", "now"])
def test_neither_a_save_nor_the_steps_after_it_wait_for_the_device(tmp_path, stage):
    training = Training()
    training.step()
    with Checkpointer(tmp_path, stage=stage) as checkpointer:
        checkpointer.save(1, training.state, block=True)  # what is made once
        training.step()
        with no_waits():
            spin(0.02)
            save = checkpointer.save(2, training.state)
            for _ in range(3):
                training.step()
            save.wait()  # the writer's thread makes nobody wait, either, but by an event


def test_memory_is_flat(tmp_path):
    training, steps = Training(), count(1)
    with Checkpointer(tmp_path, every=5, keep=1) as checkpointer:

        def step():
            training.step()
            checkpointer.save(next(steps), training.state)

        assert_flat(step)
        checkpointer.wait()


def test_a_parameter_changed_by_hand_fails_that_save(tmp_path, monkeypatch):
    monkeypatch.setattr(Lane, "delay_s", 0.05)
    state = on_device()
    train_step(state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        with torch.no_grad():
            state["model"][3].weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"model/3\.weight"):
            checkpointer.wait()


def test_a_cuda_tensor_of_an_object_comes_back_on_cuda(tmp_path):
    class Holder:
        def __init__(self, value):
            self.value = value

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    one, other = Holder(torch.arange(3, device="cuda")), Holder(None)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"h": one, "m": nn.Linear(1, 1)}, block=True)
        checkpointer.restore({"h": other, "m": nn.Linear(1, 1)})
    assert other.value.device.type == "cuda"
    assert other.value.tolist() == [0, 1, 2]
