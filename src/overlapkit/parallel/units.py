"""Units: which parameters are gathered and reduced together, in which order, and who prefetches whom."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from overlapkit.parallel.merging import merge_small
from overlapkit.parallel.structure import Structure, can_forward, find_structure

ROOT = "(root)"


@dataclass(frozen=True)
class Unit:
    """What one fully_shard call gathers together.

    Attributes:
        module_names: Names of the modules of the call; none for the root.
        modules: The modules of the call.
        parameters: The parameters that it gathers, by their name in the model; none is in two units.
        reshard: Passed on as reshard_after_forward.
        regathers: Whether backward gathers the parameters again.
    """

    module_names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    parameters: dict[str, nn.Parameter]
    reshard: bool | int
    regathers: bool

    @property
    def name(self) -> str:
        """Its modules' names joined by "+", or "(root)"."""
        return "+".join(self.module_names) or ROOT


Reshard = bool | int | str | tuple[bool | int, ...]
"""The `reshard` argument of `shard`; or one value for each listed unit, as a plan has them."""


def resolve_units(
    model: nn.Module,
    units: Any,
    reshard: Reshard,
    ignored: set[nn.Parameter],
    min_unit_mb: float = 0.0,
    param_dtype: torch.dtype | None = None,
) -> list[Unit]:
    """Turn the `units` and `reshard` arguments of `shard` into units, in forward order, the root last.

    Args:
        model: The root module.
        units: As `shard` has it.
        reshard: As `shard` has it, or a value for each listed unit.
        ignored: Parameters of no unit.
        min_unit_mb: With "auto", MiB below which neighbouring blocks share a unit.
        param_dtype: Dtype in which parameters are gathered; None for their own.

    Raises:
        ValueError: A name or module is not part of the model, or cannot be a unit of its own.
        TypeError: `units` is neither "auto" nor a sequence of modules and names.
    """
    if isinstance(units, str) and units != "auto":
        raise ValueError(f"units={units!r}: give 'auto', or a list of modules or of their names")
    found = find_structure(model)
    if isinstance(units, str):
        groups = _auto_groups(model, found, ignored, min_unit_mb, param_dtype)
        owned, _ = _own_parameters(model, groups, ignored)
    else:
        groups = _listed_groups(model, units)
        owned, shared = _own_parameters(model, groups, ignored)
        _refuse_bad_groups(model, groups, owned, shared)
    resolved = []
    for place, (group, parameters) in enumerate(zip(groups, owned, strict=False)):  # the root's come last
        if isinstance(reshard, tuple):
            reshards = reshard[place]
        else:
            reshards = group != found.head if isinstance(reshard, str) else reshard
        modules = tuple(model.get_submodule(name) for name in group)
        needless = group == (found.embedding,) and _backward_needs_no_weight(modules[0])
        resolved.append(Unit(group, modules, parameters, reshards, bool(reshards) and not needless))
    at_root = reshard if isinstance(reshard, int) else False
    return [*resolved, Unit((), (model,), owned[-1], at_root, bool(at_root))]


def prefetch_order(units: Sequence[Unit], forward: int, backward: int) -> list[tuple[list[int], list[int]]]:
    """For each unit, the places of the units that it prefetches in forward and in backward, nearest first.

    Args:
        units: In forward order, the root last.
        forward: How many of the following units; the root comes before the first.
        backward: How many of the preceding units that are gathered again; the root comes after the last.
    """
    end = backward_ends(units)
    again = [place >= end and unit.regathers for place, unit in enumerate(units)]
    return prefetch_places(again, forward, backward)


def prefetch_places(
    regathers: Sequence[bool], forward: int, backward: int
) -> list[tuple[list[int], list[int]]]:
    """As `prefetch_order`, from whether backward gathers each unit again."""
    last = len(regathers) - 1
    order = []
    for place in range(len(regathers)):
        after = 0 if place == last else place + 1
        again = [other for other in range(place - 1, -1, -1) if regathers[other]]
        order.append((list(range(after, min(after + forward, last))), again[:backward]))
    return order


def backward_ends(units: Sequence[Unit]) -> int:
    """The place of the first unit that backward reaches: what is before it, and the root, is frozen."""
    return first_reached([any(p.requires_grad for p in unit.parameters.values()) for unit in units])


def first_reached(trains: Sequence[bool]) -> int:
    """As `backward_ends`, from whether each unit trains anything."""
    return 0 if trains[-1] else trains.index(True) if any(trains) else len(trains)


def find_ignored(model: nn.Module, ignored: Iterable[Any]) -> set[nn.Parameter]:
    """The parameters that `ignored` (parameters, modules, or names of either) means.

    Raises:
        ValueError: A name or object is not part of the model.
        TypeError: It is no collection of those.
    """
    if isinstance(ignored, (str, nn.Module)) or not isinstance(ignored, Iterable):
        raise TypeError(f"ignored={ignored!r}: give a list of parameters, modules or their names")
    by_name = dict(model.named_parameters(remove_duplicate=False))
    mine = set(by_name.values())
    found: set[nn.Parameter] = set()
    for entry in ignored:
        if isinstance(entry, nn.Parameter) and entry in mine:
            found.add(entry)
        elif isinstance(entry, str) and entry in by_name:
            found.add(by_name[entry])
        elif isinstance(entry, nn.Parameter):
            raise ValueError(f"ignored: a parameter of shape {tuple(entry.shape)} is not part of the model")
        else:
            found.update(model.get_submodule(_name_in(model, entry, "ignored")).parameters())
    return found


_Group = tuple[str, ...]


def _auto_groups(
    model: nn.Module,
    found: Structure,
    ignored: set[nn.Parameter],
    min_unit_mb: float,
    param_dtype: torch.dtype | None,
) -> list[_Group]:
    """Groups of module names: embedding, blocks, head, in so far as they have parameters of their own.

    A weight that two of them use is left to the root, with all of both: it is gathered all through forward.
    The head is needed again as soon as backward begins, so that freeing it in between would gain nothing.
    """
    embedding = (found.embedding,) if found.embedding is not None else ()
    groups = [group for group in (embedding, *((name,) for name in found.blocks), found.head) if group]
    owned, shared = _own_parameters(model, groups, ignored)
    alone = {
        group: owned[place] for place, group in enumerate(groups) if owned[place] and place not in shared
    }
    blocks = [(name, alone[name,]) if (name,) in alone else None for name in found.blocks]
    merged = merge_small(blocks, min_unit_mb, param_dtype)
    return [group for group in (embedding, *merged, found.head) if group in alone or group in merged]


def _listed_groups(model: nn.Module, units: Any) -> list[_Group]:
    if isinstance(units, nn.Module) or not isinstance(units, Sequence):
        raise TypeError(f"units={units!r}: give 'auto', or a list of modules or of their names")
    groups = []
    for entry in units:
        several = isinstance(entry, (list, tuple))
        groups.append(tuple(_name_in(model, part, "units") for part in (entry if several else [entry])))
    return groups


def _name_in(model: nn.Module, entry: Any, argument: str) -> str:
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    if isinstance(entry, nn.Module):
        if id(entry) not in names:
            raise ValueError(f"{argument}: {type(entry).__name__} is not a module of the model")
        return names[id(entry)]
    if not isinstance(entry, str):
        raise TypeError(f"{argument}: {entry!r} is neither a module nor the name of one")
    try:
        return names[id(model.get_submodule(entry))]
    except AttributeError:
        children = ", ".join(name for name, _ in model.named_children())
        raise ValueError(
            f"{argument}: the model has no part {entry!r}; its children are: {children}"
        ) from None


def _own_parameters(
    model: nn.Module, groups: Sequence[_Group], ignored: set[nn.Parameter]
) -> tuple[list[dict[str, nn.Parameter]], set[int]]:
    """Each group's parameters (the root's last), and the places of groups that share one with another."""
    place_of = {id(model.get_submodule(name)): place for place, group in enumerate(groups) for name in group}
    root = len(groups)
    # By path, duplicates included: a module may be reached over several blocks.
    paths = {
        path: place_of.get(id(module), root) for path, module in model.named_modules(remove_duplicate=False)
    }
    owners: dict[nn.Parameter, dict[int, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in ignored:
            continue
        path = name.rpartition(".")[0]
        while path and paths[path] == root:
            path = path.rpartition(".")[0]
        owners.setdefault(parameter, {}).setdefault(paths[path] if path else root, name)
    owned: list[dict[str, nn.Parameter]] = [{} for _ in range(root + 1)]
    shared: set[int] = set()
    for parameter, places in owners.items():
        for place, name in places.items():
            owned[place][name] = parameter
        if len(places) > 1:
            shared.update(places)
    return owned, shared - {root}


def _refuse_bad_groups(
    model: nn.Module, groups: list[_Group], owned: list[dict[str, nn.Parameter]], shared: set[int]
) -> None:
    """What the user listed is taken as it stands, or refused; it is never quietly rearranged."""
    named = [name for group in groups for name in group]
    for place, group in enumerate(groups):
        for name in group:
            if not name:
                raise ValueError("units: the model itself is always the last unit; leave it out")
            if named.count(name) > 1:
                raise ValueError(f"units: {name!r} is listed twice")
            if not can_forward(model.get_submodule(name)):
                raise ValueError(f"units: {name!r} has no forward of its own; list its children instead")
            if any(name.startswith(other + ".") for other in group):
                raise ValueError(f"units: {name!r} lies inside another module of the same unit; drop it")
        if not owned[place]:
            raise ValueError(
                f"units: {'+'.join(group)!r} has no parameters of its own to shard; leave it out"
            )
    if shared:
        twins: dict[nn.Parameter, list[str]] = {}
        for parameters in owned:
            for name, parameter in parameters.items():
                twins.setdefault(parameter, []).append(name)
        tied = next(names for names in twins.values() if len(names) > 1)
        raise ValueError(
            f"units: {' and '.join(tied)} are one tied parameter in different units; put their modules "
            "in one unit, as in units=[..., ['embed', 'head']], or leave both to the root"
        )


def _backward_needs_no_weight(module: nn.Module) -> bool:
    """The gradient of a plain table lookup follows from the indices alone."""
    return type(module) is nn.Embedding and module.max_norm is None
