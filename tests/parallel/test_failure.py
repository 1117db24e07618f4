"""A rank that dies or is late: every other rank gets one error that names it, in time, and nothing hangs."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo  # noqa: F401  # DDP imports it; here once, and not in each rank
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

import overlapkit as ok
from overlapkit.parallel import failure
from tests.parallel.models import batch, gpt, loss_of
from tests.ranks import one_rank_group, run_ranks

STEPS: dict[str, Callable[[nn.Module], Any]] = {
    "backward": lambda model: loss_of(model, batch(0)).backward(),
    "accumulate": lambda model: [
        (loss_of(model, rows) * scale).backward()
        for rows, scale in ok.accumulate(model, [batch(0), batch(1)])
    ],
}
WRAPS: dict[str, Callable[..., nn.Module]] = {"replicate": ok.replicate, "shard": ok.shard}


def _run(
    world: int, wrap: str, step: str, limit: float, before: Callable[[int], None], **options: Any
) -> list[Any]:
    """Two steps; before the third one rank does `before`. Returns each error, and if it was in time."""

    def job(rank: int) -> tuple[str, bool]:
        failure.ROLL_S = 0.5
        group = dist.new_group(timeout=timedelta(seconds=limit))
        model = WRAPS[wrap](gpt(), DeviceMesh.from_group(group, "cpu"))
        for _ in range(2):
            STEPS[step](model)
        dist.barrier()
        before(rank)
        began, text = time.monotonic(), ""
        try:
            STEPS[step](model)
        except RuntimeError as error:
            text = str(error)
        return text, time.monotonic() - began < limit + failure.ROLL_S + 15

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_ranks(world, job, timeout=50, **options)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_rank_that_dies_is_named(wrap: str, step: str):
    def die(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    first, code, last = _run(3, wrap, step, 30, die, may_die=(1,))
    assert code == -signal.SIGKILL
    for rank, (text, in_time) in ((0, first), (2, last)):
        assert in_time
        assert f"failed on rank {rank}" in text
        assert "rank 1 ended, look at its log first" in text
        assert ("all_reduce " if wrap == "replicate" else "all_gather ") in text


def test_who_is_not_beside_the_dead_rank_in_the_ring_learns_of_it_at_once():
    """Not when the one before it has ended, too: that would take as long as it looks for who is to blame."""

    def job(rank: int) -> str:
        model = ok.replicate(gpt())
        for step in range(2):
            loss_of(model, batch(step)).backward()
        loss = loss_of(model, batch(2))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        store = dist.distributed_c10d._get_default_store()
        store.set(f"failed/{rank}", b"")
        store.wait(["failed/0", "failed/2", "failed/3"], timedelta(seconds=20))  # none learns of it by an end
        return str(caught.value)

    texts = [said for rank, said in enumerate(run_ranks(4, job, timeout=60, may_die=(1,))) if rank != 1]
    for text in texts:
        assert "rank 1 ended, look at its log first" in text
        assert "did not report" not in text


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_rank_that_is_late_is_named(wrap: str):
    def sleep(rank: int) -> None:
        if rank == 1:
            time.sleep(2.5)

    texts = [text for text, in_time in _run(3, wrap, "backward", 1.0, sleep) if in_time]
    assert len(texts) == 3
    for rank in (0, 2):
        assert "rank 1 did not report a failure within 0.5 s: late, blocked elsewhere" in texts[rank]
        assert "imed out" in texts[rank]
    assert "every other rank had failed before: this one was late, or cut off" in texts[1]
    assert "; rank 0 says: " in texts[1]


def test_only_what_a_backend_raises_is_named():
    with one_rank_group():
        roll = failure.Roll(dist.group.WORLD)
        for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("gloo/")):
            with pytest.raises(type(error)) as raised, roll.naming("all_reduce of x"):
                raise error
            assert raised.value is error
        wanted = r"^all_reduce of x failed on rank 0 \(.*gloo/x"
        with pytest.raises(failure.CollectiveFailed, match=wanted), roll.naming("all_reduce of x"):
            raise RuntimeError("[gloo/x.cc] Connection closed")


def test_the_store_is_gone_with_rank_0(monkeypatch: pytest.MonkeyPatch):
    """Without a launcher rank 0 serves the store; then nobody can be asked, and that is said."""
    monkeypatch.setattr(failure, "ROLL_S", 0.2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Broken pipe")

    with one_rank_group():
        roll = failure.Roll(dist.group.WORLD)
    roll._ranks, roll._job = [0, 1], type("Job", (), {"store": Gone()})()
    error = roll.failed("all_gather x", RuntimeError("closed"))
    assert "the job's store does not answer, rank 0 or the launcher may be gone: Broken pipe" in str(error)
    del store


def test_processes_that_live_and_that_do_not():
    assert failure._lives(os.getpid())
    child = os.fork()
    if child == 0:
        os._exit(0)
    deadline = time.monotonic() + 10
    while failure._lives(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not failure._lives(child), "it ended, though nobody has reaped it"
    os.waitpid(child, 0)
    assert not failure._lives(child)


def test_a_process_that_is_reaped_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch):
    def gone(path: str) -> Any:
        raise ProcessLookupError  # what a read of /proc/PID/stat raises then

    monkeypatch.setattr("builtins.open", gone)
    alive, dead = failure._lives(os.getpid()), failure._lives(2**22 + 1)  # above any process's id
    monkeypatch.undo()
    assert (alive, dead) == (True, False)
