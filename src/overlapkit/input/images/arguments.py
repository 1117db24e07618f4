"""What train_loader and eval_loader can be told, checked where it is told."""

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch

_DTYPES = torch.float32, torch.float16, torch.bfloat16


def check_output(dtype: Any, layout: Any) -> None:
    """Refuse what cannot come out.

    Raises:
        ValueError: It cannot.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r}: use torch.float32, torch.float16 or torch.bfloat16")
    if layout not in ("NCHW", "NHWC"):
        raise ValueError(f"layout={layout!r}: use 'NCHW' or 'NHWC'")


def check_crop(scale: Any, ratio: Any, flip: Any) -> None:
    """Refuse what is no range, and no probability.

    Raises:
        ValueError: It is not.
    """
    for name, value, limit in (("scale", scale, 1.0), ("ratio", ratio, math.inf)):
        pair = isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_number, value))
        if not pair or not 0 < value[0] <= value[1] <= limit:
            bound = " <= 1" if limit == 1 else ""
            raise ValueError(f"{name}={value!r}: give (low, high) with 0 < low <= high{bound}")
    if not _is_number(flip) or not 0 <= flip <= 1:
        raise ValueError(f"flip={flip!r}: a probability lies between 0 and 1")


def per_channel(name: str, value: Any) -> tuple[float, float, float]:
    """One number for each channel.

    Raises:
        ValueError: It is something else.
    """
    numbers = tuple(value) if isinstance(value, Iterable) else ()
    if len(numbers) != 3 or not all(map(_is_number, numbers)):
        raise ValueError(f"{name}={value!r}: give one number for each of red, green and blue")
    if name == "std" and min(numbers) <= 0:
        raise ValueError(f"std={value!r}: pixels are divided by it, so it is above 0")
    red, green, blue = map(float, numbers)
    return red, green, blue


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
