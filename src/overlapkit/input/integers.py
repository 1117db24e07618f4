"""What counts as an integer where one is asked for."""

from numbers import Integral
from typing import Any, TypeGuard


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether a value is an int, or numpy's; a bool, a float and text are none. `int()` makes it plain."""
    return isinstance(value, Integral) and not isinstance(value, bool)
