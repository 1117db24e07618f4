"""Written ahead: of a save that somebody waits for, what is copied is written while the rest is copied."""

import threading

import pytest
import torch
from safetensors.torch import load_file

from overlapkit.checkpoint import Checkpointer, CheckpointError, copying, fileplan
from overlapkit.checkpoint.copying import Portion
from overlapkit.checkpoint.disk import Disk

LAYERS, SIDE = 12, 32


@pytest.fixture
def state():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(SIDE, SIDE) for _ in range(LAYERS)), torch.nn.BatchNorm1d(SIDE)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, SIDE)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "double": torch.randn(700, dtype=torch.float64)}


@pytest.fixture
def last(monkeypatch):
    """The last portion is copied only when this is set, which the first write of tensors does."""
    monkeypatch.setattr(fileplan, "_GROUP", 8192)
    monkeypatch.setattr(copying, "_AT_ONCE", 4096)
    written, copy, write = threading.Event(), Portion.copy, Disk.write_at
    found = {"write": written, "then": lambda: None}

    def wait_and_copy(portion, memory):
        if portion.start > 60_000:
            assert written.wait(30), "nothing is written before all is copied"
            found["then"]()
        copy(portion, memory)

    def note(disk, fd, view, offset):
        if view.nbytes == 8192:
            written.set()
        return write(disk, fd, view, offset)

    monkeypatch.setattr(Portion, "copy", wait_and_copy)
    monkeypatch.setattr(Disk, "write_at", note)
    return found


@pytest.mark.parametrize("how", ["block", "wait", "checkpointer", "next"])
def test_a_save_that_is_waited_for_is_written_while_it_is_copied(tmp_path, state, last, how):
    with Checkpointer(tmp_path) as checkpointer:
        save = checkpointer.save(1, state, block=how == "block")
        if how == "next":
            last["write"].clear()
            checkpointer.save(2, state)
        elif how == "checkpointer":
            checkpointer.wait()
        save.wait()
        checkpointer.wait()
        for step in checkpointer.steps():
            checkpointer.verify(step)
        found = load_file(tmp_path / "step-1" / "rank-00000.safetensors")
    expected = {f"model/{name}": value for name, value in state["model"].state_dict().items()}
    moments = [value for values in state["optimizer"].state.values() for value in values.values()]
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert torch.equal(found["double"], state["double"])
    kept = [value for name, value in found.items() if name.startswith("optimizer/state")]
    assert len(kept) == len(moments)
    total = sum(value.double().sum() for value in kept)
    assert torch.isclose(total, sum(value.double().sum() for value in moments), rtol=1e-12)


def test_a_change_under_the_copy_fails_a_save_that_was_written_already(tmp_path, state, last):
    """The parameter's own bytes may be on disk by then: the commit is not."""

    def change():
        with torch.no_grad():
            state["model"][0].weight.mul_(2)

    last["then"] = change
    with Checkpointer(tmp_path) as checkpointer:
        save = checkpointer.save(1, state)
        with pytest.raises(CheckpointError, match="model/0.weight"):
            save.wait()
        assert checkpointer.steps() == []
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp")]
        last["then"] = lambda: None
        checkpointer.save(2, state, block=True)
        assert checkpointer.steps() == [2]


def test_a_copy_that_fails_in_its_middle_fails_the_save(tmp_path, state, last):
    def fail():
        raise ZeroDivisionError

    last["then"] = fail
    with Checkpointer(tmp_path) as checkpointer:
        save = checkpointer.save(1, state)
        with pytest.raises(ZeroDivisionError):
            save.wait()
        last["then"] = lambda: None
        assert checkpointer.steps() == []
        checkpointer.save(2, state, block=True)
        assert checkpointer.steps() == [2]


def test_a_write_that_fails_while_the_rest_is_copied_lends_no_buffer_before_the_copy_is_over(
    tmp_path, state, monkeypatch
):
    begun, go, released, real = threading.Event(), threading.Event(), [], Portion.copy

    def copy(portion, memory):
        begun.set()
        assert go.wait(30)
        real(portion, memory)

    def fail(disk, folder):
        assert begun.wait(30)
        threading.Timer(0.2, go.set).start()
        raise ZeroDivisionError

    with Checkpointer(tmp_path) as checkpointer:
        release = checkpointer._stager.release
        monkeypatch.setattr(
            checkpointer._stager, "release", lambda staging: released.append(go.is_set()) or release(staging)
        )
        with monkeypatch.context() as patch:
            patch.setattr(Portion, "copy", copy)
            patch.setattr(Disk, "make_folder", fail)
            save = checkpointer.save(1, state)
            with pytest.raises(ZeroDivisionError):
                save.wait()
        assert released == [True]
        checkpointer.save(2, state, block=True)
        assert checkpointer.steps() == [2]
