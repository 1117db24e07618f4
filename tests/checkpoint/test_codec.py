"""Typed JSON: every value comes back equal, of the same type, through real JSON text."""

import argparse
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import make_dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapkit.checkpoint.codec import decode, encode, tensor_names

VALUES = [
    None,
    True,
    0,
    -1,
    2**200,
    1.5,
    5e-324,
    float("inf"),
    -float("inf"),
    complex(1, -0.0),
    "",
    'ü\n\x00/"$\ud800',
    b"",
    bytes(range(256)),
    bytearray(b"ab"),
    [],
    [1, [2, []]],
    (),
    (1, (2, [3])),
    {},
    {"$": 1, "v": 2},
    {1: "a", "1": "b", (1, 2): "c", None: "d", True and 2.5: "e"},
    set(),
    {1, "a", (2, 3)},
    frozenset({1, 2}),
    Counter({3: 2, 9: 1}),
    OrderedDict([("b", 1), ("a", 2)]),
    deque([1, 2], maxlen=3),
    deque([1, 2]),
    torch.float8_e4m3fn,
    torch.device("cuda", 3),
    torch.Size([2, 3]),
    np.float32(0.1),
    np.int64(-5),
    np.bool_(True),
    np.complex128(1 + 2j),
    np.str_("x"),
    np.datetime64("2024-01-02T03:04"),
]


def through_json(value, tensors=None):
    kept = {} if tensors is None else tensors

    def keep(name, tensor):
        kept[name] = tensor
        return name

    text = json.dumps(encode(value, "x", keep), allow_nan=False)
    return decode(json.loads(text), kept.__getitem__)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_exactly(value):
    back = through_json(value)
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)  # -0.0, numpy's types, the order of keys


def test_nan_comes_back():
    assert math.isnan(through_json(float("nan")))
    assert math.isnan(through_json({"a": (np.float32("nan"),)})["a"][0])


def test_int_keys_do_not_become_text():
    back = through_json({1: {2: 3}})
    assert list(back) == [1]
    assert list(back[1]) == [2]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<i2").reshape(2, 3),
        np.arange(6.0).reshape(2, 3).T,
        np.zeros((0, 3), dtype=np.complex64),
        np.array(7, dtype=np.uint32),
        np.array(["ab", "c"]),
        np.arange(4, dtype=">f8"),
    ],
    ids=repr,
)
def test_numpy_arrays_come_back_and_can_be_written_to(array):
    back = through_json([array])[0]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert (back == array).all()
    assert back.flags.writeable


def test_tensors_are_handed_over_under_unique_names():
    kept = {}
    value = {"a/b": torch.ones(1), "a": {"b": torch.zeros(2)}, "c": [(torch.arange(3),)]}
    back = through_json(value, kept)
    assert len(kept) == 3
    assert torch.equal(back["a"]["b"], torch.zeros(2))
    assert torch.equal(back["a/b"], torch.ones(1))
    assert set(tensor_names(encode(value, "x", lambda name, _: name))) == set(kept)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [object()]}, "x/a/0"),
        ({"f": lambda: 0}, "x/f"),
        ({"d": defaultdict(list)}, "x/d"),
        ([namedtuple("P", "a")(1)], "x/0"),
        (np.array([object()]), "x"),
        (np.zeros(2, dtype=[("a", "i4")]), "x"),
        ({1: {2: Exception("e")}}, "x/1/2"),
        ({"t": type("D", (dict,), {})()}, "x/t"),
    ],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_what_cannot_be_kept_is_named(value, where):
    with pytest.raises(TypeError, match=f"state '{where}' is a "):
        through_json(value)


def test_a_value_that_holds_itself_is_an_error():
    loop = []
    loop.append(loop)
    with pytest.raises(ValueError, match="refers to itself"):
        through_json({"a": loop})


@pytest.mark.parametrize("text", ['{"$": "os.system", "v": "ls"}', '{"$": "dtype", "v": "load"}'])
def test_unknown_tags_are_refused(text):
    with pytest.raises(ValueError, match="no type that this version"):
        decode(json.loads(text), lambda name: None)


def test_object_arrays_are_refused():
    with pytest.raises(ValueError, match="dtype"):
        decode({"$": "ndarray", "dtype": "|O", "shape": [1], "v": "AAAAAAAAAAA="}, lambda name: None)


keys = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(values)
def test_any_nesting_comes_back(value):
    back = through_json(value)
    assert back == value
    assert repr(back) == repr(value)


@pytest.mark.parametrize(
    ("value", "instead"),
    [
        (Path("x"), "str(...)"),
        (argparse.Namespace(lr=1.0), "vars(...)"),
        (make_dataclass("D", ["lr"])(1.0), "dataclasses.asdict(...)"),
        (Enum("E", "A")(1), "its .value"),
    ],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_what_makes_a_plain_value_is_told(value, instead):
    with pytest.raises(TypeError) as caught:
        encode({"a": value}, "x", lambda name, _: name)
    assert f"give plain values (here {instead}), tensors" in str(caught.value)
