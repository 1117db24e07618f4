"""Faults planted in real gloo ranks: which rank, which phase, how many steps. All of them are sleeps."""

import contextlib
import os
import signal
import threading
import time

import pytest
import torch
import torch._dynamo  # DDP and optimizers import it; here once, and not in each rank
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

from overlapkit import replicate, shard
from overlapkit.measure import HANG_EXIT_CODE, StepMeter
from tests.ranks import RanksFailed, run_ranks

LATE_S = 0.12


class Loop:
    """A small model whose forward and backward do what `plant(rank, step, phase)` does."""

    def __init__(self, rank, wrap, plant, **options):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.rank, self.plant, self.step = rank, plant, 0
        model[2].register_forward_hook(self._forward)
        self.model = wrap(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.meter = StepMeter(self.model, self.optimizer, **options)

    def _forward(self, module, args, output):
        self.plant(self.rank, self.step, "forward")
        output.register_hook(lambda gradient: self.plant(self.rank, self.step, "backward"))

    def train(self, steps):
        for _ in range(steps):
            self.plant(self.rank, self.step, "input")
            with self.meter.step():
                self.model(torch.ones(4, 32)).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.step += 1


def late(culprit, in_phase):
    def plant(rank, step, phase):
        if phase == in_phase and rank == (step % 3 if culprit == "rotating" else culprit):
            time.sleep(LATE_S)

    return plant


def sharded(model):
    return shard(model, units=[model[0], model[1], model[2]])


def compared(rank):
    found = {}
    for name, wrap, culprit, phase in (
        ("backward", replicate, 1, "backward"),
        ("forward", sharded, 2, "forward"),
        ("rotating", replicate, "rotating", "backward"),
        ("foreign", nn.parallel.DistributedDataParallel, 1, "forward"),
        ("unseen", nn.parallel.DistributedDataParallel, 1, "backward"),
    ):
        loop = Loop(rank, wrap, late(culprit, phase))
        loop.train(7)
        loop.meter.close()
        report = loop.meter.report()
        found[name] = report, [record.period for record in report.records]
    return found


@pytest.fixture(scope="module")
def reports():
    return run_ranks(3, compared)


def the_same_on_all(reports, name):
    mine = [of[name][0] for of in reports]
    assert mine[0].ranks == mine[1].ranks == mine[2].ranks
    assert mine[0].ranks.steps == 6
    return mine


@pytest.mark.parametrize(("name", "culprit"), [("backward", 1), ("forward", 2)])
def test_a_late_rank_is_named_on_every_rank_although_all_show_the_same_step(reports, name, culprit):
    for report in the_same_on_all(reports, name):
        first = report.ranks.late[0]
        assert (first.rank, first.phase) == (culprit, name)
        assert first.steps >= 5  # a busy machine may be later than the fault in one
        assert LATE_S * 500 < first.late_ms < LATE_S * 2000
        assert report.answers[4].verdict.startswith("no, ")
        assert f"rank {culprit} in {first.steps} of 6 steps" in report.answers[4].evidence
        finding = report.findings[0]
        assert (finding.lane, finding.component) == ("communication", f"rank {culprit}")
        assert f"it computes longer in {name}" in finding.setting
        assert report.ranks.parts[name].worst_rank == culprit
        assert "waiting for a late rank" in report.answers[5].evidence
        assert report.ranks.waiting_ms > LATE_S * 300  # two of three wait
    periods = [sum(of[name][1]) for of in reports]
    assert max(periods) < 1.3 * min(periods)  # what hides the culprit from whoever compares steps


def test_a_culprit_that_rotates_is_found(reports):
    for report in the_same_on_all(reports, "rotating"):
        ranks = report.ranks
        assert ranks.rotating
        assert {one.rank for one in ranks.late} == {0, 1, 2}
        assert sum(one.steps for one in ranks.late if one.phase == "backward") >= 5
        assert report.findings[0].component.startswith("ranks ")


def test_with_a_foreign_wrapper_phases_tell_as_far_as_they_are_local(reports):
    for report in the_same_on_all(reports, "foreign"):
        first = report.ranks.late[0]
        assert (first.rank, first.phase) == (1, "forward")
        assert report.ranks.collectives == 0
        assert "who is late within backward or other cannot be told (foreign" in report.answers[4].evidence
    for report in the_same_on_all(reports, "unseen"):
        assert not any(one.rank == 1 and one.steps > 3 for one in report.ranks.late)
        assert "cannot be told (foreign wrapper" in report.answers[4].evidence


def meshed(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    loop = Loop(rank, lambda model: shard(model, mesh, units=[model[1], model[2]]), late(3, "backward"))
    loop.train(5)
    loop.meter.close()
    return loop.meter.report().ranks


def test_on_a_mesh_each_group_waits_for_its_own():
    ranks, *others = run_ranks(4, meshed)
    assert others == [ranks] * 3
    assert (ranks.late[0].rank, ranks.late[0].phase) == (3, "backward")
    assert ranks.late[0].steps >= 3
    assert ranks.mismatches == ()


class Hang:
    """Rank 1 stands still in step 3, until it is told."""

    def __init__(self, rank, in_phase):
        self.rank, self.phase, self.told = rank, in_phase, []
        self.go = threading.Event()

    def plant(self, rank, step, phase):
        if rank == 1 and step == 3 and phase == self.phase:
            self.stand()

    def stand(self):
        self.go.wait(30)

    def hear(self, report):
        self.told.append(report)
        self.go.set()


def hung(rank):
    found = []
    for wrap, phase in ((replicate, "backward"), (nn.parallel.DistributedDataParallel, "input")):
        hang = Hang(rank, phase)
        loop = Loop(rank, wrap, hang.plant, hang_timeout=0.8, on_hang=hang.hear)
        loop.train(5)
        loop.meter.close()
        found.append(hang.told)
    return found


def test_every_rank_says_who_is_missing_where_and_in_which_line():
    told = run_ranks(3, hung)
    assert told[0] == told[1] == told[2]
    for in_backward, in_input in told:
        assert [len(in_backward), len(in_input)] == [1, 1]
        assert (in_backward[0].missing, in_backward[0].step) == ((1,), 3)
        assert in_backward[0].phase == "backward"
        assert (in_input[0].missing, in_input[0].step, in_input[0].phase) == ((1,), 3, "outside")
        for report in (in_backward[0], in_input[0]):
            assert list(report.stacks) == [1]
            assert "in stand" in report.stacks[1].split("\nThread ")[0]


def exits(rank):
    hang = Hang(rank, "forward")
    Loop(rank, replicate, hang.plant, hang_timeout=0.8).train(5)


def test_a_rank_blocked_in_a_collective_exits_with_the_code(capfd):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(3, exits)
    assert HANG_EXIT_CODE == 87
    assert sorted(failed.value.errors) == [0, 1, 2]
    assert all("ended with exit code 87" in text for text in failed.value.errors.values())
    said = capfd.readouterr().err
    for rank in range(3):
        assert f"[rank {rank}] overlapkit: the job hangs" in said
    assert said.count("missing: rank 1: step 3, forward") == 3


def stopped(rank):
    store = _get_default_store().clone()
    store.set(f"pid/{rank}", str(os.getpid()))
    dist.barrier()
    hang = Hang(rank, "backward")

    def stop():
        time.sleep(0.3)  # it has said where it is
        os.kill(os.getpid(), signal.SIGSTOP)

    hang.stand = stop

    def hear(report):
        hang.hear(report)
        if rank == 0:
            os.kill(int(store.get("pid/1")), signal.SIGCONT)

    loop = Loop(rank, replicate, hang.plant, hang_timeout=0.8, on_hang=hear)
    with contextlib.suppress(RuntimeError):
        loop.train(5)
    loop.meter.close()
    return [(report.missing, report.why) for report in hang.told]


def test_a_rank_that_is_stopped_is_named_and_what_became_of_it():
    first, _, third = run_ranks(3, stopped)
    for ((missing, why),) in (first, third):
        assert missing == (1,)
        assert "not heard of for" in why
        assert "is stopped (SIGSTOP, or a debugger)" in why


def slow(rank):
    """Nothing here is a hang: an evaluation, a long first step, and a rank that computes on and on."""

    def plant(of, step, phase):
        if of == 1 and step == 0 and phase == "forward":
            until = time.monotonic() + 1.6
            while time.monotonic() < until:  # as torch.compile: ever deeper into new code
                exec(f"def f{time.monotonic_ns()}(): time.sleep(0.02)\nf = list(locals().values())[-1]\nf()")

    told = []
    loop = Loop(rank, replicate, plant, hang_timeout=0.8, on_hang=told.append)
    loop.train(2)
    with loop.meter.pause():
        time.sleep(1.6 if rank == 2 else 0)
    loop.train(2)
    time.sleep(1.4)  # after the last step: an export
    loop.meter.close()
    return len(told)


def test_a_slow_but_moving_job_gives_no_alarm():
    assert run_ranks(3, slow) == [0, 0, 0]
