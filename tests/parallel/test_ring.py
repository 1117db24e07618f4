"""The ring: each number's sum and its order, whatever else is in the tensor and wherever it lies there."""

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlapkit.parallel import exchange, ring
from tests.ranks import run_ranks

LENGTHS = (1, 2, 3, 7, 64, 65, 1001, 4096)
"""Shorter than there are ranks, lengths that do not divide, and on either side of `ALONE`."""
ALONE = 256


def values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(7 * rank + length)).to(dtype)


def truth(world: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Number by number: of its part, which begins at the rank of that number and ends at the one before."""
    of = [values(rank, length, dtype) for rank in range(world)]
    if length * dtype.itemsize >= world * ALONE:
        ends = torch.tensor([len(part) for part in torch.empty(length).tensor_split(world)]).cumsum(0)
    else:
        ends = -(-length // world) * torch.arange(1, world + 1)
    sums = []
    for at in range(length):
        first = int((ends <= at).sum())
        total = of[first][at].clone()
        for step in range(1, world):
            total += of[(first + step) % world][at]
        sums.append(total)
    return torch.stack(sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_order_of_the_parameters_gives_each_the_same_bits(
    world: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "_ALONE", ALONE)
    orders = [LENGTHS, LENGTHS[::-1], (1,), (4096,), (4096, 1001), (65, 3), (1001, 1, 4096, 2)]
    found_by = {length: truth(world, length, dtype) for length in LENGTHS}

    def job(rank: int) -> list[bool]:
        group, same = dist.group.WORLD, []
        tag, _ = exchange.new_tags(group)
        for lengths in orders:
            tensor = torch.cat([values(rank, length, dtype) for length in lengths])
            ring.all_reduce(tensor, lengths, group, tag)
            same += [torch.equal(a, found_by[len(a)]) for a in tensor.split(list(lengths))]
        return same

    assert run_ranks(world, job) == [[True] * sum(map(len, orders))] * world


def test_two_threads_rings_do_not_mix() -> None:
    def job(rank: int) -> list[float]:
        group, tensors = dist.group.WORLD, [torch.full((n,), 1.0 + rank) for n in (5, 9)]
        tags = [exchange.new_tags(group)[0] for _ in tensors]
        order = (0, 1) if rank else (1, 0)
        threads = [
            threading.Thread(target=ring.all_reduce, args=(tensors[n], [len(tensors[n])], group, tags[n]))
            for n in order
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.02)
        for thread in threads:
            thread.join()
        return torch.cat(tensors).tolist()

    assert run_ranks(3, job) == [[6.0] * 14] * 3


def test_what_was_sent_has_left_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else gradients could change while they are on their way. And a ring sends no number twice."""

    def job(rank: int) -> tuple[int, int, int]:
        sent, gone = [], []
        begin, end = exchange.send, exchange.Message.wait

        def send(tensor: torch.Tensor, *where: Any) -> exchange.Message:
            sent.append(tensor.numel())
            return begin(tensor, *where)

        def wait(message: exchange.Message) -> None:
            gone.append(message.doing)
            end(message)

        monkeypatch.setattr(exchange.Message, "wait", wait)
        monkeypatch.setattr(exchange, "send", send)
        ring.all_reduce(torch.ones(300), [200, 100], dist.group.WORLD, 5)
        left = sum(doing == f"sending to rank {(rank + 1) % 3} of the group" for doing in gone)
        return sum(sent), len(sent), left

    assert run_ranks(3, job) == [(404, 8, 8)] * 3  # parts of 67 + 34, in two halves, twice to two ranks
