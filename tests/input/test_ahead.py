"""A reader ends, whoever ends it and whatever it is busy with, and the next pass finds the source free."""

import gc
import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from overlapkit.input import DeviceLoader, ahead
from overlapkit.lane import Ticket
from tests.input.sources import Failing, in_order


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "overlapkit-input"]


def test_dropped_without_a_word_also_in_a_cycle_and_in_another_thread() -> None:
    passing = iter(DeviceLoader(in_order(20, 2), "cpu"))
    next(passing)
    holder = [passing]
    holder.append(holder)  # type: ignore[arg-type]
    del passing, holder
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    deadline = time.monotonic() + 2
    while readers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert readers() == []


@pytest.mark.filterwarnings("error")
def test_forgotten_in_a_cycle_it_lets_go_of_the_source_at_once() -> None:
    """The collector ends lanes that are garbage before it calls finalizers: then nothing would let go."""
    over = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from range(20)
        finally:
            over.set()

    passing = iter(DeviceLoader(source, "cpu"))
    next(passing)
    passing.me = passing  # type: ignore[attr-defined]
    del passing
    gc.collect()
    assert over.is_set()
    assert ahead._lanes == set()


def test_a_source_that_stays_busy_is_left_behind_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "PATIENCE_S", 0.05)
    release, over = threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        yield 0
        release.wait(10)
        over.set()
        yield 1

    passing = iter(DeviceLoader(source, "cpu"))
    next(passing)
    with pytest.warns(RuntimeWarning, match="still busy"):
        passing.close()
    assert not over.is_set(), "closing waited for it all the same"
    release.set()


def test_a_batch_that_has_to_be_waited_for_is_told_from_one_that_is_there() -> None:
    go, looked = threading.Event(), []

    def source() -> Iterator[int]:
        go.wait(10)
        yield 0

    passing = iter(DeviceLoader(source, "cpu"))
    watch = passing._ahead._feed.watch
    begin = watch.begin
    watch.begin = lambda look: (looked.append(look), go.set(), begin(look))
    next(passing)
    assert looked[0] is True
    passing.close()


class OneAtATime:
    """A source with a state, whose batch 1 comes when it is let through; tells who is in it."""

    def __init__(self) -> None:
        self.through = threading.Event()
        self.inside = threading.Event()
        self.begun_beside: list[bool] = []

    def __iter__(self) -> Iterator[int]:
        self.begun_beside.append(self.inside.is_set())
        return self._batches()

    def _batches(self) -> Iterator[int]:
        yield 0
        self.inside.set()
        self.through.wait(20)
        self.inside.clear()
        yield 1

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def forgotten_in_another_thread(source: OneAtATime) -> DeviceLoader:
    """A loader whose pass was forgotten while its reader was in the source."""
    loader = DeviceLoader(source, "cpu", depth=1)
    holder: list[Any] = [iter(loader)]
    next(holder[0])
    assert source.inside.wait(10)
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    return loader


def test_a_pass_begins_when_the_reader_of_a_forgotten_one_is_out_of_the_source() -> None:
    source = OneAtATime()
    loader = forgotten_in_another_thread(source)
    timer = threading.Timer(0.1, source.through.set)
    timer.start()
    assert list(loader) == [0, 1]
    timer.join()
    assert source.begun_beside == [False, False]
    assert loader._feed.left == []


def test_a_forgotten_reader_that_stays_in_the_source_is_waited_for_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ahead, "PATIENCE_S", 0.05)
    source = OneAtATime()
    loader = forgotten_in_another_thread(source)
    for _ in range(2):  # it is not forgotten a second time
        with pytest.raises(RuntimeError, match="still busy with a batch for an earlier pass"):
            iter(loader)
    source.through.set()
    monkeypatch.setattr(ahead, "PATIENCE_S", 10.0)
    assert list(loader) == [0, 1]


def test_an_interrupted_close_is_gone_on_with() -> None:
    source = OneAtATime()
    passing = iter(DeviceLoader(source, "cpu", depth=1))
    next(passing)
    assert source.inside.wait(10)
    main = threading.get_ident()
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        passing.close()
    timer.join()
    assert len(readers()) == 1
    source.through.set()
    passing.close()
    assert readers() == []
    assert not source.inside.is_set()
    assert list(passing) == []


def test_closed_by_another_thread_amid_a_wait_it_is_at_its_end() -> None:
    source = OneAtATime()
    loader = DeviceLoader(source, "cpu", depth=1)
    closing = threading.Thread(target=loader.close)

    def close() -> None:
        closing.start()
        while not passing._ahead.closed:
            time.sleep(0.001)
        source.through.set()

    passing = iter(loader)
    next(passing)
    timer = threading.Timer(0.05, close)
    timer.start()
    assert list(passing) == []
    timer.join()
    closing.join()
    assert readers() == []


@pytest.mark.parametrize("persistent", [False, True])
def test_an_error_that_is_kept_keeps_no_worker(persistent: bool) -> None:
    source = DataLoader(Failing(7), batch_size=2, num_workers=1, persistent_workers=persistent)
    loader = DeviceLoader(source, "cpu")
    with pytest.raises(LookupError) as kept:
        list(loader)
    assert len(multiprocessing.active_children()) == (1 if persistent else 0)
    del loader, source, kept
    gc.collect()
    for worker in multiprocessing.active_children():  # torch before 2.13 does not wait for those that it ends
        worker.join(20)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("where", ["source", "transform"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_grad_mode_is_that_of_iter(mode: Any, where: str) -> None:
    weight = torch.ones(2, requires_grad=True)

    def double(batch: int) -> torch.Tensor:
        return weight * batch

    loader = DeviceLoader(
        lambda: map(double if where == "source" else int, [1, 2]),
        "cpu",
        transform=double if where == "transform" else None,
    )
    for within, wanted in [(mode, mode is torch.enable_grad), (torch.enable_grad, True)]:
        with within():
            passing = iter(loader)
        assert [batch.requires_grad for batch in passing] == [wanted] * 2


def test_a_pass_that_begins_afresh_waits_for_its_reader_however_long_that_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else two readers would be in the source; closing gives it up after a while, with a warning."""
    monkeypatch.setattr(ahead, "PATIENCE_S", 0.01)
    go = threading.Event()

    class Slow(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            if index:
                go.wait(10)
            return index

    loader = DeviceLoader(DataLoader(Slow(), batch_size=1), "cpu", depth=2)
    passing = iter(loader)
    loader.set_epoch(1)  # after it began: it counts
    stop = passing._ahead.stop

    def stopping() -> Any:
        end = stop()
        settle = end.settle
        end.settle = lambda: (go.set(), settle())  # the source goes on once somebody waits for it
        return end

    passing._ahead.stop = stopping
    assert [int(batch) for batch in passing] == [0, 1, 2, 3]


def test_what_a_reader_is_in_yet_is_not_ended() -> None:
    loader = DeviceLoader([1, 2], "cpu")
    closed: list[str] = []
    loader._feed.source.close = lambda: closed.append("source")  # type: ignore[method-assign]
    busy: Ticket[None] = Ticket("input")
    loader._feed.left.append(busy)
    loader.close()
    assert closed == []
    busy._settle(None, None)
    loader.close()
    assert closed == ["source"]
