import collections
import dataclasses
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from overlapkit.input.nesting import map_leaves


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Sample:
    x: Any
    name: str = "a"
    derived: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.derived = ("made once", id(self))


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any = None


class Encoding(collections.UserDict):  # type: ignore[type-arg]  # as transformers' BatchEncoding
    def __init__(self, data: Any, extra: str) -> None:
        super().__init__(data)
        self.extra = extra

    def to(self, device: Any) -> "Encoding":  # .to alone does not make it move itself
        raise AssertionError


class NamedList(list):  # type: ignore[type-arg]
    pass


class ReadOnly(Mapping):  # type: ignore[type-arg]
    def __init__(self, data: Any) -> None:
        self._data = dict(data)

    def __getitem__(self, key: Any) -> Any:
        return self._data[key]

    def __iter__(self) -> Any:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


class Stubborn(ReadOnly):
    def __init__(self, data: Any, needed: Any) -> None:
        super().__init__(data)


class Attributes(dict):  # type: ignore[type-arg]
    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Noted(dict):  # type: ignore[type-arg]
    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.a = items["a"]
        self.other = "kept"


class ByKey(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__  # raises a KeyError, where Python expects an AttributeError


class NamedTriple(Pair):
    note: str


class NotedTuple(tuple):  # type: ignore[type-arg]
    def __new__(cls, items: Any) -> "NotedTuple":
        made = super().__new__(cls, items)
        made.first = made[0]  # type: ignore[attr-defined]
        return made


@dataclasses.dataclass
class Unfinished:
    x: Any
    later: Any = dataclasses.field(init=False)


class Moving:
    def __init__(self, value: int) -> None:
        self.value = value

    def to(self, device: Any) -> "Moving":
        return self

    def pin_memory(self) -> "Moving":
        return self


def double(leaf: Any) -> Any:
    return Moving(leaf.value * 2) if isinstance(leaf, Moving) else leaf * 2


T = torch.tensor([1, 2])
CONTAINERS = {
    "list": ([T, 5], lambda b: b[0]),
    "list subclass": (NamedList([T, 5]), lambda b: b[0]),
    "tuple": ((5, T), lambda b: b[1]),
    "namedtuple": (Pair(5, T), lambda b: b.y),
    "tuple that notes an item twice": (NotedTuple([T, 5]), lambda b: b.first),
    "dict": ({"a": T, 1: "s"}, lambda b: b["a"]),
    "OrderedDict": (collections.OrderedDict(b=1, a=T), lambda b: b["a"]),
    "defaultdict": (collections.defaultdict(list, a=T), lambda b: b["a"]),
    "deque": (collections.deque([T, 1], maxlen=7), lambda b: b[0]),
    "UserDict": (Encoding({"a": T, "s": "x"}, "kept"), lambda b: b["a"]),
    "UserList": (collections.UserList([1, T]), lambda b: b[1]),
    "dataclass": (Sample(T), lambda b: b.x),
    "frozen dataclass with slots": (Frozen(None, T), lambda b: b.y),
    "dataclass with a field that nobody set": (Unfinished(T), lambda b: b.x),
    "dict whose keys are attributes": (Attributes(a=T), lambda b: b.a),
    "dict that notes an item twice": (Noted(a=T), lambda b: b.a),
    "dict that looks attributes up": (ByKey(a=T), lambda b: b.a),
    "mapping": (ReadOnly({"a": T}), lambda b: b["a"]),
    "mapping proxy": (types.MappingProxyType({"a": T}), lambda b: b["a"]),
    "nested": ({"a": [Pair(Frozen((T,)), None)]}, lambda b: b["a"][0].x.x[0]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_keeps_its_type_and_the_original_is_untouched(name: str) -> None:
    batch, get = CONTAINERS[name]
    made = map_leaves(batch, double)
    assert type(made) is type(batch)
    assert get(made).tolist() == [2, 4]
    assert get(batch) is T
    assert T.tolist() == [1, 2]


def test_what_stands_beside_tensors_is_kept() -> None:
    sub = NamedList([T])
    sub.note = "n"  # type: ignore[attr-defined]
    assert map_leaves(sub, double).note == "n"
    assert map_leaves(Encoding({"a": T}, "kept"), double).extra == "kept"
    assert map_leaves(collections.defaultdict(list, a=T), double)["new"] == []
    assert map_leaves(collections.deque([T], maxlen=7), double).maxlen == 7
    assert list(map_leaves(collections.OrderedDict(b=T, a=T), double)) == ["b", "a"]
    pair = NamedTriple(T, 1)
    pair.note = "n"
    assert map_leaves(pair, double).note == "n"
    assert map_leaves(Noted(a=T), double).other == "kept"
    made = map_leaves(Attributes(a=T), double)
    made.b = 1
    assert made["b"] == 1
    assert made["a"] is made.a
    sample = Sample(T)
    made = map_leaves(sample, double)
    assert made.derived == ("made once", id(sample))  # __post_init__ did not run again


@pytest.mark.parametrize(
    "batch",
    [
        "text",
        b"bytes",
        bytearray(b"xy"),
        None,
        3,
        np.arange(3),
        {"a": ["s", None, {1, 2}], "n": np.zeros(2)},
        torch.Size([1, 2]),
        [],
        {},
        (),
        range(5),
        object(),
        Sample,
        Stubborn({"a": 1}, None),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_without_a_leaf_the_same_object_comes_back(batch: Any) -> None:
    assert map_leaves(batch, double) is batch


def test_objects_that_move_themselves_are_leaves() -> None:
    assert map_leaves([Moving(4)], double)[0].value == 8


def test_a_container_that_cannot_be_rebuilt_is_named() -> None:
    with pytest.raises(TypeError, match=r"Stubborn.*give it \.to"):
        map_leaves([Stubborn({"a": T}, None)], double)


def test_equal_but_replaced_leaves_count_as_replaced() -> None:
    """Tensors compare elementwise: telling old from new must go by identity."""
    made = map_leaves([T], lambda leaf: leaf.clone())
    assert made[0] is not T


def test_what_stands_in_a_batch_twice_is_one_object_afterwards() -> None:
    other, moving = T.clone(), Moving(1)
    asked: list[Any] = []

    def ask(leaf: Any) -> Any:
        asked.append(leaf)
        return double(leaf)

    made = map_leaves([T, {"a": (T, other)}, Sample(T), moving, [moving]], ask)
    assert made[0] is made[1]["a"][0] is made[2].x
    assert made[1]["a"][1] is not made[0]
    assert made[3] is made[4][0]
    assert [id(one) for one in asked] == [id(one) for one in (T, other, moving)]


def test_what_a_mapping_makes_for_a_look_is_not_taken_for_another() -> None:
    class Fresh(ReadOnly):
        def __getitem__(self, key: Any) -> Any:
            return torch.full((2,), self._data[key])

    made = map_leaves(Fresh({k: k for k in range(50)}), lambda leaf: leaf * 2)
    assert [made._data[k].tolist() for k in range(50)] == [[2 * k, 2 * k] for k in range(50)]
