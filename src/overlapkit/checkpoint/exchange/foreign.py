"""What another library has saved, as a state of ours: which key is a module, which an optimizer."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn

from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.codec import encode, join, root
from overlapkit.checkpoint.exchange.names import own_names
from overlapkit.checkpoint.pieces import DTYPES

Kind = Literal["module", "optimizer", "object", "tensor", "value"]
KINDS = ("module", "optimizer", "object", "tensor", "value")
LOOSE = "model"
"""The key of a state_dict that was saved alone, not under a key."""


class Source(Protocol):
    """A foreign checkpoint.

    Attributes:
        text_keys: Whether its writer has made text of all dict keys.
    """

    text_keys: bool

    def keys(self) -> list[str]:
        """The keys of the state that it holds."""

    def state(self, keys: Collection[str]) -> dict[str, Any]:
        """Some keys of the state. Its tensors may be without data, on the meta device."""

    def sharded(self, tensor: torch.Tensor) -> bool:
        """Whether several ranks have written one of these tensors."""

    def read(self, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        """A part of one of these tensors, in host memory."""


@dataclass
class Foreign:
    """A foreign state in our terms.

    Attributes:
        entries: As in a part: for each key its kind and its typed JSON.
        tensors: By their paths in the state.
    """

    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def keep(self, path: str, tensor: torch.Tensor) -> str:
        """Take a tensor up, under its path."""
        plain = type(tensor) in (torch.Tensor, nn.Parameter)
        if not plain or tensor.layout != torch.strided or tensor.dtype not in DTYPES:
            raise TypeError(
                f"{path!r} is a {type(tensor).__name__} of dtype {tensor.dtype} and layout {tensor.layout}, "
                "which cannot be kept; leave its key out with keys="
            )
        if path in self.tensors:
            raise TypeError(f"{path!r} is there twice: two keys, such as 1 and '1', read the same as text")
        self.tensors[path] = tensor
        return path


def translate(
    source: Source,
    keys: Mapping[str, str] | None,
    kinds: Mapping[str, Kind],
    parameters: Mapping[str, Sequence[str]],
) -> Foreign:
    """Make a state of what a source holds. See `import_checkpoint` for the arguments.

    Raises:
        TypeError: Something in it cannot be kept.
        ValueError: There is no such key, or an optimizer's parameters are unknown.
    """
    state = _take(source, keys)
    for name, given in (("kinds", kinds), ("parameters", parameters)):
        if unknown := [key for key in given if key not in state]:
            raise ValueError(f"{name}= has {unknown[0]!r}: the keys imported are {list(state)}")
    found = Foreign()
    kind_of = {key: kinds.get(key) or _guess(value) for key, value in state.items()}
    if wrong := [key for key, kind in kinds.items() if kind == "tensor" and _guess(state[key]) != kind]:
        kind_there = type(state[wrong[0]]).__name__
        raise ValueError(f"kinds= says that {wrong[0]!r} is a tensor, but it is a {kind_there}")
    _check_not_flat({key: state[key] for key in state if key not in kinds})
    modules = {key: _module(key, state[key]) for key, kind in kind_of.items() if kind == "module"}
    for key, kind in kind_of.items():
        value, path = modules.get(key, state[key]), root(key)
        if kind == "optimizer":
            entry = _optimizer(key, value, modules, parameters.get(key), found)
        else:
            if source.text_keys and kind in ("object", "value"):
                _check_text_keys(value, path)
            entry = encode(value, path, found.keep)
        found.entries[key] = {"kind": kind, "value": entry}
    return found


def _take(source: Source, keys: Mapping[str, str] | None) -> dict[str, Any]:
    there = dict.fromkeys(source.keys())
    if keys is None:
        return _gather(source.state(there))
    if unknown := [key for key in keys if key not in there]:
        shown = f"{list(there)[:20]}{' ...' if len(there) > 20 else ''}"
        raise ValueError(f"keys={list(keys)}: the source has no {unknown[0]!r}, but {shown}")
    if len(set(keys.values())) != len(keys):
        raise ValueError(f"keys={dict(keys)}: two keys get the same name")
    state = source.state(keys)
    return {keys[key]: value for key, value in state.items()}


def _gather(state: dict[str, Any]) -> dict[str, Any]:
    """Loose tensors are a state_dict that was saved alone, unless a module is there as well."""
    loose = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    if not loose or LOOSE in state or any(_guess(value) == "module" for value in state.values()):
        return state
    return {LOOSE: loose, **{key: value for key, value in state.items() if key not in loose}}


def _guess(value: Any) -> Kind:
    if isinstance(value, torch.Tensor):
        return "tensor"
    if not isinstance(value, dict):
        return "value"
    groups = value.get("param_groups")
    if isinstance(groups, list) and groups and all(isinstance(g, dict) and "params" in g for g in groups):
        return "optimizer"
    if value and all(isinstance(item, torch.Tensor) for item in value.values()):
        return "module"
    return "object"


def _check_not_flat(state: dict[str, Any]) -> None:
    """Refuse optimizers flattened by DCP (torchtitan's are): their groups and order cannot be known."""
    for key, value in state.items():
        names = [str(name) for name in value] if isinstance(value, dict) else []
        if names and all(name.startswith(("state.", "param_groups.")) for name in names):
            raise ValueError(
                f"{key!r} is an optimizer saved with flatten_optimizer_state_dict=True, which keeps neither "
                "its groups nor their order; leave it out with keys="
            )


def _module(key: str, value: Any) -> dict[str, Any]:
    """A state_dict under the names that the model itself gives."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"kinds= says that {key!r} is a module, but it is no dict with string keys")
    names = own_names(value)
    return {names[name]: item for name, item in value.items()}


def _optimizer(
    key: str,
    value: dict[str, Any],
    modules: dict[str, dict[str, Any]],
    given: Sequence[str] | None,
    found: Foreign,
) -> dict[str, Any]:
    """An optimizer's entry, in which parameters have their names in the state."""
    groups = value.get("param_groups") if isinstance(value, dict) else None
    if not isinstance(groups, list):
        raise ValueError(f"{key!r} is no optimizer's state_dict: it has no list 'param_groups'")
    names = _parameter_names(key, groups, modules, given)
    state = value.get("state", {})  # DCP keeps no empty dict
    if unknown := [index for index in state if index not in names]:
        raise ValueError(f"{key!r} has state of {unknown[0]!r}, which is in none of its groups")
    moments = {names[index]: item for index, item in state.items()}
    rest = {name: item for name, item in value.items() if name != "state"}
    rest["param_groups"] = [
        {**group, "params": [names[index] for index in group["params"]]} for group in groups
    ]
    path = root(key)
    return {"state": encode(moments, f"{path}/state", found.keep), "rest": encode(rest, path, found.keep)}


def _parameter_names(
    key: str, groups: list[Any], modules: dict[str, dict[str, Any]], given: Sequence[str] | None
) -> dict[Any, str]:
    """What the optimizer calls a parameter (its number or its name) -> its name in the state."""
    ids = [index for group in groups for index in group["params"]]
    own: list[Any] = [name for group in groups for name in group.get("param_names", ())]
    if given is not None:
        own = list(given)
    elif all(isinstance(index, str) for index in ids):
        own = ids
    if len(own) != len(ids) or not all(isinstance(name, str) for name in own):
        raise ValueError(
            f"{key!r} has {len(ids)} parameters, which it knows by number alone"
            + (f", and parameters= names {len(own)}" if given is not None else "")
            + ": give their names in the optimizer's order, parameters="
            f"{{{key!r}: [name for name, _ in model.named_parameters()]}}, or leave {key!r} out with keys="
        )
    short = own_names(own)
    full = [_full_name(key, short[name], modules) for name in own]
    return {**dict(zip(map(str, ids), full, strict=True)), **dict(zip(ids, full, strict=True))}  # DCP: text


def _full_name(key: str, name: str, modules: dict[str, dict[str, Any]]) -> str:
    owners = [module for module, tensors in modules.items() if name in tensors]
    if len(owners) != 1:
        where = f"in the modules {owners}" if owners else f"in none of the modules {list(modules)}"
        raise ValueError(f"{key!r} has a parameter {name!r} which is {where}: it must be in one of them")
    return join(root(owners[0]), name)


def _check_text_keys(value: Any, path: str) -> None:
    """Refuse keys that DCP may have made text of: a schedule whose milestones are text never comes due."""
    if (found := next(_numbers_as_text(value, path), None)) is not None:
        raise TypeError(
            f"{found!r}: DCP keeps all dict keys as text, so that this one may have been a number and cannot "
            "be imported exactly; leave its key out with keys="
        )


def _numbers_as_text(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (join(path, key) for key in value if isinstance(key, str) and key.lstrip("-").isdigit())
        members: Any = value.items()
    else:
        members = enumerate(value) if isinstance(value, list) else ()
    for key, item in members:
        yield from _numbers_as_text(item, join(path, key))
