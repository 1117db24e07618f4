"""A source that draws from the loop's generators is told so: once, and only such a source."""

import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from overlapkit.input import DeviceLoader
from overlapkit.input.draws import DrawWatch
from overlapkit.lane import Lane, Ticket
from tests.input.sources import Augmented, Careless, shuffled

DRAWS: dict[str, Callable[[], Any]] = {
    "torch's global generator": lambda: torch.rand(2),
    "random": random.random,
    "numpy.random": lambda: np.random.rand(2),
}


def drawing(draw: Callable[[], Any]) -> Callable[[], Iterator[int]]:
    def source() -> Iterator[int]:
        for k in range(6):
            time.sleep(0.005)  # the loop has come to its wait by then
            draw()
            yield k

    return source


@pytest.mark.parametrize("name", DRAWS)
def test_each_generator_is_named_once_a_loader(name: str) -> None:
    loader = DeviceLoader(drawing(DRAWS[name]), "cpu")
    with pytest.warns(UserWarning, match=f"draws from {name} in the reader's thread.*SampleSeed") as caught:
        got = [list(loader) for _ in range(3)]
    assert got == [list(range(6))] * 3
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.filterwarnings("error")
def test_numpy_s_global_generator_may_be_of_any_kind() -> None:
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        assert list(DeviceLoader(drawing(lambda: None), "cpu")) == list(range(6))
        with pytest.raises(UserWarning, match="draws from numpy.random"):
            list(DeviceLoader(drawing(lambda: np.random.rand(2)), "cpu"))
    finally:
        np.random.set_bit_generator(usual)


def test_a_transform_counts_too() -> None:
    loader = DeviceLoader(drawing(lambda: None), "cpu", transform=lambda batch: batch + 0 * random.random())
    with pytest.warns(UserWarning, match=r"\(or transform\) draws from random"):
        list(loader)


def test_an_error_out_of_the_warning_loses_no_batch() -> None:
    passing = iter(DeviceLoader(drawing(random.random), "cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="random"):
            next(passing)
    assert list(passing) == list(range(6))


@pytest.mark.parametrize(
    "source",
    [
        drawing(lambda: None),
        shuffled(12, 2),
        DataLoader(Augmented(12), 2, shuffle=True),
        DataLoader(Careless(12), 2, num_workers=1),
        [1, 2, 3],
    ],
    ids=["quiet", "shuffled", "own generators", "in workers", "list"],
)
def test_what_the_loop_draws_is_not_taken_for_the_source_s(source: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            passing = iter(DeviceLoader(source, "cpu"))
            for draw in DRAWS.values():
                draw()
            for _ in passing:
                for draw in DRAWS.values():
                    draw()


@pytest.mark.parametrize("name", DRAWS)
def test_a_source_that_is_always_ahead_of_the_loop_is_seen_too(name: str) -> None:
    """All that was read ahead is there, whenever the loop asks: it never waits for a draw."""

    def source() -> Iterator[int]:
        for k in range(12):
            DRAWS[name]()
            drawn.append(k)
            yield k

    def consume() -> list[int]:
        drawn.clear()
        got: list[int] = []
        passing = iter(loader)
        while len(got) < 12:
            while len(drawn) < min(12, len(got) + 3):
                time.sleep(0.001)
            time.sleep(0.01)  # from the source's last draw to the batch's arrival
            got.append(next(passing))
            DRAWS[name]()
        assert list(passing) == []
        return got

    drawn: list[int] = []
    loader = DeviceLoader(source, "cpu", depth=3)
    with pytest.warns(UserWarning, match=f"draws from {name} in") as caught:
        assert consume() + consume() == 2 * list(range(12))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert [span.exposed for span in loader.timings() if span.name == "watch"] == [True]


def test_a_source_that_waits_for_the_loop_is_not_waited_for() -> None:
    """It reads the next batch when the loop has had this one; the look at its draws gives up soon."""
    had = threading.Semaphore(2)

    def source() -> Iterator[int]:
        for k in range(6):
            assert had.acquire(timeout=10)
            yield k

    for _ in DeviceLoader(source, "cpu", depth=2):
        time.sleep(0.005)
        had.release()


def test_a_look_may_be_ended_by_a_pass_in_another_thread() -> None:
    """Two loops over one loader, each in a thread of its own, share the watch."""
    watch = DrawWatch()

    class Pull(Ticket[None]):
        def wait(self, timeout: float | None = None) -> None:
            watch.end()  # the other thread's, while this one waits

    watch.begin(look=True)
    watch.end(Pull("late"))
    assert not watch.looking


def test_a_pull_that_has_just_begun_is_given_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlapkit.input.draws.PATIENCE_S", 10.0)
    watch = DrawWatch()
    with Lane("input") as lane:
        lane.delay_s = 0.05
        watch.begin(look=True)
        watch.end(lane.submit(random.random))
    with pytest.warns(match="draws from random"):
        watch.tell()
