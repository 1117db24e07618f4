"""A pass ends well, whatever ends it: no hang, no thread, process or file left, the original error first."""

import gc
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from overlapkit.input import DeviceLoader
from overlapkit.lane import Lane
from tests.input.sources import MAP_STYLE, Failing, Numbers, in_order, plain, stateful_loader
from tests.leftovers import Leftovers


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "overlapkit-input"]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("delay", [0.0, 0.003])
def test_order_and_end(depth: int, delay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lane, "delay_s", delay)
    loader = DeviceLoader(in_order(11, 2), "cpu", depth=depth)
    for _ in range(2):
        assert [plain(batch) for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
    iterator = iter(loader)
    assert len(list(iterator)) == 6
    assert list(iterator) == []  # stays at its end
    assert readers() == []


def test_a_source_is_not_asked_again_after_its_end_or_error() -> None:
    class Once:
        def __init__(self, last: Exception) -> None:
            self.given = [1, 2]
            self.last = last

        def __iter__(self) -> "Once":
            return self

        def __next__(self) -> int:
            if self.given:
                return self.given.pop(0)
            asked.append(self.last)
            raise self.last

    asked: list[Exception] = []
    assert list(DeviceLoader(lambda: Once(StopIteration()), "cpu", depth=4)) == [1, 2]
    passing = iter(DeviceLoader(lambda: Once(OSError("gone")), "cpu", depth=4))
    assert [next(passing), next(passing)] == [1, 2]
    with pytest.raises(OSError, match="gone"):
        next(passing)
    assert list(passing) == []
    assert [type(error) for error in asked] == [StopIteration, OSError]


def test_reads_ahead_as_far_as_depth_and_no_further() -> None:
    pulled = []

    def source() -> Iterator[int]:
        for k in range(10):
            pulled.append(k)
            yield k

    for depth in (1, 3):
        pulled.clear()
        passing = iter(DeviceLoader(source, "cpu", depth=depth))
        for taken in (1, 2):
            next(passing)
            deadline = time.monotonic() + 5
            while len(pulled) < taken + depth and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.02)
            assert len(pulled) == taken + depth
        passing.close()


def test_the_source_runs_beside_the_consumer_in_one_thread() -> None:
    seen: set[str] = set()

    def source() -> Iterator[int]:
        seen.add(threading.current_thread().name)
        yield 1
        seen.add(threading.current_thread().name)

    assert list(DeviceLoader(source, "cpu")) == [1]
    assert seen == {"overlapkit-input"}


def test_a_break_ends_the_thread_and_the_source_at_once() -> None:
    closed: list[str] = []

    def source() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(threading.current_thread().name)

    for batch in DeviceLoader(source, "cpu"):
        if batch == 3:
            break
    assert readers() == []
    assert closed == ["overlapkit-input"]


def test_hundreds_of_early_breaks_leave_nothing() -> None:
    loader = DeviceLoader(in_order(40, 2), "cpu", depth=3)
    other = DeviceLoader(lambda: iter(range(100)), "cpu")
    for _ in range(3):
        next(iter(loader))
    before = Leftovers()
    for epoch in range(300):
        for taken, _ in enumerate(loader):
            if taken == epoch % 5:
                break
        next(iter(other))
    before.check()
    assert len(list(loader)) == 20


@pytest.mark.parametrize("persistent", [False, True])
def test_early_breaks_with_workers_leave_no_process(persistent: bool) -> None:
    loader = DeviceLoader(in_order(40, 2, num_workers=2, persistent_workers=persistent), "cpu")
    files = 0
    for epoch in range(10):
        for taken, batch in enumerate(loader):
            assert plain(batch) == [2 * taken, 2 * taken + 1]
            if taken == 3:
                break
        gc.collect()
        files = open_files() if epoch == 1 else files
        assert len(multiprocessing.active_children()) == (2 if persistent else 0)
    assert open_files() < files + 6  # batches in shared memory come and go; a leak would be 8 or more
    assert len(list(loader)) == 20
    del loader, batch
    gc.collect()
    for worker in multiprocessing.active_children():  # torch before 2.13 does not wait for those that it ends
        worker.join(20)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("build", [in_order, MAP_STYLE["elastic"]])
def test_closing_ends_persistent_workers_and_the_next_pass_has_new_ones(build: Any) -> None:
    loader = DeviceLoader(build(8, 2, num_workers=1, persistent_workers=True), "cpu")
    for _ in range(2):
        next(iter(loader))
        loader.close()
        for worker in multiprocessing.active_children():  # torch before 2.13 does not wait
            worker.join(20)
        assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_source_comes_in_its_place_and_whole(workers: int) -> None:
    loader = DeviceLoader(DataLoader(Failing(7), batch_size=2, num_workers=workers), "cpu", depth=3)
    passing = iter(loader)
    assert [plain(next(passing)) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(LookupError, match="sample 7") as caught:
        next(passing)
    assert ("__getitem__" in [entry.name for entry in caught.traceback]) == (workers == 0)
    assert list(passing) == []
    assert readers() == []
    del caught, passing, loader
    gc.collect()
    assert multiprocessing.active_children() == []


def test_a_killed_worker_is_an_error_not_a_hang() -> None:
    loader = DeviceLoader(DataLoader(Failing(7, deadly=True), batch_size=2, num_workers=1), "cpu")
    with pytest.raises(RuntimeError, match="(?i)worker.*(died|killed|exited)"):
        list(loader)
    gc.collect()
    assert readers() == []
    assert multiprocessing.active_children() == []


def test_an_error_leaves_no_cycle_behind() -> None:
    """What the traceback refers to goes when the error is forgotten, without the garbage collector."""

    class Token:
        pass

    def source() -> Iterator[int]:
        token = Token()
        tokens.append(weakref.ref(token))
        yield 1
        raise LookupError("late")

    tokens: list[Callable[[], Any]] = []
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(LookupError):
            for _ in DeviceLoader(source, "cpu"):
                pass
        assert tokens[0]() is None
    finally:
        gc.enable()


def test_an_error_in_closing_the_source_is_a_note_on_the_original() -> None:
    def transform(batch: int) -> int:
        raise LookupError("first")

    def source() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            raise OSError("second")

    with pytest.raises(LookupError, match="first") as caught:
        list(DeviceLoader(source, "cpu", transform=transform))
    assert any("second" in note for note in caught.value.__notes__)


def test_an_error_of_a_sampler_behind_what_was_asked_for_is_nobody_s() -> None:
    """A pass that is left early draws on until where generators would stand, whatever was read ahead."""

    class Breaks:
        def __iter__(self) -> Iterator[int]:
            yield from range(2)
            asked.append(True)
            raise LookupError("index 2")

        def __len__(self) -> int:
            return 9

    asked: list[bool] = []
    loader = DeviceLoader(in_order(9, 1, sampler=Breaks()), "cpu", depth=1)
    with mock.patch.object(Lane, "delay_s", 0.02):  # so that nothing of it was read
        passing = iter(loader)
        assert [plain(next(passing)) for _ in range(2)] == [[0], [1]]
        passing.close()
    assert asked == [True]
    with pytest.raises(LookupError, match="index 2"):
        list(loader)


def test_an_error_in_the_loop_body_is_the_only_one() -> None:
    loader = DeviceLoader(in_order(20, 2), "cpu")

    def train() -> None:
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    gc.collect()
    assert readers() == []


def test_an_interrupted_wait_loses_no_batch() -> None:
    """Ctrl-C in a notebook, after which the loop goes on."""

    def source() -> Iterator[int]:
        yield 0
        time.sleep(0.3)
        yield from (1, 2)

    passing = iter(DeviceLoader(source, "cpu"))
    got = [next(passing)]
    main = threading.get_ident()
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(passing)
    timer.join()
    assert got + list(passing) == [0, 1, 2]


def test_a_generator_around_it_can_be_closed() -> None:
    def through() -> Iterator[Any]:
        yield from DeviceLoader(in_order(20, 2), "cpu")

    outer = through()
    next(outer)
    outer.close()
    assert readers() == []


def test_two_passes_at_once() -> None:
    loader = DeviceLoader(in_order(6, 2), "cpu")
    got = [(plain(a), plain(b)) for a in loader for b in loader]
    assert got == [(a, b) for a in ([0, 1], [2, 3], [4, 5]) for b in ([0, 1], [2, 3], [4, 5])]


@pytest.mark.parametrize(
    "source",
    [
        lambda: stateful_loader(8, 2),
        lambda: in_order(8, 2, num_workers=1, persistent_workers=True),
    ],
    ids=["state", "persistent workers"],
)
def test_a_source_with_one_iterator_says_so(source: Callable[[], Any]) -> None:
    loader = DeviceLoader(source(), "cpu")
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(RuntimeError, match="closed when a newer one was made"):
        next(first)
    assert sorted(i for batch in second for i in plain(batch)) == list(range(8))


def test_closing_twice_and_after_the_end() -> None:
    passing = iter(DeviceLoader([1, 2], "cpu"))
    assert list(passing) == [1, 2]
    passing.close()
    passing.close()
    fresh = iter(DeviceLoader([1, 2], "cpu"))
    fresh.close()
    assert list(fresh) == []


def test_a_source_that_does_not_keep_its_length_is_an_error() -> None:
    class Liar:
        def __init__(self, n: int) -> None:
            self.n = n

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.n))

        def __len__(self) -> int:
            return 4

    for size, match in [(3, "source gave 3 batches where its len"), (5, "more than 4")]:
        source = DataLoader(Numbers(9), batch_size=1, sampler=Liar(size))  # type: ignore[arg-type]
        passing = iter(DeviceLoader(source, "cpu"))
        assert [plain(next(passing)) for _ in range(min(size, 4))] == [[k] for k in range(min(size, 4))]
        with pytest.raises(ValueError, match=match):
            next(passing)
        assert list(passing) == []
    assert len(list(DeviceLoader(lambda: Liar(3), "cpu"))) == 3


def test_in_a_forked_child_the_parent_s_pass_is_an_error_and_a_new_one_works() -> None:
    closed = []

    def source() -> Iterator[int]:
        try:
            yield from range(5)
        finally:
            closed.append(os.getpid())

    loader = DeviceLoader(source, "cpu", depth=1)
    passing = iter(loader)
    next(passing)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            passing.close()
            os.write(write, repr((closed.copy(), list(loader))).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 100) == b"([], [0, 1, 2, 3, 4])"
    os.close(read)
    os.close(write)
    assert list(passing) == [1, 2, 3, 4]
    assert closed == [os.getpid()]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_begins_in_the_consumer_s_thread(workers: int) -> None:
    """Where its random numbers are drawn must not be a race with the training loop."""

    class Watched:
        def __iter__(self) -> Iterator[int]:
            began.append(threading.current_thread())
            yield from range(6)

    began: list[threading.Thread] = []
    source = DataLoader(Numbers(6), batch_size=2, sampler=Watched(), num_workers=workers)  # type: ignore[arg-type]
    assert [plain(batch) for batch in DeviceLoader(source, "cpu")] == [[0, 1], [2, 3], [4, 5]]
    assert began == [threading.main_thread()]


def test_the_global_generator_is_drawn_from_as_without_a_loader() -> None:
    def order(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(3)
        source = wrap(DataLoader(Numbers(12), batch_size=2, shuffle=True))
        return [(plain(batch), torch.rand(1).item()) for _ in range(2) for batch in source]

    assert order(lambda source: DeviceLoader(source, "cpu", depth=4)) == order(lambda source: source)


def test_a_stop_iteration_of_the_transform_does_not_end_the_epoch() -> None:
    noise = iter([1, 2])
    loader = DeviceLoader([10, 20, 30, 40], "cpu", transform=lambda batch: batch + next(noise))
    with pytest.raises(RuntimeError, match="transform, or what reads a sample, raised StopIteration"):
        list(loader)
