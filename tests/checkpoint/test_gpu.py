"""What needs a CUDA device: the lane is a side stream, the buffers are page-locked, the host never waits."""

import pytest
import torch
from torch import nn

from overlapkit.checkpoint import Checkpointer
from overlapkit.lane import Lane
from tests.checkpoint.loop import assert_same, build, build_model, snapshot, train_step

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch):
    monkeypatch.setattr("tests.checkpoint.loop.DATA", torch.randn(64, 6, device="cuda"))
    torch.cuda.manual_seed(0)


def on_device(seed=0):
    return build(build_model().cuda(), seed=seed)


@pytest.mark.parametrize("stage", ["late", "now"])
def test_the_values_saved_are_those_at_the_save(tmp_path, monkeypatch, stage):
    monkeypatch.setattr(Lane, "delay_s", 0.05)
    state = on_device()
    train_step(state)
    with Checkpointer(tmp_path, stage=stage) as checkpointer:
        for step in (1, 2, 3):
            at_save = snapshot(state)
            save = checkpointer.save(step, state)
            assert not save.staged.done()  # queued behind the lane's delay; the host has gone on
            train_step(state)
            train_step(state)
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
