"""What counts as an integer, a choice, a rank: arguments of all sources, checked where they are told."""

from numbers import Integral
from typing import Any, TypeGuard

from overlapkit.device import rank_and_world


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether a value is an int, or numpy's; a bool, a float and text are none. `int()` makes it plain."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def as_count(name: str, value: Any) -> int:
    """A number of things, at least 1.

    Raises:
        ValueError: It is none.
    """
    if not is_integer(value) or value < 1:
        raise ValueError(f"{name}={value!r}: give an integer of at least 1")
    return int(value)


def as_seed(seed: Any) -> int:
    """An integer.

    Raises:
        ValueError: It is none.
    """
    if not is_integer(seed):
        raise ValueError(f"seed={seed!r}: give an integer, the same on every rank")
    return int(seed)


def as_integer(name: str, value: Any) -> int:
    """Any integer.

    Raises:
        ValueError: It is none.
    """
    if not is_integer(value):
        raise ValueError(f"{name}={value!r}: give an integer")
    return int(value)


def as_epoch(epoch: Any) -> int:
    """An integer from 0 on.

    Raises:
        ValueError: It is none.
    """
    if not is_integer(epoch) or epoch < 0:
        raise ValueError(f"epoch={epoch!r}: an epoch is an integer from 0 on")
    return int(epoch)


def check_choice(name: str, value: Any) -> None:
    """Refuse what is neither True nor False.

    Raises:
        ValueError: It is something else.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: use True or False")


def as_rank(rank: Any, world: Any) -> tuple[int, int]:
    """A rank, and how many there are: those given, or the process group's where neither is.

    Raises:
        ValueError: They are none.
        RuntimeError: Neither is given, and WORLD_SIZE is set but there is no process group.
    """
    if rank is None and world is None:
        return rank_and_world()
    if not is_integer(rank) or not is_integer(world) or not 0 <= rank < world:
        raise ValueError(
            f"rank={rank!r}, world_size={world!r}: give both, 0 <= rank < world_size, or neither to take the "
            "process group's"
        )
    return int(rank), int(world)
