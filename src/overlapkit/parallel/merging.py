"""Small blocks share a unit: a collective has a fixed cost, whatever it carries."""

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn as nn

from overlapkit.parallel.tensor_parallel import local_part

MIN_UNIT_MB = 8.0
"""MiB in one all-gather below which blocks are put together.

n bytes take about a + n / b. With a = 60 us (launch, copies in and out, a ring over a few hosts) and
b = 12.5 GB/s (100 Gbit/s), a b is 0.7 MiB: 8 MiB run at 92 % of the link's rate, a tenth of that at half.
A slower link is filled by less. On a faster one, models that are worth sharding have larger blocks.
"""

LEAST_SHARE = 8
"""A merged unit stops growing at this share of all blocks, so that all but an eighth can hide."""

Group = tuple[str, ...]


def merge_small(
    blocks: Sequence[tuple[str, dict[str, nn.Parameter]] | None],
    least_mb: float,
    param_dtype: torch.dtype | None,
) -> list[Group]:
    """Put neighbours together until each unit gathers `least_mb` MiB, or an eighth of all blocks.

    Only blocks of one list that follow each other there: the first one's forward gathers the unit and the
    last one's frees it, with nothing else in between. Frozen blocks stay apart from trained ones (a backward
    that does not reach them need not gather them), and so do those that train in different dtypes.

    Args:
        blocks: Each block's name and parameters, in forward order; None where one is missing.
        least_mb: MiB in the dtype that is gathered; 0 merges nothing.
        param_dtype: Dtype in which floating-point parameters are gathered; None for their own.
    """
    sizes = [gathered_bytes(block[1], param_dtype) if block is not None else 0 for block in blocks]
    least = least_bytes(least_mb, sizes)
    units: list[Group] = []
    for kind, run in groupby(zip(blocks, sizes, strict=True), key=lambda each: _kind(each[0])):
        if kind is not None:
            units += filled([(block[0], size) for block, size in run if block is not None], least)
    return units


def least_bytes(least_mb: float, sizes: Sequence[int]) -> float:
    """What a unit must gather at least, where the blocks gather so many bytes each."""
    return min(least_mb * 2**20, sum(sizes) / LEAST_SHARE)


def gathered_bytes(parameters: dict[str, nn.Parameter], param_dtype: torch.dtype | None) -> int:
    """Bytes of all parameters of a unit together, without padding."""
    return sum(
        local_part(each).numel() * gathered_dtype(each, param_dtype).itemsize for each in parameters.values()
    )


def gathered_dtype(parameter: nn.Parameter, param_dtype: torch.dtype | None) -> torch.dtype:
    """Dtype in which a parameter is gathered."""
    return param_dtype if param_dtype and parameter.is_floating_point() else parameter.dtype


def _kind(block: tuple[str, dict[str, nn.Parameter]] | None) -> tuple[str, frozenset[torch.dtype]] | None:
    if block is None:
        return None
    name, parameters = block
    trained = frozenset(each.dtype for each in parameters.values() if each.requires_grad)
    return name.rpartition(".")[0], trained


def filled(run: Sequence[tuple[str, int]], least: float) -> list[Group]:
    """Units of neighbours, by name and bytes, of at least so many bytes each."""
    units: list[Group] = []
    size = 0
    for name, nbytes in run:
        if units and size < least:
            units[-1] += (name,)
            size += nbytes
        else:
            units.append((name,))
            size = nbytes
    if len(units) > 1 and size < least:
        units[-2:] = [units[-2] + units[-1]]
    return units
