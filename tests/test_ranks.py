"""The rank runner itself: results in order, whole errors, deaths and hangs."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksFailed, one_rank_group, run_ranks


def _summed(rank: int, add: int) -> tuple[int, float]:
    value = torch.tensor(float(rank + add))
    dist.all_reduce(value)
    return rank, value.item()


def test_results_come_back_by_rank_and_collectives_work():
    assert run_ranks(2, _summed, 10) == [(0, 21.0), (1, 21.0)]
    assert run_ranks(1, _summed, 1) == [(0, 1.0)]


def test_gradients_flow_in_a_rank():
    def job(rank: int) -> torch.Tensor:
        x = torch.full((3,), float(rank), requires_grad=True)
        (x * x).sum().backward()
        return x.grad

    for rank, grad in enumerate(run_ranks(2, job)):
        assert grad.tolist() == [2.0 * rank] * 3


def test_the_first_error_comes_back_whole_and_ends_the_waiting_rank():
    def job(rank: int) -> None:
        if rank == 1:
            raise KeyError("the culprit")
        dist.barrier()

    with pytest.raises(RanksFailed, match="the culprit") as caught:
        run_ranks(2, job, timeout=20)
    assert next(iter(caught.value.errors)) == 1
    assert isinstance(caught.value.exceptions[1], KeyError)
    assert "in job" in caught.value.errors[1]


def test_a_killed_rank_is_named_unless_it_may_die():
    def job(rank: int) -> str:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return "alive"

    with pytest.raises(RanksFailed, match="exit code -9"):
        run_ranks(2, job)
    assert run_ranks(2, job, may_die=(1,)) == ["alive", -9]


def test_a_rank_that_hangs_shows_where():
    def sleeps_for_ever(rank: int) -> None:
        time.sleep(1000 if rank else 0)

    with pytest.raises(RanksFailed, match="sleeps_for_ever"):
        run_ranks(2, sleeps_for_ever, timeout=1.0)


def test_a_result_that_cannot_be_sent_is_an_error():
    with pytest.raises(RanksFailed, match="cannot be pickled"):
        run_ranks(1, lambda rank: lambda: None)


def test_spawned_ranks_work_too():
    assert run_ranks(1, _summed, 5, start="spawn") == [(0, 5.0)]


def test_one_rank_group_is_gone_afterwards():
    with one_rank_group():
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()
