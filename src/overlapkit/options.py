"""A typo in an option: the error names the near one, and all that are allowed."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def named_options(function: Callable[P, R]) -> Callable[P, R]:
    """Let a public function, or a class's `__init__`, say more of an unknown keyword than Python does.

    Raises:
        TypeError: From the function: a keyword that it does not have.
    """
    name = function.__qualname__.removesuffix(".__init__")
    allowed = [one for one in inspect.signature(function).parameters if one != "self"]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for unknown in kwargs.keys() - allowed:
            near = difflib.get_close_matches(unknown, allowed, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise TypeError(f"{name} has no option {unknown}: {meant}It takes {', '.join(allowed)}")
        return function(*args, **kwargs)

    return checked
