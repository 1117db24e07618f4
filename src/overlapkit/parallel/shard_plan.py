"""`ShardPlan`: decisions for `shard` and `replicate` that were made elsewhere, kept as JSON."""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch.nn as nn

FORMAT = 1
"""Version of the JSON. A reader refuses others: it could not know what they decide."""

_RECOMPUTE = re.compile(r"none|full|selective|every:[1-9][0-9]*")


@dataclass(frozen=True)
class ShardPlan:
    """Decisions for one model and one job; None stands for "not decided", and the usual rule holds.

    `shard` takes all but `bucket_caps_mb`; `replicate` takes that and `recompute`; `checkpoint_every` is for
    `Checkpointer(every=)`. It must be the same on every rank. JSON round trip: `to_json`, `from_json`, `save`
    and `load`.

    Attributes:
        units: Names of the modules of each unit, in forward order; the root unit, which has the rest, is
            left out.
        reshard: For each of those units: True to free its parameters between forward and backward, False to
            keep them, or the number of ranks among which they stay gathered.
        forward_prefetch: How many following units a unit gathers ahead in forward.
        backward_prefetch: How many preceding units a unit gathers ahead in backward.
        recompute: "none", "full", "selective" or "every:N".
        bucket_caps_mb: DDP's buckets in MiB, in the order in which gradients become ready.
        checkpoint_every: Steps between two checkpoints.

    Raises:
        ValueError: A field has a value that it cannot have; the message says which, and what is allowed.
    """

    units: tuple[tuple[str, ...], ...] | None = None
    reshard: tuple[bool | int, ...] | None = None
    forward_prefetch: int | None = None
    backward_prefetch: int | None = None
    recompute: str | None = None
    bucket_caps_mb: tuple[float, ...] | None = None
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        for name, (fits, wanted) in _FIELDS.items():
            value = _as_tuples(getattr(self, name))
            if value is not None and not fits(value):
                raise ValueError(f"ShardPlan: {name}={value!r}: give {wanted}, or None")
            object.__setattr__(self, name, value)
        if self.units is not None:
            named = [name for unit in self.units for name in unit]
            if twice := [name for name in named if named.count(name) > 1]:
                raise ValueError(f"ShardPlan: units: {twice[0]!r} is named twice; a module is in one unit")
        if self.reshard is not None and len(self.reshard) != len(self.units or ()):
            raise ValueError(
                f"ShardPlan: reshard has {len(self.reshard)} values and units "
                f"{'is None' if self.units is None else f'has {len(self.units)}'}: give one for each unit"
            )

    def to_json(self) -> str:
        """The plan as JSON text, with a format version; what is not decided is left out."""
        decided = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps({"format": FORMAT, **decided}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ShardPlan":
        """The plan that `to_json` wrote.

        Raises:
            ValueError: It is no JSON, of another format version, or has an unknown field or a wrong value.
        """
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ValueError(f"ShardPlan: not JSON ({error}); give what to_json() wrote") from None
        if not isinstance(found, dict):
            raise ValueError(f"ShardPlan: JSON of a {type(found).__name__}; give what to_json() wrote")
        version = found.pop("format", None)
        if version != FORMAT or isinstance(version, bool):
            raise ValueError(
                f"ShardPlan: format={version!r}, this version reads {FORMAT}: make the plan again"
            )
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in found if name not in known]:
            raise ValueError(f"ShardPlan: unknown field {unknown[0]!r}; there are {', '.join(known)}")
        return cls(**found)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON to a file; whoever reads meanwhile sees the old file or the new one, whole."""
        target = Path(path)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            beside.write_text(self.to_json() + "\n", encoding="utf-8")
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ShardPlan":
        """Read the JSON from a file.

        Raises:
            FileNotFoundError: There is none.
            ValueError: As `from_json`, and the message names the file.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None


def fill(plan: ShardPlan | None, **options: tuple[Any, Any]) -> dict[str, Any]:
    """The value of each option: the plan's where it decides, else the caller's.

    Args:
        plan: Or None.
        options: By name, which is the plan's, too: what the caller gave, and the option's default.

    Raises:
        TypeError: `plan` is no ShardPlan.
        ValueError: The caller set an option that the plan decides.
    """
    if plan is not None and not isinstance(plan, ShardPlan):
        raise TypeError(f"plan={plan!r}: give an overlapkit.parallel.ShardPlan (ShardPlan.load reads one)")
    filled = {}
    for name, (given, default) in options.items():
        decided = getattr(plan, name, None)
        if decided is not None and given != default:
            raise ValueError(
                f"{name}={given!r} is given, and the plan decides it too ({decided!r}): leave one out, as in "
                f"dataclasses.replace(plan, {name}=None)"
            )
        filled[name] = given if decided is None else decided
    return filled


def check_names(plan: ShardPlan | None, model: nn.Module) -> None:
    """Refuse a plan of another model.

    Raises:
        ValueError: The model has not all modules that the plan's units name.
    """
    there = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for unit in (plan.units if plan is not None else None) or ():
        for name in unit:
            if name not in there:
                children = ", ".join(child for child, _ in model.named_children())
                raise ValueError(
                    f"plan: the model has no module {name!r}, so the plan is of another model "
                    f"(the children of this one are: {children})"
                )


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(each) for each in value) if isinstance(value, (list, tuple)) else value


def _count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _all(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple) and all(fits(each) for each in value)


def _is_unit(value: Any) -> bool:
    return _all(value, lambda name: isinstance(name, str) and name != "") and value != ()


def _is_size(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "units": (
        lambda value: _all(value, _is_unit),
        "for each unit the names of its modules, as in (('blocks.0',), ('norm', 'head')), without the root",
    ),
    "reshard": (
        lambda value: _all(value, lambda each: isinstance(each, bool) or _count(each, 2)),
        "True, False or a number of ranks above 1 for each unit",
    ),
    "forward_prefetch": (lambda value: _count(value, 0), "a number of units, 0 or more"),
    "backward_prefetch": (lambda value: _count(value, 0), "a number of units, 0 or more"),
    "recompute": (
        lambda value: isinstance(value, str) and _RECOMPUTE.fullmatch(value) is not None,
        "'none', 'full', 'selective' or 'every:N'",
    ),
    "bucket_caps_mb": (
        lambda value: _all(value, _is_size) and value != (),
        "the size of each bucket in MiB, above 0",
    ),
    "checkpoint_every": (lambda value: _count(value, 1), "a number of steps, 1 or more"),
}
