"""One report from each rank, one verdict for all: also where a rank fails, is late, or does not come."""

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from overlapkit.quorum import Quorum, RankFailed, await_keys
from tests.ranks import run_ranks


def total(reports: list[dict[str, Any]]) -> dict[str, Any]:
    return {"total": sum(report["n"] for report in reports), "order": [report["n"] for report in reports]}


def test_one_process_is_its_own_judge() -> None:
    assert Quorum("a").settle("k", {"n": 3}, total) == {"total": 3, "order": [3]}


def test_every_rank_gets_what_rank_0_made_of_all_reports() -> None:
    def run(rank: int) -> list[Any]:
        one, other = Quorum("a"), Quorum("a")  # two of a name are two
        return [quorum.settle("k", {"n": n + rank}, total) for quorum, n in ((other, 10), (one, 1))]

    verdicts = [{"total": 33, "order": [10, 11, 12]}, {"total": 6, "order": [1, 2, 3]}]
    assert run_ranks(3, run) == [verdicts] * 3


def test_a_rank_waits_as_long_as_its_process_group_does() -> None:
    def run(rank: int) -> tuple[float, float]:
        dist.barrier()  # a rank that is done while others still connect breaks their connections
        return Quorum("a").timeout, Quorum("a", 3).timeout

    assert run_ranks(2, run) == [(60.0, 3)] * 2


@pytest.mark.parametrize("culprit", [0, 1])
def test_work_that_fails_on_one_rank_fails_on_all(culprit: int) -> None:
    class Other(RankFailed):
        pass

    def run(rank: int) -> None:
        def work() -> dict[str, Any]:
            if rank == culprit:
                raise OSError("disk full")
            return {"n": 1}

        with pytest.raises(OSError if rank == culprit else Other, match="disk full"):
            Quorum("a", failure=Other).together("k", work, total)

    run_ranks(2, run)


@pytest.mark.parametrize(("late", "message"), [(0, "rank 0 gave no verdict"), (1, r"rank\(s\) 1 did not")])
def test_a_rank_that_does_not_come_is_named(late: int, message: str) -> None:
    def run(rank: int) -> None:
        quorum = Quorum("a", 0.5)
        if rank != late:
            with pytest.raises(RankFailed, match=message) as caught:
                quorum.settle("k", {"n": 1}, total)
            assert caught.value.undecided == (late == 0)
        dist.barrier()

    run_ranks(2, run)


def test_a_settlement_that_was_interrupted_can_be_made_again() -> None:
    def run(rank: int) -> Any:
        quorum = Quorum("a", 0.3 if rank == 0 else 20)
        if rank == 0:
            with pytest.raises(RankFailed):
                quorum._await_reports(f"{quorum.name}/k")  # as far as Ctrl-C lets it come
            quorum.timeout = 20
        else:
            time.sleep(1.0)
        return [quorum.settle(key, {"n": 1}, total)["total"] for key in ("k", "l")]

    assert run_ranks(2, run) == [[2, 2]] * 2


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_will_not_settle_says_so_and_does_not_wait(culprit: int) -> None:
    def run(rank: int) -> list[int]:
        quorum, keys = Quorum("a"), []
        for turn in range(4):
            if rank == culprit:
                quorum.fail(f"{turn}", OSError("disk full"))
                dist.barrier()
            else:
                dist.barrier()  # the other has gone on already
                with pytest.raises(RankFailed, match=f"rank {culprit}: OSError: disk full"):
                    quorum.together(f"{turn}", lambda: {"n": 1}, total)
            quorum.settle(f"{turn} again", {"n": 1}, total)
            dist.barrier()
            keys.append(quorum.store.num_keys())
            dist.barrier()
        return keys

    for keys in run_ranks(2, run):
        assert len(set(keys[1:])) == 1


def test_settlements_leave_no_keys_behind() -> None:
    def run(rank: int) -> list[int]:
        quorum, keys = Quorum("a"), []
        for turn in range(6):
            quorum.together(f"{turn}", lambda: {"n": 1}, total)
            dist.barrier()
            keys.append(quorum.store.num_keys())
            dist.barrier()
        return keys

    for keys in run_ranks(2, run):
        assert len(set(keys[1:])) == 1


def test_a_wait_can_be_given_up() -> None:
    store, given_up, waited = dist.HashStore(), threading.Event(), []
    wait = lambda: waited.append(await_keys(store, ["k"], 60, given_up.is_set))  # noqa: E731
    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    given_up.set()
    thread.join(10)
    assert waited == [False]
    assert not await_keys(store, ["k"], 0.01)
    store.set("k", "")
    assert await_keys(store, ["k"], 0)
