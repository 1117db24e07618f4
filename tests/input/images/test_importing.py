"""DALI's import gives way to other threads, and leaves the interpreter's setting as it was."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from overlapkit.input.images import importing


@pytest.fixture(autouse=True)
def usual() -> Iterator[float]:
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before)


def imported(monkeypatch: pytest.MonkeyPatch, during: Any) -> None:
    monkeypatch.setattr(importing, "require", lambda module, extra: during())


def test_turns_are_short_while_it_imports_and_as_usual_after_it(
    monkeypatch: pytest.MonkeyPatch, usual: float
) -> None:
    imported(monkeypatch, sys.getswitchinterval)
    assert importing.import_dali() == pytest.approx(2e-4)
    assert sys.getswitchinterval() == usual

    def missing() -> None:
        raise ImportError("gone")

    imported(monkeypatch, missing)
    with pytest.raises(ImportError, match="gone"):
        importing.import_dali()
    assert sys.getswitchinterval() == usual


@pytest.mark.parametrize("theirs", [1e-5, 1e-3], ids=["shorter before", "set meanwhile"])
def test_what_others_set_stays(theirs: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if theirs < 2e-4:
        sys.setswitchinterval(theirs)
        imported(monkeypatch, sys.getswitchinterval)
        assert importing.import_dali() == pytest.approx(theirs)
    else:
        imported(monkeypatch, lambda: sys.setswitchinterval(theirs))
        importing.import_dali()
    assert sys.getswitchinterval() == pytest.approx(theirs)


def test_two_at_once_leave_the_usual(monkeypatch: pytest.MonkeyPatch, usual: float) -> None:
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
    assert sys.getswitchinterval() == usual
