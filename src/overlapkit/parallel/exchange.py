"""All-gather, reduce-scatter and all-reduce among gloo's ranks as direct sends, summed in the ranks' order.

gloo's own reduce-scatter is an all-reduce, which moves twice the bytes, its all-gather sends and receives
in turns, and its all-reduce adds in an order that depends on the place in the tensor. Here every rank posts
its receives before it sends, so that both directions are busy at once.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

_TAG = 0x6F6B0000
"""Far from the small numbers that programs give their own messages."""

_AT_ONCE = 1 << 18
"""Bytes that a rank sends at most to give all others the whole of a tensor: one journey instead of two."""

Finish = Callable[[], None]
"""Waits, in any thread, until a collective that was begun is done; raises what went wrong with it."""


def direct(group: dist.ProcessGroup) -> bool:
    """Whether host tensors of this group travel over gloo."""
    return "cpu:gloo" in dist.get_backend_config(group)


_taken: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()


def new_tags(group: dist.ProcessGroup) -> tuple[int, int]:
    """Two tags for a caller that begins its collectives in a thread of its own: no other one gets them.

    Every rank of the group asks for them as often, and in the same order.
    """
    taken = _taken[group] = _taken.get(group, 0) + 2
    return 0x10000 - taken, 0x10001 - taken  # from above: units of sharded models count from below


def gather(output: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup, tag: int) -> Finish:
    """Begin to gather `mine` of each rank into `output` (n,).

    Args:
        output: Of any dtype, contiguous, on the host; so is `mine`, which may be its own place in it.
        mine: This rank's part, as `output.tensor_split(ranks)` cuts it.
        group: The ranks.
        tag: 0 to 65535, the same on every rank; collectives of one tag are begun in one order everywhere.
    """
    parts, rank = output.tensor_split(group.size()), group.rank()
    if parts[rank].data_ptr() != mine.data_ptr():
        parts[rank].copy_(mine)
    messages = _Messages(group, tag, [mine] * group.size(), parts)
    return messages.wait


def reduce(
    output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, tag: int, *, average: bool
) -> Finish:
    """Begin to sum or average `given` (n,) over the ranks, each rank's part into its `output`.

    The sum runs in the order of the ranks, in float32 at least, and is rounded once.

    Args:
        output: Floating point, contiguous, on the host, written when the returned call is done.
        given: Of the same dtype; it must stay as it is until then.
        group: The ranks.
        tag: As for `gather`.
        average: Divide by the number of ranks.
    """
    return _add_up(output, given.tensor_split(group.size()), group, tag, average)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, tags: tuple[int, int]) -> None:
    """Sum `tensor` (n,) over the ranks in place, as `reduce` does; returns when it is done.

    Each rank sums its part and gives it to the others; what is small is sent whole, and each rank sums all of
    it. The values do not depend on where in the tensor they stand.

    Args:
        tensor: Floating point, contiguous, on the host.
        group: The ranks.
        tags: Of `new_tags`.
    """
    ranks = group.size()
    if (ranks - 1) * tensor.nbytes <= _AT_ONCE:
        total = torch.empty_like(tensor)
        _add_up(total, [tensor] * ranks, group, tags[0])()
        tensor.copy_(total)
        return
    total = torch.empty_like(tensor.tensor_split(ranks)[group.rank()])
    reduce(total, tensor, group, tags[0], average=False)()
    gather(tensor, total, group, tags[1])()


def _add_up(
    output: torch.Tensor,
    parts: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    tag: int,
    average: bool = False,
) -> Finish:
    """Begin to send each rank its part, and to sum what all send to this one into `output`."""
    rank, ranks = group.rank(), group.size()
    received = list(output.new_empty(ranks - 1, output.numel()))
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


class Message(NamedTuple):
    """One that is under way."""

    work: dist.Work | None
    doing: str

    def wait(self) -> None:
        """Until it has come, or has left. What goes wrong says what it was."""
        assert self.work is not None  # it is for ranks outside of the group
        try:
            self.work.wait()
        except RuntimeError as error:
            error.add_note(f"while {self.doing}")
            raise


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
        before = [(rank - distance) % ranks for distance in range(1, ranks)]
        after = [(rank + distance) % ranks for distance in range(1, ranks)]
        self._receives = {peer: receive(received[peer], peer, group, tag) for peer in before}
        self._sends = [send(sent[peer], peer, group, tag) for peer in after]

    def wait_for(self, peer: int) -> None:
        """Until all has come from that rank of the group; at once for this rank and a second time."""
        if (message := self._receives.pop(peer, None)) is not None:
            message.wait()

    def wait(self) -> None:
        """Until all has come and gone."""
        for peer in list(self._receives):
            self.wait_for(peer)
        for message in self._sends:
            message.wait()


def send(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> Message:
    """Begin to send a contiguous tensor on the host, which must stay as it is, to a rank of the group."""
    work = dist.isend(tensor, group=group, group_dst=peer, tag=_TAG + tag)
    return Message(work, f"sending to rank {peer} of the group")


def receive(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> Message:
    """Begin to receive one from a rank of the group; of one tag they come in the order of `send`."""
    work = dist.irecv(tensor, group=group, group_src=peer, tag=_TAG + tag)
    return Message(work, f"receiving from rank {peer} of the group")


def hang_up(group: dist.ProcessGroup) -> None:
    """Close this rank's connections in a group of which a collective has failed: all others learn so at once.

    gloo does so where a wait runs out: here one for what no rank sends.
    """
    peer = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):  # closed already, too
        work = dist.irecv(torch.empty(1, device="cpu"), group=group, group_src=peer, tag=_TAG - 1)
        assert work is not None
        work.wait(timedelta(milliseconds=1))
