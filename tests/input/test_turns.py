"""Turns at the interpreter are short while somebody wants them so, and as usual after it."""

import gc
import os
import sys
from collections.abc import Iterator

import pytest

from overlapkit.input.loader import DeviceLoader
from overlapkit.input.turns import ShortTurns


@pytest.fixture(autouse=True)
def usual() -> Iterator[float]:
    gc.collect()  # passes that other tests have left
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-3)
    yield sys.getswitchinterval()
    sys.setswitchinterval(before)


def test_the_shortest_that_is_wanted_until_all_have_ended(usual: float) -> None:
    one, two, three = ShortTurns(1e-3), ShortTurns(2e-4), ShortTurns(1e-3)
    assert sys.getswitchinterval() == pytest.approx(2e-4)
    one.end()
    assert sys.getswitchinterval() == pytest.approx(2e-4)
    two.end()
    assert sys.getswitchinterval() == pytest.approx(1e-3)
    three.end()
    assert sys.getswitchinterval() == usual


@pytest.mark.parametrize("theirs", [1e-5, 2e-3], ids=["shorter", "longer"])
def test_what_others_set_stays(theirs: float) -> None:
    turns = ShortTurns(1e-3)
    sys.setswitchinterval(theirs)
    second = ShortTurns(5e-4)
    assert sys.getswitchinterval() == pytest.approx(theirs)
    turns.end()
    second.end()
    assert sys.getswitchinterval() == pytest.approx(theirs)


def test_what_is_shorter_already_stays() -> None:
    sys.setswitchinterval(1e-5)
    turns = ShortTurns(1e-3)
    assert sys.getswitchinterval() == pytest.approx(1e-5)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(1e-5)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_the_usual(usual: float) -> None:
    turns = ShortTurns(1e-3)
    if (child := os.fork()) == 0:
        fine = sys.getswitchinterval() == usual
        own = ShortTurns(2e-4)
        own.end()
        os._exit(0 if fine and sys.getswitchinterval() == usual else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sys.getswitchinterval() == pytest.approx(1e-3)
    turns.end()


@pytest.mark.parametrize("end", ["through", "break", "close", "error"])
def test_while_a_reader_works(end: str, usual: float) -> None:
    def source() -> Iterator[int]:
        yield from range(10)
        if end == "error":
            raise KeyError("damaged")

    loader = DeviceLoader(source, "cpu")
    iterator = iter(loader)
    assert next(iterator) == 0
    assert sys.getswitchinterval() == pytest.approx(1e-3)
    if end == "through":
        assert list(iterator) == list(range(1, 10))
    elif end == "error":
        with pytest.raises(KeyError, match="damaged"):
            list(iterator)
    elif end == "close":
        loader.close()
    del iterator  # which closes it
    gc.collect()
    assert sys.getswitchinterval() == usual
