"""Checkpoints that torch.distributed.checkpoint wrote: trees that say of nothing what it is.

A restore finds out what is a module or an optimizer from the state that takes them. The parameters of
optimizers, which torch names in three ways, get the names that a Checkpointer gives them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from overlapkit.checkpoint.catalog import Catalog
from overlapkit.checkpoint.codec import decode, encode, root, tensor_names
from overlapkit.checkpoint.layout import kind_of, optimizer_parameters, plain_name

TREE = "tree"
"""The kind of an entry that can become any other."""


class StandIns:
    """Empty tensors in place of those that a checkpoint holds."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[torch.Tensor, str]] = {}

    def of(self, name: str) -> torch.Tensor:
        """A stand-in for the tensor of this name."""
        tensor = torch.empty(0)
        self._held[id(tensor)] = tensor, name
        return tensor

    def name(self, tensor: torch.Tensor) -> str:
        """The name of the tensor that it stands for."""
        return self._held[id(tensor)][1]


def adopt(catalog: Catalog, key: str, value: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """The entry of a key, a tree as the kind of entry that the state's value takes.

    Args:
        catalog: The checkpoint; tensors get the names that the entry refers to.
        key: A key of it.
        value: The state's value that will take it.
        names: `parameter_names` of the state.
    """
    entry = catalog.entries[key]
    if entry["kind"] != TREE:
        return entry
    kind, path, stand_ins = kind_of(value), root(key), StandIns()
    tree = decode(entry["value"], stand_ins.of)

    def keep(name: str, tensor: torch.Tensor) -> str:
        there = stand_ins.name(tensor)
        if there not in catalog.tensors:
            return there  # and it will be missed
        catalog.tensors[name] = catalog.tensors[there]
        return name

    if kind == "optimizer":
        state = _optimizer_state(tree, value, names)
        if state is None:
            return entry  # which does not fit, and is reported
        moments = encode(state.pop("state"), f"{path}/state", keep)
        return {"kind": kind, "value": {"state": moments, "rest": encode(state, path, keep)}}
    if kind == "module":
        if type(tree) is not dict or not all(type(name) is str for name in tree):
            return entry
        tree = {plain_name(name): item for name, item in tree.items()}
    elif any(tensor_names(entry["value"])):  # DCP turns the keys above a tensor into strings
        tree = _with_keys_of(value.state_dict() if kind == "object" else value, tree)
    return {"kind": kind, "value": encode(tree, path, keep)}


def parameter_key(name: str) -> str:
    """A parameter's name within its module, as torch's get_optimizer_state_dict has it."""
    return name.partition("/")[2].replace("%2F", "/").replace("%25", "%") or name


def _with_keys_of(live: Any, tree: Any) -> Any:
    """A tree with the keys of a live value of which it has the strings."""
    if isinstance(live, Mapping) and type(tree) is dict:
        real = {str(key): key for key in live if str(key) in tree and key not in tree}
        return {
            real.get(key, key): _with_keys_of(live.get(real.get(key, key)), item)
            for key, item in tree.items()
        }
    if isinstance(live, list) and isinstance(tree, list):
        return [_with_keys_of(*pair) for pair in zip(live, tree, strict=False)] + tree[len(live) :]
    return tree


def _optimizer_state(tree: Any, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any] | None:
    """A tree as `named_optimizer_state` has it; None where it is no optimizer's state."""
    order = [name for name, _ in optimizer_parameters(optimizer, names)]
    full: dict[Any, str] = {parameter_key(name): name for name in order}
    try:
        if "param_groups" not in tree:
            tree = _unflattened(tree, optimizer, names)
        groups = tree["param_groups"]
        if all(type(parameter) is int for group in groups for parameter in group["params"]):
            full = {key: name for i, name in enumerate(order) for key in (i, str(i))}
        state = {full[parameter]: moments for parameter, moments in tree["state"].items()}
        groups = [
            {**g, "params": [full.get(parameter, parameter) for parameter in g["params"]]} for g in groups
        ]
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
    return {**tree, "state": state, "param_groups": groups}


def _unflattened(tree: Any, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """What get_optimizer_state_dict gives from what it gives with flatten_optimizer_state_dict=True."""
    sections: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for name, item in tree.items():
        section, _, rest = name.partition(".")
        parameter, _, option = rest.rpartition(".")
        sections[section].setdefault(parameter, {})[option] = item
    groups = []
    for group in optimizer.param_groups:
        keys = [parameter_key(names[id(parameter)]) for parameter in group["params"]]
        options = [sections["param_groups"][key] for key in keys]
        if any(_values(other) != _values(options[0]) for other in options):
            raise ValueError("parameters of one group had other options each")
        groups.append({**options[0], "params": keys})
    return {"state": sections["state"], "param_groups": groups}


def _values(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if not isinstance(value, torch.Tensor)}
