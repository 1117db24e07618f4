"""Walking a batch of any nesting and rebuilding it with the same types.

A container in which nothing was replaced is handed on as the same object, so what is not understood
here (strings, numpy arrays, sets, plain objects) is never touched.
"""

import copy
import dataclasses
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

ATOMS = frozenset({str, bytes, int, float, bool, complex, type(None)})
"""What holds nothing and never changes."""


def moves_itself(value: Any) -> bool:
    """Whether an object brings its own `.to` and `.pin_memory`, as torch's custom batch types do.

    `.to` alone is not enough: physical quantities and points in time have one too.
    """
    try:
        return callable(getattr(value, "to", None)) and callable(getattr(value, "pin_memory", None))
    except Exception:  # a dict that looks attributes up among its keys may raise a KeyError
        return False


def map_leaves(batch: Any, fn: Callable[[Any], Any]) -> Any:
    """Replace each tensor, and each object that moves itself, by what `fn` makes of it.

    Followed are lists, tuples, named tuples, deques, mappings and dataclasses (frozen ones too), with
    their subclasses. Nothing in `batch` is changed. What stands in it twice is asked for once: it is one
    object afterwards, too.

    Raises:
        TypeError: A container cannot be rebuilt with its own type.
    """
    made: dict[int, tuple[Any, Any]] = {}  # with the leaf itself: a mapping may make it for this look alone

    def once(leaf: Any) -> Any:
        if id(leaf) not in made:
            made[id(leaf)] = leaf, fn(leaf)
        return made[id(leaf)][1]

    return _mapped(batch, once)


def _mapped(batch: Any, fn: Callable[[Any], Any]) -> Any:
    kind = type(batch)
    if kind in ATOMS:
        return batch
    if isinstance(batch, torch.Tensor) or moves_itself(batch):
        return fn(batch)
    if isinstance(batch, list | tuple | deque | UserList):
        items = [_mapped(item, fn) for item in batch]
        return batch if _same(items, batch) else _rebuild(_with_items, batch, items)
    if isinstance(batch, Mapping):
        pairs = {key: _mapped(item, fn) for key, item in batch.items()}
        return batch if _same(pairs.values(), batch.values()) else _rebuild(_with_pairs, batch, pairs)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch)]
        old = {name: getattr(batch, name) for name in names if hasattr(batch, name)}  # init=False: not yet
        new = {name: _mapped(value, fn) for name, value in old.items()}
        return batch if _same(new.values(), old.values()) else _rebuild(_with_fields, batch, new)
    return batch


def _same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def _rebuild(how: Callable[[Any, Any], Any], old: Any, content: Any) -> Any:
    try:
        return how(old, content)
    except Exception as error:
        raise TypeError(
            f"a batch holds a {type(old).__module__}.{type(old).__qualname__}, which cannot be rebuilt "
            f"around the tensors on the device ({error}): give it .to(device) and .pin_memory(), or "
            "let the source yield a dict, a tuple or a dataclass"
        ) from error


def _with_items(old: Any, items: list[Any]) -> Any:
    kind = type(old)
    if isinstance(old, tuple):
        made = kind._make(items) if hasattr(kind, "_fields") else kind(items)
        if attributes := getattr(old, "__dict__", {}):
            new_of = {id(item): new for item, new in zip(old, items, strict=True)}  # noted twice, as below
            vars(made).update({name: new_of.get(id(item), item) for name, item in attributes.items()})
        return made
    if kind is list:
        return items
    new = copy.copy(old)  # a subclass keeps its attributes
    for index, item in enumerate(items):
        new[index] = item
    return new


def _with_pairs(old: Any, pairs: dict[Any, Any]) -> Any:
    if not isinstance(old, dict | UserDict):
        return type(old)(pairs)  # a shallow copy of an unknown mapping may share what it holds
    new: Any = copy.copy(old)
    for key, value in pairs.items():
        new[key] = value
    attributes = getattr(old, "__dict__", {})
    if attributes is old:  # so that keys are attributes, too
        new.__dict__ = new
        return new
    for name in attributes.keys() & pairs.keys():  # others note items twice
        if attributes[name] is old[name]:
            vars(new)[name] = new[name]
    return new


def _with_fields(old: Any, values: dict[str, Any]) -> Any:
    new = copy.copy(old)  # not replace(): __init__ and __post_init__ have run for this batch already
    for name, value in values.items():
        object.__setattr__(new, name, value)  # frozen ones too
    return new
