"""What plan is given is checked before anything is computed."""

import math


def check_amount(name: str, value: object, *, above: float | None = None) -> None:
    """It is a finite number of at least 0, or above a bound.

    Raises:
        TypeError: It is no number.
        ValueError: It is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: give a number")
    if not math.isfinite(value) or (value < 0 if above is None else value <= above):
        allowed = "0 or more" if above is None else f"above {above:g}"
        raise ValueError(f"{name}={value!r}: give a finite number, {allowed}")


def check_ranks(name: str, value: object, least: int = 1) -> None:
    """It is a number of ranks.

    Raises:
        TypeError: It is no int.
        ValueError: It is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: give an int")
    if value < least:
        raise ValueError(f"{name}={value}: give at least {least}")
