"""All-reduce around a ring of gloo's ranks, whose sums do not depend on where in a bucket a parameter lies.

A ring sums each part of a tensor from another rank on, so bits depend on the part (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). gloo cuts the tensor as it
lies: a parameter that moves within its bucket gets other bits. Here each parameter is cut for itself.

Two ranks' sums have but one order. They come here, too: with gloo's own all-reduce under way when its peer
was killed, a process was seen to abort at its exit.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from overlapkit.parallel import exchange

_ALONE = 1 << 16
"""Bytes of a part of a parameter that is sent from where it lies; smaller ones travel together, in a copy."""


def all_reduce(tensor: torch.Tensor, lengths: Sequence[int], group: dist.ProcessGroup, tag: int) -> None:
    """Sum `tensor` (n,) over the ranks in place; returns when it is done.

    As many bytes leave a rank as with gloo's own ring, and for a small parameter less than a number a rank
    more. Takes the tensor's memory once more meanwhile, and small parameters' once more again.

    Args:
        tensor: Floating point, contiguous, on the host.
        lengths: Of the parameters in it, in order; their sum is n.
        group: The ranks.
        tag: Of `exchange.new_tags`.
    """
    ranks = group.size()
    if ranks == 1:
        return
    large: list[torch.Tensor] = []
    small: list[torch.Tensor] = []
    for parameter in tensor.split(list(lengths)):
        (large if parameter.nbytes >= ranks * _ALONE else small).append(parameter)
    widths = [-(-len(one) // ranks) for one in small]
    together = tensor.new_empty(ranks, sum(widths))
    tables = together.split(widths, 1)
    for one, table in zip(small, tables, strict=True):
        table.copy_(F.pad(one, (0, -len(one) % ranks)).view(ranks, -1))
    cuts = [one.tensor_split(ranks) for one in large]
    try:
        _around([[*(cut[row] for cut in cuts), together[row]] for row in range(ranks)], group, tag)
    except BaseException:
        exchange.hang_up(group)  # the next rank waits for this one only, and would blame it
        raise
    for one, table in zip(small, tables, strict=True):
        one.copy_(table.flatten()[: len(one)])


def _around(rows: list[list[torch.Tensor]], group: dist.ProcessGroup, tag: int) -> None:
    """Sum each row's pieces, from the rank of its number on, and give the sums to all ranks."""
    rank, ranks = group.rank(), group.size()
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    pieces = [_two_at_least([piece for piece in row if piece.numel()]) for row in rows]
    sums = [piece for step in range(1, ranks) for piece in pieces[rank - step]]
    wholes = [piece for step in range(ranks - 1) for piece in pieces[rank - step]]
    added = [torch.empty_like(piece) for piece in sums]
    # All receives are posted first: a send without one runs in one direction at a time.
    receives = [exchange.receive(piece, before, group, tag) for piece in (*added, *wholes)]
    sends = [exchange.send(piece, after, group, tag) for piece in pieces[rank]]
    forwarded = len(receives) - len(pieces[(rank + 2) % ranks])  # whose sum `after` has: it made it
    for number, (receive, piece) in enumerate(zip(receives, (*sums, *wholes), strict=True)):
        receive.wait()
        if number < len(sums):
            piece.add_(added[number])
        if number < forwarded:
            sends.append(exchange.send(piece, after, group, tag))
    for sent in sends:
        sent.wait()


def _two_at_least(pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """One is on its way while another is added up."""
    if len(pieces) == 1 and pieces[0].numel() > 1:
        return list(pieces[0].tensor_split(2))
    return pieces
