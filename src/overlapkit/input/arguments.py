"""What DeviceLoader can be told, checked where it is told."""

from typing import Any

from overlapkit.input.checks import as_count, check_choice


def check(depth: Any, pin: Any, reuse_buffers: Any, transform: Any, drop_through: Any, uneven: Any) -> None:
    """Refuse what is no value of an argument.

    Raises:
        TypeError: `transform` is no function.
        ValueError: Another argument is out of range.
    """
    as_count("depth", depth)
    if pin is not None and not isinstance(pin, bool):
        raise ValueError(f"pin={pin!r}: use True, False, or None to page-lock where the device is a GPU")
    if transform is not None and not callable(transform):
        raise TypeError(f"transform={transform!r} is not callable: give a function of one batch, or None")
    if not isinstance(uneven, str | None) or uneven not in ("error", "drop", "join", None):
        raise ValueError(
            f"uneven={uneven!r}: use 'error', 'drop' or 'join', or None where ranks are independent"
        )
    check_choice("reuse_buffers", reuse_buffers)
    check_choice("drop_through", drop_through)
