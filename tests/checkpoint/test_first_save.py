"""What the first save would do before all others is done when a state is restored, or a save is not due."""

import gc
import threading

import pytest
import torch

import overlapkit.checkpoint.restorer as restorer_module
from overlapkit.checkpoint import Checkpointer
from overlapkit.checkpoint.collector import collector_paused
from overlapkit.checkpoint.fileplan import FilePlan
from tests.checkpoint.faults import value_state
from tests.checkpoint.loop import build, train_step


@pytest.mark.parametrize("how", ["restore", "not due"])
def test_the_first_save_starts_no_thread_and_makes_no_text(tmp_path, monkeypatch, how):
    state = build()
    train_step(state)
    with Checkpointer(tmp_path, every=2) as checkpointer:
        if how == "restore":
            assert checkpointer.restore(state) == 0
        else:
            assert not checkpointer.save(1, state).due
            checkpointer._stager._warming.settle()
            checkpointer._writer.submit(lambda: None).wait()
        train_step(state)
        plan = checkpointer._planner._known.plan
        assert {"header", "groups", "blocks", "table", "plain_tensors"} <= vars(plan).keys()
        started = []
        real = threading.Thread.start
        monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread) or real(thread))
        save = checkpointer.save(2, state)
        assert started == []
        save.wait()
        assert checkpointer._planner._known.plan is plan
        monkeypatch.undo()


def test_texts_that_cannot_be_made_are_the_next_saves_error(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(FilePlan, "groups", property(lambda plan: 1 / 0))
            checkpointer.restore(value_state(1))
            state = value_state(1)
            with pytest.raises(ZeroDivisionError):
                checkpointer.save(1, state, block=True)
        checkpointer.save(2, state, block=True)
        assert checkpointer.steps() == [2]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(tmp_path, monkeypatch, enabled):
    seen = []
    real = restorer_module.read_boxes

    def note(*args):
        seen.append(gc.isenabled())
        return real(*args)

    monkeypatch.setattr(restorer_module, "read_boxes", note)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, value_state(1), block=True)
        if not enabled:
            gc.disable()
        try:
            assert checkpointer.restore(value_state(2)) == 1
            assert gc.isenabled() == enabled
            with pytest.raises(ZeroDivisionError), collector_paused():
                raise ZeroDivisionError
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
    assert seen == [False]


def test_what_is_read_ahead_may_be_missing(tmp_path, monkeypatch):
    """It is a hint: the reading itself tells what is wrong."""
    asked = []
    monkeypatch.setattr(
        restorer_module,
        "read_ahead",
        lambda path, real=restorer_module.read_ahead: asked.append(path) or real(path),
    )
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, value_state(1), block=True)
        assert checkpointer.restore(value_state(2)) == 1
    assert asked == [tmp_path / "step-1" / "rank-00000.safetensors"]
    restorer_module.read_ahead(tmp_path / "nothing")
    state = value_state(2)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state, only=("t",)) == 1
    assert len(asked) == 2  # by this test itself: a part of a state may be little of the file
    assert torch.equal(state["t"], torch.ones(9))
