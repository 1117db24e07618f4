"""What an object holds: seeds and generators in a dataset's transforms, tensors in a batch of unknown type.

Attributes are looked at, never asked for: no property of the user's runs, and nothing is called.
"""

import functools
import math
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import torch

from overlapkit.input.nesting import ATOMS

ITEMS = 4096
"""Items of one list that are looked at: more of them are samples, which hold nothing that is sought."""

_OBJECTS = 20_000
"""Objects that are looked at, the nearest first, in some 20 ms: a dataset may hold whatever it likes."""

_CLOSED = type, types.ModuleType, np.ndarray, np.generic, torch.dtype, torch.device, torch.Size


def reachable(*roots: Any, items: int | None = ITEMS) -> Iterator[Any]:
    """Roots, what they hold in attributes, containers, partials and closures, and so on: each object once.

    Without `items` there is no bound on objects either: what of a batch is left out may be overwritten.
    """
    most = math.inf if items is None else _OBJECTS
    known: dict[int, Any] = {}  # the objects, too, so that no number is given to another meanwhile
    waiting = deque(roots)
    while waiting and len(known) < most:
        value = waiting.popleft()
        if type(value) in ATOMS or id(value) in known or isinstance(value, _CLOSED):
            continue
        known[id(value)] = value
        yield value
        waiting.extend(_held(value, items))


def _held(value: Any, items: int | None) -> Iterable[Any]:
    kind: Any = type(value)
    if kind is tuple or kind is list:  # a dataset has thousands of these, and they have no attributes
        return islice(value, items)
    if kind is dict:
        return list(islice(value.values(), items))
    if kind is torch.Tensor:
        return ()
    if isinstance(value, types.FunctionType):
        return [item for cell in value.__closure__ or () for item in _content(cell)]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    held: list[Any] = []
    with suppress(AttributeError):
        held += object.__getattribute__(value, "__dict__").values()
    for slot in _slots(kind):
        with suppress(AttributeError):  # nothing was put there
            held.append(slot.__get__(value))
    if isinstance(value, dict):
        held += islice(dict.values(value), items)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        held += islice(value, items)
    return held


def _content(cell: types.CellType) -> Iterator[Any]:
    with suppress(ValueError):  # the variable has no value yet
        yield cell.cell_contents


@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[Any, ...]:
    owners = [vars(owner) for owner in kind.__mro__ if "__slots__" in vars(owner)]
    return tuple(
        member for names in owners for member in names.values() if type(member) is types.MemberDescriptorType
    )
