"""Keys, paths and trees, against torch.distributed.checkpoint's own flattening."""

from collections import Counter, OrderedDict

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from overlapkit.checkpoint.dcp.flatten import flatten, name_of, nest

T = [torch.full((2,), float(i)) for i in range(6)]

TENSORS_ONLY = {
    "flat": {"a": T[0], "b.c": T[1]},
    "nested": {"a": {"b": {"c": T[0]}, "d": T[1]}, "e": T[2]},
    "lists": {"a": [T[0], {"b": T[1]}, [T[2], [T[3]]]], "c": T[4]},
    "number keys": {"state": {0: {"exp_avg": T[0]}, 1: {"exp_avg": T[1]}}},
    "other mappings": OrderedDict(a=OrderedDict(b=T[0]), c=T[1]),
    "dots": {"a.b": {"c": T[0]}, "a": {"b": {"d": T[1]}}},
    "nothing": {},
}


@pytest.mark.parametrize("case", TENSORS_ONLY)
def test_tensors_have_the_keys_and_paths_that_dcp_gives_them(case):
    ours = flatten(TENSORS_ONLY[case])
    values, paths = flatten_state_dict(TENSORS_ONLY[case])
    assert list(ours.values) == list(values)
    assert all(ours.values[key] is values[key] for key in values)
    assert ours.paths == paths


@pytest.mark.parametrize("case", TENSORS_ONLY)
def test_a_tree_is_put_together_again(case):
    flat = flatten(TENSORS_ONLY[case])
    assert flatten(nest(flat.values, flat.paths)).paths == flat.paths
    assert str(nest(flat.values, flat.paths)) == str(_with_text_keys(TENSORS_ONLY[case]))


def _with_text_keys(value):
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list) else value


def test_what_holds_no_tensor_is_one_value():
    milestones = Counter({4: 1})
    state = {
        "scheduler": {"milestones": milestones, "empty": {}, "lrs": [0.1, {"x": (1, 2)}]},
        "mixed": {"t": T[0], "rest": {3: "three"}, "none": None, "list": [T[1], {"k": 1}]},
    }
    flat = flatten(state)
    assert {key: value for key, value in flat.values.items() if not isinstance(value, torch.Tensor)} == {
        "scheduler": state["scheduler"],
        "mixed.rest": {3: "three"},
        "mixed.none": None,
        "mixed.list.1": {"k": 1},
    }
    assert flat.values["scheduler"]["milestones"] is milestones
    nested = nest(flat.values, flat.paths)
    assert nested["mixed"]["list"][0] is T[1]
    assert nested["mixed"]["rest"] == {3: "three"}
    assert list(nested) == ["scheduler", "mixed"]


def test_a_value_is_replaced_where_it_stands():
    state = {"a": {"t": T[0], 7: "old"}, "l": [T[1], "old"]}
    flat = flatten(state)
    flat.put("a.7", "new")
    flat.put("l.1", "new")
    assert state["a"][7] == "new"
    assert "7" not in state["a"]
    assert state["l"][1] == "new"


def test_the_same_key_twice_is_an_error():
    with pytest.raises(ValueError, match=r"'a\.b' twice, at \('a\.b',\) and \('a', 'b'\)"):
        flatten({"a.b": T[0], "a": {"b": T[1]}})


@pytest.mark.parametrize(
    ("path", "name"),
    [(("a",), "a"), (("m", "0.weight"), "m/0.weight"), (("a/b", "c%", 3), "a%2Fb/c%25/3")],
)
def test_a_tensors_name_is_the_checkpointers(path, name):
    assert name_of(path) == name
