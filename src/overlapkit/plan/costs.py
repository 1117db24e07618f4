"""Profile: what each unit of a model costs one rank without communication, in time and in bytes."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import nn

from overlapkit.parallel.units import ROOT
from overlapkit.plan.arguments import check_amount, check_ranks
from overlapkit.plan.stored import Stored

_FORMAT = 1


@dataclass(frozen=True)
class UnitProfile:
    """One unit: what a single fully_shard call would gather.

    Attributes:
        modules: Names of its modules; empty for the root unit, which has the rest and is the last.
        block: Whether it is one of the repeated blocks, which may be merged and recomputed.
        parameters: Elements of its parameters.
        gradients: Of each parameter that requires gradients its elements, in the order of registration.
        nbytes: Bytes of its parameters, as the model holds them.
        forward_s: Seconds of its forward.
        backward_s: Seconds of its backward, without recomputation.
        saved: Bytes that autograd keeps from its forward for its backward, without parameters.
        inputs: Bytes of the tensors that its forward is given: what recomputation keeps instead.
        backward_needs: Whether its backward needs its parameters: a plain embedding's does not.
        calls: How often its forward runs in a step.
    """

    modules: tuple[str, ...]
    block: bool
    parameters: int
    gradients: tuple[int, ...]
    nbytes: int
    forward_s: float
    backward_s: float
    saved: int
    inputs: int
    backward_needs: bool = True
    calls: int = 1

    @property
    def trained(self) -> int:
        """Elements that require gradients."""
        return sum(self.gradients)

    @property
    def kind(self) -> tuple[bool, str, bool]:
        """The same for blocks that may share a unit: of one list, and all trained or all frozen."""
        return self.block, self.name.rpartition(".")[0], self.trained > 0

    @property
    def name(self) -> str:
        """As `parallel.describe` names it."""
        return "+".join(self.modules) or ROOT


@dataclass(frozen=True)
class Profile(Stored):
    """A model's units in forward order, the root last; made by `profile`, or by hand.

    Attributes:
        units: One or more.
        tokens: Tokens (or samples) of the batch that was measured, or None.
        model: What `fingerprint` says of the model, or None for one that is not at hand.
        device: Where it was measured.
        source: "measured", or where the figures come from.

    Raises:
        TypeError: A figure is no number.
        ValueError: It is out of range, or the units are not some and then the root.
    """

    units: tuple[UnitProfile, ...]
    tokens: int | None = None
    model: str | None = None
    device: str = "cpu"
    source: str = "given"

    def __post_init__(self) -> None:
        if [place for place, unit in enumerate(self.units) if not unit.modules] != [len(self.units) - 1]:
            raise ValueError(
                "units: a profile's last unit, and no other, is the root, which names no modules"
            )
        if self.tokens is not None:
            check_ranks("tokens", self.tokens)
        try:
            torch.device(self.device)
        except RuntimeError:
            raise ValueError(f"device={self.device!r}: give it as torch does, 'cuda' or 'cpu'") from None
        for unit in self.units:
            for figure in ("forward_s", "backward_s"):
                check_amount(f"{unit.name}: {figure}", getattr(unit, figure))
            for figure in ("parameters", "nbytes", "saved", "inputs"):
                check_ranks(f"{unit.name}: {figure}", getattr(unit, figure), least=0)
            for elements in unit.gradients:
                check_ranks(f"{unit.name}: gradients", elements, least=0)

    @property
    def forward_s(self) -> float:
        """Of all units."""
        return sum(unit.forward_s for unit in self.units)

    @property
    def backward_s(self) -> float:
        """Of all units."""
        return sum(unit.backward_s for unit in self.units)

    @property
    def parameters(self) -> int:
        """Elements of all units."""
        return sum(unit.parameters for unit in self.units)

    def check_model(self, model: nn.Module) -> None:
        """Raise where this is a profile of another model.

        Raises:
            ValueError: Its parameters have other names, shapes or dtypes.
        """
        if self.model is not None and self.model != (here := fingerprint(model)):
            raise ValueError(
                f"profile: it was made of another model ({self.model}; this one is {here}): "
                "its parameters have other names, shapes or dtypes; profile this model"
            )

    def to_json(self) -> str:
        """The profile as JSON."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The profile that `to_json` wrote.

        Raises:
            ValueError: It is none, or of a later version.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            if (version := data.pop("format")) != _FORMAT:
                raise ValueError(
                    f"profile of format {version!r}: this version reads {_FORMAT}; measure it again"
                )
            return cls(**{**data, "units": tuple(map(_unit, data["units"]))})
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"no profile: {type(error).__name__}: {error}") from error


def _unit(row: dict[str, Any]) -> UnitProfile:
    return UnitProfile(**{**row, "modules": tuple(row["modules"]), "gradients": tuple(row["gradients"])})


def fingerprint(model: nn.Module) -> str:
    """A model's class and a hash of its parameters' names, shapes and dtypes: the same once it is sharded."""
    rows: Iterable[str] = (f"{n} {tuple(p.shape)} {p.dtype}" for n, p in model.named_parameters())
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]
    name = type(model).__name__.removeprefix("FSDP")  # fully_shard makes a subclass of this name
    return f"{name}-{digest}"
