"""Matching a checkpoint with a state: what to read, what does not fit, and what puts the values in place.

Nothing is changed here. A state is changed by a sound checkpoint that fits it, or not at all.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from overlapkit.checkpoint.box import Box, first_replica, is_dtensor, local_part
from overlapkit.checkpoint.catalog import Catalog, Wanted
from overlapkit.checkpoint.codec import decode, encode, root, tensor_names
from overlapkit.checkpoint.layout import (
    kind_of,
    named_optimizer_state,
    optimizer_parameters,
    parameter_names,
    plain_name,
    unwrap,
)
from overlapkit.checkpoint.placing import (
    Values,
    copy_in_place,
    keep_dtypes,
    laid_out_as,
    load,
    loads_plainly,
    put_into,
    refusal,
    takes_as_it_is,
)
from overlapkit.checkpoint.tree import TREE, adopt
from overlapkit.lane import Lane

Apply = Callable[[Values], None]
Walk = Callable[[str, Any, Any], Apply]


@dataclass
class Plan:
    """What a restore will do.

    Attributes:
        wanted: What this rank reads.
        problems: Where checkpoint and state do not fit.
        apply: What puts the values in place, in order; nothing for what has problems, except that a
            module takes those tensors that fit.
    """

    wanted: Wanted = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    apply: list[Apply] = field(default_factory=list)


def make_plan(state: dict[str, Any], catalog: Catalog, only: tuple[str, ...] | None, helper: Lane) -> Plan:
    """Match a state, or those keys of it that are in `only`, with a checkpoint; `helper` is a thread."""
    plan = Plan()
    keys = [key for key in state if only is None or key in only]
    plan.problems += [f"missing: {key!r}" for key in keys if key not in catalog.entries]
    if only is None:
        plan.problems += [f"unexpected: {key!r}" for key in catalog.entries if key not in state]
    matcher = _Matcher(state, catalog, plan, helper)
    order = ("module", "optimizer", "object", "tensor", "value")  # optimizers look at their parameters
    for key in sorted(
        (key for key in keys if key in catalog.entries), key=lambda k: order.index(kind_of(state[k]))
    ):
        matcher.match(key)
    return plan


def writers_of(state: dict[str, Any]) -> set[int]:
    """The ranks that wrote what this one reads, if its modules are laid out as they were."""
    writers = {0}
    for item in state.values():
        if isinstance(item, nn.Module):
            inner = unwrap(item)
            tensors = [*inner.parameters(), *inner.buffers()]
            layouts = {(t.device_mesh, t.placements): t for t in tensors if is_dtensor(t)}
            found = map(first_replica, layouts.values())
            writers |= {rank for rank in found if rank is not None}
    return writers


class _Matcher:
    """One walk over a state and a checkpoint."""

    def __init__(self, state: dict[str, Any], catalog: Catalog, plan: Plan, helper: Lane) -> None:
        self.state = state
        self.catalog = catalog
        self.plan = plan
        self.helper = helper
        self.modules = {
            key: unwrap(item).state_dict(keep_vars=True)
            for key, item in state.items()
            if isinstance(item, nn.Module)
        }
        self.names = parameter_names(state)

    def match(self, key: str) -> None:
        value = self.state[key]
        entry = adopt(self.catalog, key, value, self.names)
        kind, known = kind_of(value), len(self.plan.problems)
        if entry["kind"] == TREE:
            self.plan.problems.append(
                f"mismatch: {key!r} is a {kind}, and what torch.distributed.checkpoint saved of it has other "
                "parameters, groups or structure"
            )
            return
        if entry["kind"] != kind:
            self.plan.problems.append(f"mismatch: {key!r} is a {kind}, in the checkpoint a {entry['kind']}")
            return
        walks: dict[str, Walk] = {"module": self.module, "optimizer": self.optimizer, "object": self.object}
        apply = walks.get(kind, self.value)(key, value, entry["value"])
        if kind == "module" or len(self.plan.problems) == known:
            self.plan.apply.append(apply)

    def want(self, name: str, like: torch.Tensor | None, *, in_place: bool = False) -> bool:
        """Ask for the part of a tensor that `like` is, or for all of it; False if that cannot be."""
        saved = self.catalog.tensors.get(name)
        if saved is None:
            self.plan.problems.append(f"missing: tensor {name!r}")
            return False
        if in_place and like is not None and (why := refusal(like)):
            self.plan.problems.append(f"mismatch: tensor {name!r} {why}")
            return False
        fits = (
            like is None or saved.shape == tuple(like.shape) and (not in_place or saved.dtype == like.dtype)
        )
        if not fits:
            assert like is not None
            here, there = f"{like.dtype} {tuple(like.shape)}", f"{saved.dtype} {saved.shape}"
            self.plan.problems.append(f"mismatch: tensor {name!r} is {here}, in the checkpoint {there}")
            return False
        box = Box.whole(saved.shape) if like is None else local_part(like, name)[1]
        self.plan.wanted[name] = (saved, box)
        return True

    def module(self, key: str, module: nn.Module, entry: dict[str, Any]) -> Apply:
        actual = self.modules[key]
        names = {plain_name(name): name for name in actual}
        self.plan.problems += [f"missing: '{key}/{name}'" for name in names if name not in entry]
        self.plan.problems += [f"unexpected: '{key}/{name}'" for name in entry if name not in names]
        targets: dict[str, torch.Tensor] = {}
        extras: dict[str, Any] = {}
        for plain, name in ((plain, names[plain]) for plain in entry if plain in names):
            current, found = actual[name], list(tensor_names(entry[plain]))
            if not isinstance(current, torch.Tensor) or name.rsplit(".", 1)[-1] == "_extra_state":
                if all(self.want(inner, None) for inner in found):
                    extras[name] = entry[plain]
            elif not found:
                self.plan.problems.append(
                    f"mismatch: '{key}/{plain}' is a tensor, in the checkpoint it is none"
                )
            elif self.want(found[0], current, in_place=True):
                targets[found[0]] = current
        inner_module = unwrap(module)
        own = {id(tensor) for tensor in (*inner_module.parameters(), *inner_module.buffers())}
        made_up = [name for name, item in actual.items() if id(item) not in own]  # by a hook, or a method

        def apply(values: Values) -> None:
            copy_in_place(targets, values, self.helper)
            plainly = all(map(loads_plainly, inner_module.modules()))
            if plainly and not made_up:
                return  # everything is there
            given = {name: decode(extra, lambda n: values[n].clone()) for name, extra in extras.items()}
            held = {name: it.detach() if isinstance(it, torch.Tensor) else it for name, it in actual.items()}
            load(inner_module, held | given, plainly, extras)

        return apply

    def optimizer(self, key: str, optimizer: Optimizer, entry: dict[str, Any]) -> Apply:
        current = named_optimizer_state(optimizer, self.names)
        there = decode(entry["rest"], lambda name: name)
        self._compare_groups(key, current["param_groups"], there["param_groups"])
        parameters = optimizer_parameters(optimizer, self.names)
        owners = {root(name): (name, parameter) for name, parameter in parameters}
        likes: dict[str, torch.Tensor | None] = {}
        layouts: dict[str, torch.Tensor] = {}
        held: dict[str, torch.Tensor] = {}
        for name in tensor_names(entry):
            _, part, owner, *rest = [*name.split("/", 3), "", ""]
            likes[name] = None
            if part == "state" and owner in owners and name in self.catalog.tensors:
                parameter_name, parameter = owners[owner]
                now = current["state"].get(parameter_name, {}).get(rest[0])
                likes[name] = self._shard_like(name, parameter, now)
                if takes_as_it_is(now, self.catalog.tensors[name], likes[name]):
                    held[name] = now
                if not is_dtensor(parameter):
                    layouts[name] = parameter
            self.want(name, likes[name])
        index = {name: i for i, (name, _) in enumerate(parameters)}

        def moment(name: str, value: torch.Tensor) -> torch.Tensor:
            return held[name] if name in held else laid_out_as(value, likes[name], layouts.get(name))

        def apply(values: Values) -> None:
            copy_in_place(held, values, self.helper)
            given = decode(entry["rest"], lambda name: values[name].clone())
            moments = decode(entry["state"], lambda name: moment(name, values[name]))
            given["state"] = {index.get(name, name): item for name, item in moments.items()}
            for group in given["param_groups"]:
                group["params"] = [index[name] for name in group["params"]]
            optimizer.load_state_dict(given)
            keep_dtypes(optimizer, {p: moments[name] for name, p in parameters if name in moments})

        return apply

    def _compare_groups(self, key: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
        here = [name for group in ours for name in group["params"]]
        there = [name for group in theirs for name in group["params"]]
        ours_too, theirs_too = set(here), set(there)
        stray = ", which no module in the state has: is it another model's optimizer?"
        self.plan.problems += [
            f"missing: parameter {name!r} of {key!r}{stray if name.startswith('#') else ''}"
            for name in here
            if name not in theirs_too
        ]
        self.plan.problems += [
            f"unexpected: parameter {name!r} of {key!r}" for name in there if name not in ours_too
        ]
        same = [group["params"] for group in ours] == [group["params"] for group in theirs]
        if not same and sorted(here) == sorted(there):
            self.plan.problems.append(
                f"mismatch: {key!r} has the same parameters in other groups, or another order"
            )

    def _shard_like(self, name: str, parameter: torch.Tensor, now: Any) -> torch.Tensor | None:
        """A DTensor that is laid out as this optimizer state will be; None for a plain tensor."""
        saved = self.catalog.tensors[name]
        if is_dtensor(parameter) and saved.shape and saved.shape == tuple(parameter.shape):
            return parameter
        if is_dtensor(now):
            return now
        if saved.sharded and is_dtensor(parameter):
            self.plan.problems.append(
                f"mismatch: tensor {name!r} {saved.shape} is not sharded as its parameter is, and the "
                "optimizer has no state yet that says how: take one step before restoring"
            )
        return None

    def object(self, key: str, target: Any, entry: Any) -> Apply:
        found = list(tensor_names(entry))
        sharded = any(name in self.catalog.tensors and self.catalog.tensors[name].sharded for name in found)
        live = _tensors_in(target.state_dict(), root(key)) if sharded else {}
        likes = {name: tensor for name, tensor in live.items() if is_dtensor(tensor)}
        for name in found:
            self.want(name, likes.get(name))

        def apply(values: Values) -> None:
            target.load_state_dict(decode(entry, lambda name: self._new(name, values[name], likes.get(name))))

        return apply

    def value(self, key: str, target: Any, entry: Any) -> Apply:
        live = _tensors_in(target, root(key))
        found = list(tensor_names(entry))
        self.plan.problems += [f"missing: tensor {name!r}" for name in live if name not in found]
        for name in found:
            self.want(name, live.get(name), in_place=True)

        def apply(values: Values) -> None:
            copy_in_place({name: live[name] for name in found if name in live}, values, self.helper)

            def placed(name: str) -> torch.Tensor:
                return live[name] if name in live else self._new(name, values[name], None)

            self.state[key] = put_into(self.state[key], decode(entry, placed))

        return apply

    def _new(self, name: str, value: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
        """A tensor of its own with a restored value, on the kind of device that it was on."""
        if like is None and self.catalog.tensors[name].device == "cuda" and torch.cuda.is_available():
            return value.to("cuda")
        return laid_out_as(value, like)


def _tensors_in(value: Any, path: str) -> dict[str, torch.Tensor]:
    """The tensors in a plain value, under the names that a save gives them."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor) -> str:
        found[name] = tensor
        return name

    encode(value, path, keep)
    return found
