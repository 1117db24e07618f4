"""What waits for a save in flight: the background is held until somebody waits for it, and then goes on."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlapkit.checkpoint import Checkpointer, stage
from overlapkit.checkpoint.job import Job
from overlapkit.checkpoint.remote.store import Store
from overlapkit.checkpoint.save import Unfinished
from overlapkit.lane import Lane
from overlapkit.pinned import PinnedRing
from overlapkit.span import SpanLog
from tests.checkpoint.faults import value_state
from tests.checkpoint.remote.injected import URL, Fault, faulty, put_back


@pytest.fixture(autouse=True)
def _empty_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Store, "pauses_s", (0.0, 0.0, 0.0))
    put_back({})
    yield
    put_back({})


def hold(lane: Lane, until_asked: Unfinished) -> None:
    """Let the lane begin with nothing before somebody waits for those saves (or too long)."""
    go, settle = threading.Event(), until_asked.settle
    lane.submit(lambda: go.wait(5))
    until_asked.settle = lambda: (go.set(), settle())  # type: ignore[method-assign]


def test_a_restore_waits_for_the_save_in_flight(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        hold(checkpointer._writer, checkpointer._unfinished)
        checkpointer.save(1, value_state(1))
        assert checkpointer.restore(value_state(-1)) == 1


def test_wait_waits_for_uploads_too(tmp_path: Path) -> None:
    with Checkpointer(URL, local=tmp_path) as checkpointer:
        hold(checkpointer._uploads._lane, checkpointer._unsent)
        save = checkpointer.save(1, value_state(1))
        checkpointer.wait()
        assert save.uploaded.done()


def closes_with(checkpointer: Checkpointer, words: str) -> None:
    """An error that comes while close() waits is raised when all is closed, not in the middle of it."""
    with pytest.raises(Exception, match=words):
        checkpointer.close()
    assert checkpointer._closed
    checkpointer.close()


def test_a_save_that_fails_while_it_is_closed_is_told_when_all_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: Job, temporary: Path) -> Any:
        job.staging.memory()
        raise OSError("planted")

    monkeypatch.setattr(Job, "_write", fail)
    checkpointer = Checkpointer(tmp_path)
    hold(checkpointer._writer, checkpointer._unfinished)
    checkpointer.save(1, value_state(1))
    closes_with(checkpointer, "planted")
    Checkpointer(tmp_path).close()  # its lock is free


def test_an_upload_that_fails_while_it_is_closed_is_told_when_all_is_closed(tmp_path: Path) -> None:
    with faulty(Fault(0, only=lambda call, path: call == "put_file")):
        checkpointer = Checkpointer(URL, local=tmp_path)
        hold(checkpointer._uploads._lane, checkpointer._unsent)
        checkpointer.save(1, value_state(1), block=True)
        closes_with(checkpointer, "put_file|injected|store")


def test_a_buffer_is_borrowed_when_those_that_are_being_made_are_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, go = threading.Event(), threading.Event()

    def warm(ring: PinnedRing, plan: Any, buffers: int, *, on_cuda: bool) -> None:
        buffer = ring.take(plan.nbytes)
        made.set()
        go.wait(5)
        buffer.give_back()

    monkeypatch.setattr(stage, "_warm", warm)
    with Checkpointer(tmp_path) as checkpointer:
        stager, state = checkpointer._stager, value_state(1)
        checkpointer._saver.prewarm(state, beside=True)
        assert made.wait(30)
        settle = stager._warming.settle
        stager._warming.settle = lambda: (go.set(), settle())
        stager.borrow(8).give_back()


def test_what_comes_after_the_copy_has_ended_is_no_change_under_it(tmp_path: Path) -> None:
    """Though nobody has asked whether it has: in a thread the copy looks for changes itself, at its end."""
    go, model = threading.Event(), torch.nn.Linear(4, 4)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer._writer.submit(lambda: go.wait(30))
        save = checkpointer.save(1, state)
        checkpointer._stager._lane.submit(lambda: None).wait()  # behind the copy
        with torch.no_grad():
            model.weight.mul_(2)
        go.set()
        save.wait()


def test_one_checkpoint_at_a_time_is_read_ahead(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 7):
            checkpointer.save(step, value_state(step), block=True)
    go, begun = threading.Event(), []
    with Checkpointer(tmp_path, keep=3) as checkpointer:
        reader = checkpointer._deletion._reader
        reader.submit(lambda: go.wait(30))
        submit = reader.submit
        reader.submit = lambda fn, **options: (begun.append(fn), submit(fn, **options))[1]
        for step in (7, 8):
            checkpointer.save(step, value_state(step), block=True)
        assert len(begun) == 1
        go.set()


def test_room_is_waited_for_and_not_asked_for_again_and_again() -> None:
    class Committed:
        asked, settled, error = 0, False, None

        def done(self) -> bool:
            self.asked += 1
            assert self.asked < 9
            return self.settled

        def settle(self) -> None:
            self.settled = True

    unfinished, committed = Unfinished(SpanLog()), Committed()
    unfinished.add(SimpleNamespace(committed=committed, _settle=committed.settle))  # type: ignore[arg-type]
    unfinished.make_room(1)
    assert len(unfinished) == 0


def test_memory_that_is_made_ahead_is_there_when_the_call_returns(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        stager, share = checkpointer._stager, checkpointer._planner.take(value_state(1))
        lane, ring = stager._ready(share.device)
        lane.delay_s = 0.3
        stager.prewarm(share)
        assert ring.nbytes > 0
