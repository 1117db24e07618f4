"""What DeviceLoader can be told, checked where it is told."""

from typing import Any


def check(depth: Any, pin: Any, reuse_buffers: Any, transform: Any, drop_through: Any, uneven: Any) -> None:
    """Refuse what is no value of an argument.

    Raises:
        TypeError: `transform` is no function.
        ValueError: Another argument is out of range.
    """
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise ValueError(f"depth={depth!r}: the number of batches read ahead is an integer of at least 1")
    if pin is not None and not isinstance(pin, bool):
        raise ValueError(f"pin={pin!r}: use True, False, or None to page-lock where the device is a GPU")
    if transform is not None and not callable(transform):
        raise TypeError(f"transform={transform!r} is not callable: give a function of one batch, or None")
    if uneven not in ("error", "drop", "join", None):
        raise ValueError(
            f"uneven={uneven!r}: use 'error', 'drop' or 'join', or None where ranks are independent"
        )
    for name, value in {"reuse_buffers": reuse_buffers, "drop_through": drop_through}.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r}: use True or False")
