"""What `shard` will do, or has done, as a table: who gathers what, who prefetches whom."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn

from overlapkit.parallel.merging import gathered_dtype
from overlapkit.parallel.tensor_parallel import local_part
from overlapkit.parallel.units import Unit, backward_ends


@dataclass(frozen=True)
class UnitRow:
    """One unit. Bytes are of one rank; of a tensor-parallel parameter only what this rank holds counts.

    Attributes:
        name: Its modules' names joined by "+", or "(root)".
        modules: Those names, as `ShardPlan.units` has them; empty for the root.
        parameters: Names of its parameters in the model.
        elements: Their number of elements, without padding.
        kept: Bytes that the rank keeps of them all the time, in their own dtypes, padded.
        gathered: Bytes of one all-gather's output: all parameters, padded to the ranks that share them,
            in the dtype that is communicated.
        reduced: Bytes of the reduce-scatter's input: the parameters that require gradients, padded alike.
        all_reduced: Bytes of the all-reduce between copies that follows it: 0 without copies.
        reshard: True, False, or the number of ranks that hold a copy between forward and backward.
        regathers: Whether backward gathers the parameters again.
        forward_prefetch: Units whose all-gather this one starts in forward.
        backward_prefetch: The same in backward.
    """

    name: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    elements: int
    kept: int
    gathered: int
    reduced: int
    all_reduced: int
    reshard: bool | int
    regathers: bool
    forward_prefetch: tuple[str, ...]
    backward_prefetch: tuple[str, ...]


@dataclass(frozen=True)
class Description:
    """The units of a model in forward order, the root last; `print` shows a table.

    Attributes:
        units: One row a unit.
        ranks: How many ranks share each parameter; 1 without a mesh, where nothing is padded.
        copies: How many times each shard is there: 1 but for HSDP.
    """

    units: tuple[UnitRow, ...]
    ranks: int
    copies: int = 1

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        sizes = [("kept", "kept"), ("gathered", "gathered"), ("reduced", "reduced")]
        if self.copies > 1:
            sizes.append(("all_reduced", "all-reduced"))
        table = Table("unit", box=None)
        for title in ("parameters", *(f"{title} MiB" for _, title in sizes)):
            table.add_column(title, justify="right")
        for title in ("reshard", "prefetches in forward", "in backward"):
            table.add_column(title)
        for row in self.units:
            table.add_row(
                row.name,
                f"{row.elements:,}",
                *(_mib(getattr(row, size)) for size, _ in sizes),
                str(row.reshard),
                ", ".join(row.forward_prefetch),
                ", ".join(row.backward_prefetch),
            )
        totals = [_mib(sum(getattr(row, size) for row in self.units)) for size, _ in sizes]
        table.add_row("total", f"{sum(row.elements for row in self.units):,}", *totals)
        text = io.StringIO()
        Console(file=text, width=160, force_terminal=False, color_system=None).print(table)
        lines = [line.rstrip() for line in text.getvalue().splitlines()]
        return "\n".join([*lines, self._summary()])

    def _summary(self) -> str:
        """What a step costs, on each rank."""
        again = sum(row.gathered for row in self.units if row.regathers)
        where = f"{self.copies} x {self.ranks} ranks" if self.copies > 1 else f"{self.ranks} rank(s)"
        between = sum(row.all_reduced for row in self.units)
        return (
            f"On {where}, a step gathers {_mib(sum(row.gathered for row in self.units))} MiB in forward and "
            f"{_mib(again)} in backward, and reduces {_mib(sum(row.reduced for row in self.units))}"
            + (f" and {_mib(between)} between copies." if self.copies > 1 else ".")
        )


def describe_units(
    units: Sequence[Unit],
    order: Sequence[tuple[list[int], list[int]]],
    copies: int,
    shards: int,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> Description:
    """The rows of already resolved units.

    Args:
        units: In forward order, the root last.
        order: As `prefetch_order` has it.
        copies: Of each shard.
        shards: Of each parameter.
        param_dtype: Dtype in which floating-point parameters are gathered; None for their own.
        reduce_dtype: Dtype in which gradients are reduced; None for that of the gathered parameters.
    """
    rows = []
    end = backward_ends(units)
    for place, (unit, (ahead, behind)) in enumerate(zip(units, order, strict=True)):
        parameters = unit.parameters.values()
        padded = {p: _padded(p, shards) for p in parameters}
        gathered = {p: gathered_dtype(p, param_dtype) for p in parameters}
        trained = [p for p in parameters if p.requires_grad]
        reduced = sum(padded[p] * (reduce_dtype or gathered[p]).itemsize for p in trained)
        rows.append(
            UnitRow(
                name=unit.name,
                modules=unit.module_names,
                parameters=tuple(unit.parameters),
                elements=sum(p.numel() for p in parameters),
                kept=sum(padded[p] // shards * p.dtype.itemsize for p in parameters),
                gathered=sum(padded[p] * gathered[p].itemsize for p in parameters),
                reduced=reduced,
                all_reduced=reduced // shards if copies > 1 else 0,
                reshard=unit.reshard,
                regathers=unit.regathers and place >= end,
                forward_prefetch=tuple(units[place].name for place in ahead),
                backward_prefetch=tuple(units[place].name for place in behind),
            )
        )
    return Description(tuple(rows), shards, copies)


def _padded(parameter: nn.Parameter, ranks: int) -> int:
    """Elements once the first dimension is padded to a multiple of the ranks, as fully_shard does."""
    rows, *rest = local_part(parameter).shape
    return -(-rows // ranks) * ranks * math.prod(rest)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.3f}"
