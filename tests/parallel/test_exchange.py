"""Direct sends: values, the order of a sum, dtypes; a lost or silent rank is an error that names it."""

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlapkit.parallel import exchange, ring
from tests.ranks import run_ranks


def _gathered(rank: int) -> list[bool]:
    world, group = dist.get_world_size(), dist.group.WORLD
    right = []
    for n in (1, 5, 40_000):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64):
            parts = [torch.arange(n).add(7 * r).to(dtype) for r in range(world)]
            output = torch.zeros(world * n, dtype=dtype)
            mine = output.view(world, -1)[rank]  # in place, as FSDP2 has it
            mine.copy_(parts[rank])
            apart = torch.zeros_like(output)
            both = exchange.gather(output, mine, group, 3), exchange.gather(apart, parts[rank], group, 3)
            for finish in both:
                finish()
            right += [torch.equal(output, torch.cat(parts)), torch.equal(apart, torch.cat(parts))]
    return right


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gathered_values(world: int):
    for right in run_ranks(world, _gathered):
        assert len(right) == 24
        assert all(right)


class _Noted:
    """A message whose waiting is written down."""

    def __init__(self, work: Any, waited: list[Any]) -> None:
        self.work, self.waited = work, waited

    def wait(self) -> None:
        self.waited.append(self)
        self.work.wait()


@pytest.mark.parametrize("average", [None, True], ids=["gathered", "reduced"])
def test_what_was_sent_has_left_when_it_is_over(average: bool | None, monkeypatch: pytest.MonkeyPatch):
    """Else the memory that is sent could be used again while it is on its way."""

    def job(rank: int) -> tuple[int, int]:
        waited: list[Any] = []
        send = dist.isend
        monkeypatch.setattr(dist, "isend", lambda *args, **options: _Noted(send(*args, **options), waited))
        given, group = torch.ones(3), dist.group.WORLD
        if average is None:
            finish = exchange.gather(torch.zeros(9), given, group, 5)
        else:
            finish = exchange.reduce(torch.zeros(1), given, group, 5, average=average)
        before = len(waited)
        finish()
        return before, len(waited)

    assert run_ranks(3, job) == [(0, 2)] * 3


def _reduced(rank: int) -> list[Any]:
    world, group = dist.get_world_size(), dist.group.WORLD
    results = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for average in (True, False):
            given = torch.randn(world, 1000, generator=torch.Generator().manual_seed(rank)).to(dtype)
            output = torch.full((1000,), float("nan"), dtype=dtype)
            before = given.clone()
            exchange.reduce(output, given.flatten(), group, 9, average=average)()
            results.append((output, torch.equal(given, before)))
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_a_reduction_adds_in_the_order_of_the_ranks_and_rounds_once(world: int):
    """To the bit: the truth is written down as a plain sum from rank 0 on, in fp32 at least."""
    for rank, results in enumerate(run_ranks(world, _reduced)):
        cases = iter(results)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            for average in (True, False):
                total = torch.zeros(1000, dtype=torch.promote_types(dtype, torch.float32))
                for other in range(world):
                    generator = torch.Generator().manual_seed(other)
                    total = total + torch.randn(world, 1000, generator=generator).to(dtype)[rank]
                output, untouched = next(cases)
                assert untouched
                assert torch.equal(output, (total / world if average else total).to(dtype))


@pytest.mark.parametrize(("world", "at_once"), [(2, 0), (3, 0), (4, 0), (4, 48)])
def test_an_all_reduce_of_any_length_is_the_sum_in_the_order_of_the_ranks(
    world: int, at_once: int, monkeypatch: pytest.MonkeyPatch
):
    """Shorter than there are ranks, lengths that do not divide, sent whole or in parts; by two at once."""
    monkeypatch.setattr(exchange, "_AT_ONCE", at_once)
    lengths = (1, 2, 3, 4, 5, 1001)

    def values(rank: int) -> list[torch.Tensor]:
        return [torch.randn(n, generator=torch.Generator().manual_seed(10 * rank + n)) for n in lengths]

    truth = [sum(parts[1:], parts[0]) for parts in zip(*map(values, range(world)), strict=True)]

    def job(rank: int) -> list[bool]:
        group = dist.group.WORLD
        found, tags = [values(rank), values(rank)], [exchange.new_tags(group) for _ in range(2)]

        def all_of(caller: int) -> None:
            for tensor in found[caller]:
                exchange.all_reduce(tensor, group, tags[caller])

        others = threading.Thread(target=all_of, args=(1,))
        if rank % 2:
            others.start()
            all_of(0)
        else:
            all_of(0)
            others.start()
        others.join()
        return [torch.equal(a, b) for caller in found for a, b in zip(caller, truth, strict=True)]

    assert run_ranks(world, job) == [[True] * 2 * len(lengths)] * world


def test_collectives_of_two_tags_and_two_groups_do_not_mix():
    def job(rank: int) -> list[float]:
        group, other = dist.group.WORLD, dist.new_group()
        mine = torch.tensor([float(rank)])
        outputs = [torch.zeros(2) for _ in range(4)]
        begun = [
            exchange.gather(outputs[0], mine, group, 0),
            exchange.gather(outputs[1], mine + 10, other, 0),
        ]
        orders = (2, 3) if rank == 0 else (3, 2)  # as long as each tag has one order
        begun += [exchange.gather(outputs[place], mine + 10 * place, group, place) for place in orders]
        for finish in reversed(begun):
            finish()
        return torch.cat(outputs).tolist()

    assert run_ranks(2, job) == [[0.0, 1.0, 10.0, 11.0, 20.0, 21.0, 30.0, 31.0]] * 2


def test_a_part_of_the_ranks():
    def job(rank: int) -> list[float]:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        output = torch.zeros(2)
        exchange.gather(output, torch.tensor([float(rank)]), groups[rank % 2], 1)()
        return output.tolist()

    assert run_ranks(4, job) == [[0.0, 2.0], [1.0, 3.0]] * 2


def _gather(group: dist.ProcessGroup) -> None:
    exchange.gather(torch.zeros(group.size()), torch.zeros(1), group, 0)()


def _ring(group: dist.ProcessGroup) -> None:
    ring.all_reduce(torch.ones(8), [8], group, 0)


@pytest.mark.parametrize(
    ("collective", "world", "told"), [(_gather, 2, 0), (_ring, 3, 2)], ids=["gather", "ring"]
)
def test_a_silent_rank_is_named_within_the_groups_timeout(
    collective: Callable[[dist.ProcessGroup], None], world: int, told: int
):
    def job(rank: int) -> str:
        group = dist.new_group(timeout=timedelta(seconds=1))
        if rank == 1:
            time.sleep(2)
            return ""
        with pytest.raises(RuntimeError) as caught:
            collective(group)
        return " ".join(caught.value.__notes__)

    assert run_ranks(world, job)[told] == "while receiving from rank 1 of the group"


def test_a_rank_that_dies_is_named():
    def job(rank: int) -> str:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError) as caught:
            exchange.gather(torch.zeros(2), torch.zeros(1), dist.group.WORLD, 0)()
        return " ".join(caught.value.__notes__)

    assert run_ranks(2, job, may_die=(1,))[0] == "while receiving from rank 1 of the group"


def test_only_gloo_on_the_host_is_asked():
    def job(rank: int) -> bool:
        return exchange.direct(dist.group.WORLD)

    assert run_ranks(1, job) == [True]
