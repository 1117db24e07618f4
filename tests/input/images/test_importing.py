"""DALI's import gives way to other threads, and leaves the interpreter's settings as they were."""

import gc
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from overlapkit.input.images import importing


@pytest.fixture(autouse=True)
def usual() -> Iterator[tuple[float, tuple[int, ...]]]:
    gc.collect()  # passes that other tests have left
    before, often = sys.getswitchinterval(), gc.get_threshold()
    yield before, often
    sys.setswitchinterval(before)
    gc.set_threshold(*often)


def imported(monkeypatch: pytest.MonkeyPatch, during: Any) -> None:
    monkeypatch.setattr(importing, "require", lambda module, extra: during())


def settings() -> tuple[float, tuple[int, ...]]:
    return sys.getswitchinterval(), gc.get_threshold()


def test_turns_are_short_while_it_imports_and_as_usual_after_it(
    monkeypatch: pytest.MonkeyPatch, usual: Any
) -> None:
    imported(monkeypatch, sys.getswitchinterval)
    assert importing.import_dali() == pytest.approx(2e-4)
    assert settings() == usual

    def missing() -> None:
        raise ImportError("gone")

    imported(monkeypatch, missing)
    with pytest.raises(ImportError, match="gone"):
        importing.import_dali()
    assert settings() == usual


def test_two_at_once_leave_the_usual(monkeypatch: pytest.MonkeyPatch, usual: Any) -> None:
    inside, go = threading.Event(), threading.Event()

    def first() -> None:
        inside.set()
        assert go.wait(30)

    imported(monkeypatch, first)
    one = threading.Thread(target=importing.import_dali)
    one.start()
    assert inside.wait(30)
    other = threading.Thread(target=importing.import_dali)
    other.start()
    other.join(0.2)
    assert other.is_alive()
    go.set()
    one.join(30)
    other.join(30)
    assert settings() == usual


def test_nothing_is_collected_while_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = gc.get_threshold()
    collected: list[str] = []
    gc.callbacks.append(lambda phase, info: collected.append(phase))
    try:
        imported(monkeypatch, lambda: [[] for _ in range(10 * usual[0])] and len(collected))
        assert importing.import_dali() == 0
    finally:
        gc.callbacks.pop()
    assert gc.get_threshold() == usual


@pytest.mark.parametrize("theirs", [0, 50])
def test_the_threshold_that_others_set_stays(theirs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    imported(monkeypatch, lambda: gc.set_threshold(theirs, 7, 7))
    importing.import_dali()
    assert gc.get_threshold() == (theirs, 7, 7)
    imported(monkeypatch, gc.get_threshold)
    assert (importing.import_dali()[0] == 0) is (theirs == 0)
    assert gc.get_threshold() == (theirs, 7, 7)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_is_forked_meanwhile_collects_and_imports(
    monkeypatch: pytest.MonkeyPatch, usual: Any
) -> None:
    def forked() -> int:
        if (child := os.fork()) == 0:
            monkeypatch.setattr(importing, "require", lambda module, extra: None)
            fine = gc.get_threshold() == usual[1]
            importing.import_dali()
            os._exit(0 if fine and gc.get_threshold() == usual[1] else 1)
        return os.waitpid(child, 0)[1]

    imported(monkeypatch, forked)
    assert importing.import_dali() == 0
