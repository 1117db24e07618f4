"""A warning names the line outside of the package, however many of the package's frames lie between."""

import os
import warnings
from typing import Any

import pytest

import overlapkit
from overlapkit.warn import warn


def within(depth: int) -> Any:
    """A function that calls itself `depth` times in a file of the package, and warns then."""
    path = os.path.join(os.path.dirname(overlapkit.__file__), "input", "there_is_none.py")
    names: dict[str, Any] = {"warn": warn}
    code = "def call(depth):\n    return warn('so it is', FutureWarning) if depth == 0 else call(depth - 1)"
    exec(compile(code, path, "exec"), names)
    return lambda: names["call"](depth)


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_it_is_the_caller_s_line(depth: int) -> None:
    with pytest.warns(FutureWarning, match="so it is") as caught:
        within(depth)()
    assert caught[0].filename == __file__


def test_outside_of_the_package_it_is_the_next_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("here")
    assert (caught[0].filename, caught[0].category) == (__file__, UserWarning)
