"""All-gather and reduce-scatter among gloo's ranks as direct sends: each byte crosses the wire once.

gloo's own reduce-scatter is an all-reduce, which moves twice the bytes, and its all-gather sends and receives
in turns. Here every rank posts its receives before it sends, so that both directions are busy at once.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

_TAG = 0x6F6B0000
"""Far from the small numbers that programs give their own messages."""

Finish = Callable[[], None]
"""Waits, in any thread, until a collective that was begun is done; raises what went wrong with it."""


def direct(group: dist.ProcessGroup) -> bool:
    """Whether host tensors of this group travel over gloo."""
    return "cpu:gloo" in dist.get_backend_config(group)


def gather(output: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup, tag: int) -> Finish:
    """Begin to gather `mine` (n,) of each rank into `output` (ranks * n,).

    Args:
        output: Of any dtype, contiguous, on the host; so is `mine`, which may be its own place in it.
        mine: This rank's part.
        group: The ranks.
        tag: 0 to 65535, the same on every rank; collectives of one tag are begun in one order everywhere.
    """
    parts, rank = output.view(group.size(), -1), group.rank()
    if parts[rank].data_ptr() != mine.data_ptr():
        parts[rank].copy_(mine)
    messages = _Messages(group, tag, [mine] * group.size(), list(parts))
    return messages.wait


def reduce(
    output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, tag: int, *, average: bool
) -> Finish:
    """Begin to sum or average `given` (ranks * n,) over the ranks, each rank's part into its `output` (n,).

    The sum runs in the order of the ranks, in float32 at least, and is rounded once.

    Args:
        output: Floating point, contiguous, on the host, written when the returned call is done.
        given: Of the same dtype; it must stay as it is until then.
        group: The ranks.
        tag: As for `gather`.
        average: Divide by the number of ranks.
    """
    parts, rank, ranks = list(given.view(group.size(), -1)), group.rank(), group.size()
    received = list(given.new_empty(ranks - 1, output.numel()))
    received.insert(rank, parts[rank])
    messages = _Messages(group, tag, parts, received)

    def finish() -> None:
        precise = torch.promote_types(output.dtype, torch.float32)
        total = output if output.dtype == precise else torch.empty_like(output, dtype=precise)
        for source, part in enumerate(received):
            messages.wait_for(source)
            total.copy_(part) if source == 0 else total.add_(part)
        if average:
            total.div_(ranks)
        if total is not output:
            output.copy_(total)
        messages.wait()

    return finish


class _Messages:
    """What this rank sends to, and receives from, each other rank of a group; all under way at once."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        tag: int,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
    ) -> None:
        rank, ranks = group.rank(), group.size()
        self._tensors = sent, received  # alive until all is done
        tag += _TAG
        before = [(rank - distance) % ranks for distance in range(1, ranks)]
        after = [(rank + distance) % ranks for distance in range(1, ranks)]
        self._receives = {
            peer: dist.irecv(received[peer], group=group, group_src=peer, tag=tag) for peer in before
        }
        self._sends = {peer: dist.isend(sent[peer], group=group, group_dst=peer, tag=tag) for peer in after}

    def wait_for(self, peer: int) -> None:
        """Until all has come from that rank of the group; at once for this rank and a second time."""
        if (work := self._receives.pop(peer, None)) is not None:
            self._wait(work, f"receiving from rank {peer} of the group")

    def wait(self) -> None:
        """Until all has come and gone."""
        for peer in list(self._receives):
            self.wait_for(peer)
        for peer, work in self._sends.items():
            self._wait(work, f"sending to rank {peer} of the group")

    def _wait(self, work: dist.Work | None, doing: str) -> None:
        assert work is not None  # it is for ranks outside of the group
        try:
            work.wait()
        except RuntimeError as error:
            error.add_note(f"while {doing}")
            raise
