"""The weights of a checkpoint under the names that the model itself gives them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from overlapkit.checkpoint.catalog import Catalog, Saved
from overlapkit.checkpoint.codec import decode
from overlapkit.checkpoint.exchange.names import own_names
from overlapkit.checkpoint.layout import plain_name
from overlapkit.checkpoint.tree import TREE

_COUNTER = "n_averaged"  # torch.optim.swa_utils.AveragedModel's own buffer, beside the model that it holds


class _Tensor(str):
    """The name of a tensor, which no text in a state is."""


@dataclass
class Weights:
    """A model's tensors.

    Attributes:
        key: The key of the state that they were taken from.
        tensors: By name, each data once.
        tied: For each further name of the same data (tied weights) the name that is in `tensors`.
        left_out: What is there and is no weight: extra state that is no tensor, an average's counter.
    """

    key: str
    tensors: dict[str, Saved] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def find_weights(catalog: Catalog, key: str | None) -> Weights:
    """Take a model out of a checkpoint.

    Args:
        catalog: The checkpoint.
        key: A key of the state: a module, or a dict of tensors. None is the only module that there is
            (what torch.distributed.checkpoint wrote has flat dicts of tensors for modules).

    Raises:
        ValueError: There is no such key, it holds no model, or several modules are there to choose from.
    """
    weights = Weights(_choose(catalog, key))
    found = decode(catalog.entries[weights.key]["value"], lambda name: catalog.tensors[name])
    if not isinstance(found, Mapping) or catalog.entries[weights.key]["kind"] == "optimizer":
        raise ValueError(f"only={key!r} is no model: give a module's key, {_modules(catalog)}")
    first: dict[int, str] = {}
    for name, saved in _flat(found).items():
        if not isinstance(saved, Saved):
            weights.left_out.append(name)
        elif (kept := first.setdefault(id(saved), name)) != name:
            weights.tied[name] = kept
        else:
            weights.tensors[name] = saved
    if not weights.tensors:
        raise ValueError(f"only={weights.key!r} has no tensors: give a module's key, {_modules(catalog)}")
    return weights


def _choose(catalog: Catalog, key: str | None) -> str:
    modules = _modules(catalog)
    if key is None:
        if len(modules) != 1:
            keys = modules or list(catalog.entries)
            raise ValueError(f"the checkpoint has {len(modules)} modules: say which key with only=, {keys}")
        return modules[0]
    if key not in catalog.entries:
        raise ValueError(f"only={key!r}: the checkpoint has no such key, but {list(catalog.entries)}")
    return key


def _modules(catalog: Catalog) -> list[str]:
    return [key for key, entry in catalog.entries.items() if _is_module(entry)]


def _is_module(entry: dict[str, Any]) -> bool:
    """Whether it is one, or what torch.distributed.checkpoint saves of one: a flat dict of tensors."""
    if entry["kind"] != TREE:
        return bool(entry["kind"] == "module")
    value = decode(entry["value"], _Tensor)
    return isinstance(value, dict) and bool(value) and all(isinstance(v, _Tensor) for v in value.values())


def _flat(found: Mapping[Any, Any]) -> dict[str, Any]:
    """A state_dict's items, with what wrappers put before their names taken off.

    Raises:
        ValueError: It is not flat, a name is none, or two become one.
    """
    if wrong := [name for name in found if not isinstance(name, str)]:
        raise ValueError(f"{wrong[0]!r} is no tensor's name: it must be text")
    rest = [name for name in found if name != _COUNTER]
    averaged = len(rest) < len(found) and all(plain_name(name).startswith("module.") for name in rest)
    names = own_names(rest if averaged else found)
    items = {names[name]: value for name, value in found.items() if name in names}
    if averaged:
        items[_COUNTER] = None  # no weight
    for name, value in items.items():
        if isinstance(value, Mapping | list | tuple) and _has_tensors(value):
            raise ValueError(f"{name!r} holds tensors in a {type(value).__name__}: a model's state is flat")
    return items


def _has_tensors(value: Any) -> bool:
    members = value.values() if isinstance(value, Mapping) else value
    return any(
        isinstance(m, Saved) or isinstance(m, Mapping | list | tuple) and _has_tensors(m) for m in members
    )
