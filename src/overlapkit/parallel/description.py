"""What `shard` will do, or has done, as a table: who gathers what, who prefetches whom."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn

from overlapkit.parallel.units import Unit, prefetch_order


@dataclass(frozen=True)
class UnitRow:
    """One unit.

    Attributes:
        name: Its modules' names joined by "+", or "(root)".
        modules: Those names, as `ShardPlan.units` has them; empty for the root.
        parameters: Names of its parameters in the model.
        elements: Their number of elements, without padding.
        gathered: Bytes of one all-gather's output: all parameters, padded to the ranks that share them,
            in the dtype that is communicated.
        reduced: Bytes of the reduce-scatter's input: the parameters that require gradients, padded alike.
        reshard: True, False, or the number of ranks that hold a copy between forward and backward.
        forward_prefetch: Units whose all-gather this one starts in forward.
        backward_prefetch: The same in backward.
    """

    name: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    elements: int
    gathered: int
    reduced: int
    reshard: bool | int
    forward_prefetch: tuple[str, ...]
    backward_prefetch: tuple[str, ...]


@dataclass(frozen=True)
class Description:
    """The units of a model in forward order, the root last; `print` shows a table.

    Attributes:
        units: One row a unit.
        ranks: How many ranks share each parameter; 1 without a mesh, where nothing is padded.
    """

    units: tuple[UnitRow, ...]
    ranks: int

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        total = UnitRow(
            "total",
            (),
            (),
            sum(row.elements for row in self.units),
            sum(row.gathered for row in self.units),
            sum(row.reduced for row in self.units),
            False,
            (),
            (),
        )
        table = Table("unit", box=None)
        for title in ("parameters", "gathered MiB", "reduced MiB"):
            table.add_column(title, justify="right")
        for title in ("reshard", "prefetches in forward", "in backward"):
            table.add_column(title)
        for row in (*self.units, total):
            table.add_row(
                row.name,
                f"{row.elements:,}",
                f"{row.gathered / 2**20:,.3f}",
                f"{row.reduced / 2**20:,.3f}",
                "" if row is total else str(row.reshard),
                ", ".join(row.forward_prefetch),
                ", ".join(row.backward_prefetch),
            )
        text = io.StringIO()
        Console(file=text, width=160, force_terminal=False, color_system=None).print(table)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def describe_units(
    units: Sequence[Unit],
    forward: int,
    backward: int,
    ranks: int,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> Description:
    """The rows of already resolved units; None for a dtype means the parameter's own."""
    order = prefetch_order(units, forward, backward)
    rows = []
    for unit, (ahead, behind) in zip(units, order, strict=True):
        parameters = unit.parameters.values()
        gathered = {p: param_dtype if param_dtype and p.is_floating_point() else p.dtype for p in parameters}
        trained = [p for p in parameters if p.requires_grad]
        rows.append(
            UnitRow(
                unit.name,
                unit.module_names,
                tuple(unit.parameters),
                sum(p.numel() for p in parameters),
                sum(_padded(p, ranks) * gathered[p].itemsize for p in parameters),
                sum(_padded(p, ranks) * (reduce_dtype or gathered[p]).itemsize for p in trained),
                unit.reshard,
                tuple(units[place].name for place in ahead),
                tuple(units[place].name for place in behind),
            )
        )
    return Description(tuple(rows), ranks)


def _padded(parameter: nn.Parameter, ranks: int) -> int:
    """Elements once the first dimension is padded to a multiple of the ranks, as fully_shard does."""
    rows, *rest = parameter.shape
    return -(-rows // ranks) * ranks * math.prod(rest)
