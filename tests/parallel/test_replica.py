"""replicate against one process on three ranks: what DDP finds hard, and what it would do wrong unseen."""

import copy
import itertools
import threading
import time
from typing import Any

import pytest
import torch
import torch._dynamo  # noqa: F401  # DDP imports it; here once, and not in each rank
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import overlapkit as ok
from overlapkit.parallel import ShardPlan, ring
from overlapkit.parallel.buckets import BucketTimes
from tests.parallel.models import WIDTH, batch, gpt, half, loss_of, train, trained_alone, worst_error
from tests.ranks import one_rank_group, run_ranks


class _Odd(nn.Module):
    """Odd shapes, a scalar, two dtypes, statistics, a sparse table, and a branch for some calls only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(13, WIDTH, sparse=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.a, self.b = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 5, dtype=torch.float64)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.norm(self.table(tokens))
        total = self.gain * self.a(x).double().mean()
        return total + self.b(x.double()).pow(2).mean() if both else total


def test_odd_models_on_three_ranks():
    """Rank 1 alone uses the second branch; running statistics are those of rank 0."""

    def tokens(step: int, rank: int) -> torch.Tensor:
        return torch.randint(13, (4,), generator=torch.Generator().manual_seed(10 * step + rank))

    def job(rank: int) -> tuple[float, float, torch.Tensor, int]:
        model = ok.replicate(_Odd(), find_unused_parameters=True)
        copies = [_Odd() for _ in range(3)]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.2) for each in (model, *copies)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(tokens(step, rank), both=rank == 1).backward()
            for other, each in enumerate(copies):
                each.norm.running_mean.copy_(copies[0].norm.running_mean)
                each.norm.running_var.copy_(copies[0].norm.running_var)
                each(tokens(step, other), both=other == 1).backward()
            for parameters in zip(*(each.parameters() for each in copies), strict=True):
                grads = [p.grad.to_dense() for p in parameters if p.grad is not None]
                for parameter in parameters:
                    parameter.grad = sum(grads) / 3
            norm = torch.nn.utils.clip_grad_norm_(
                [p for p in model.parameters() if p.grad.layout == torch.strided], 0.05
            )
            wanted = [
                torch.nn.utils.clip_grad_norm_(
                    [p for n, p in each.named_parameters() if "table" not in n], 0.05
                )
                for each in copies
            ]
            assert abs(norm - wanted[0]) < 1e-6
            for optimizer in optimizers:
                optimizer.step()
        pairs = zip(model.module.parameters(), copies[0].parameters(), strict=True)
        error = max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)
        model(tokens(9, rank), both=False)  # begins with rank 0's statistics
        copies[0](tokens(9, rank), both=False)
        means = model.module.norm.running_mean, copies[0].norm.running_mean
        sparse = [span.bytes for span in model.timings() if "table.weight" in span.parameters]
        return (
            error,
            (means[0] - means[1]).abs().max().item(),
            model.module.table.weight.grad.layout,
            sparse[-1],
        )

    for error, means, layout, sparse in run_ranks(3, job):
        assert error < 1e-6
        assert means < 1e-6
        assert layout == torch.sparse_coo
        assert sparse == 4 * (8 + 4 * WIDTH), "four indices, four rows"


def test_statistics_stay_apart_without_broadcast():
    def job(rank: int) -> tuple[bool, bool]:
        torch.manual_seed(rank)
        model = ok.replicate(nn.BatchNorm1d(3), broadcast_buffers=False)
        model.module.running_mean.fill_(float(rank))
        model(torch.zeros(2, 3))
        begun = ok.replicate(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), broadcast_buffers=False)
        weight = begun.module[1].weight.detach().clone()
        dist.broadcast(weight, 0)
        return model.module.running_mean.unique().item(), torch.equal(weight, begun.module[1].weight)

    assert run_ranks(2, job) == [(0.0, True), (pytest.approx(0.9), True)]


def test_what_is_unfrozen_later_is_refused_and_wrapping_anew_mends_it():
    def job(rank: int) -> list[Any]:
        model = gpt(frozen=("blocks.0",))
        truth = trained_alone(model)
        model = ok.replicate(model)
        train(model, half(rank))
        errors = [max(worst_error(model, truth))]
        model.module.blocks[0].requires_grad_(True)
        truth.blocks[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"parameter blocks\.0\.norm\.weight was frozen .* Wrap anew"):
            model(batch(0))
        with torch.no_grad():
            model(batch(0))
        model = ok.replicate(model.module)
        train(model, half(rank))
        train(truth)
        errors.append(max(worst_error(model, truth)))
        model.module.head.requires_grad_(False)
        with pytest.raises(
            RuntimeError, match=r"parameter head\.weight required a gradient .* find_unused_par"
        ):
            model(batch(0))
        patient = ok.replicate(gpt(), find_unused_parameters=True)
        loss_of(patient, batch(0)).backward()
        patient.module.head.requires_grad_(False)
        loss_of(patient, half(rank)(batch(0))).backward()
        return errors

    for errors in run_ranks(2, job):
        assert max(errors) < 2e-6


def test_a_second_hook_is_refused_with_a_remedy():
    with one_rank_group():
        model = ok.replicate(gpt())
        with pytest.raises(
            RuntimeError, match=r"use replicate\(compress=\), or wrap the plain model in torch's"
        ):
            model.register_comm_hook(None, lambda state, bucket: None)
        joined = model.join(divide_by_initial_world_size=False)
        with pytest.raises(ValueError, match="divide_by_initial_world_size=False: DDP cannot"), joined:
            pass


def test_uneven_inputs_with_join():
    def job(rank: int) -> float:
        model = ok.replicate(gpt())
        with model.join():
            for step in range(1 + rank):
                model.zero_grad()
                loss_of(model, batch(step)).backward()
        return model.module.head.weight.grad.sum().item()

    alone = gpt()
    loss_of(alone, batch(1)).backward()
    for total in run_ranks(2, job)[1:]:  # rank 0 had nothing to add, and the sum is halved all the same
        assert total == pytest.approx(alone.head.weight.grad.sum().item() / 2, abs=1e-5)


def test_a_mesh_of_some_ranks():
    def job(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "copy"))
        model = gpt()
        truth = trained_alone(model)
        model = ok.replicate(model, mesh["copy"])
        train(model, half(rank % 2))
        assert {span.group for span in model.timings()} == {mesh["copy"].get_group().group_name, ""}
        return max(worst_error(model, truth))

    assert max(run_ranks(4, job)) < 2e-6


def test_two_replicas_in_one_backward_keep_their_buckets_apart():
    """Their gradients become ready in turns, of as many bytes, and ranks send them at their own pace."""

    def backward(models: list[nn.Module], rows: torch.Tensor) -> None:
        first, second = (loss_of(model, rows) for model in models)
        (first + 3 * second).backward()

    def job(rank: int) -> float:
        models = [gpt(), gpt()]
        truths = [copy.deepcopy(model).double() for model in models]
        replicas = [ok.replicate(model, bucket_cap_mb=0.001) for model in models]
        for each, replica in enumerate(replicas):
            replica._times._lane.delay_s = 0.002 * ((rank + each) % 2)
        for step in range(2):  # from the second on there are several buckets
            for some, rows in ((replicas, half(rank)(batch(step))), (truths, batch(step))):
                for model in some:
                    model.zero_grad()
                backward(some, rows)
        return max(max(worst_error(*pair)) for pair in zip(replicas, truths, strict=True))

    assert max(run_ranks(2, job)) < 2e-6


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(20)))  # 0.25 MiB each

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [4, 16]),  # DDP's own: a bucket is full once it has reached its size
        ({"bucket_cap_mb": 2}, [4, 8, 8]),
        ({"bucket_cap_mb": 0.5}, [2] * 10),
        ({"plan": ShardPlan(bucket_caps_mb=(0.5, 1.0, 2.0))}, [2, 4, 8, 6]),
        ({"plan": ShardPlan()}, [4, 16]),
    ],
)
def test_the_first_bucket_is_small_at_any_size(options: dict[str, Any], sizes: list[int]):
    with one_rank_group():
        model = ok.replicate(_Wide(), **options)
        for _ in range(2):  # the first backward comes before the order is known
            model.timings()
            model(torch.ones(1, 256)).sum().backward()
        spans = [span for span in model.timings() if not span.exposed]
        assert [len(span.parameters) for span in spans] == sizes
        order = [name for span in spans for name in span.parameters]
        assert order == [f"layers.{place}.weight" for place in reversed(range(20))]


def test_spans_say_when_a_bucket_was_ready_and_when_its_turn_came():
    """Dense ones wait for each other; a sparse one, which the backend itself sums, for none of them."""
    sums = [torch.ones(place + 1) for place in range(3)]
    sums.insert(1, torch.ones(2).to_sparse())
    with one_rank_group():
        times, go = BucketTimes({}, dist.group.WORLD), threading.Event()
        times._lane.submit(go.wait)
        futures = []
        for place, sent in enumerate(sums):
            bucket = type("Bucket", (), {"parameters": lambda self, sent=sent: [sent]})()
            reduction = times.reduction(bucket, sent)
            future = times.sum(reduction, sent)
            times.begin(reduction, last=place == 3)
            futures.append(future.then(lambda done, reduction=reduction: times.end(reduction)))
        futures[1].wait()
        went = time.perf_counter_ns()
        go.set()
        torch.futures.wait_all(futures)
        *spans, tail = sorted(times.take(), key=lambda span: span.exposed)
    sparse, *dense = spans
    assert sparse.start == sparse.ready
    assert [span.bytes for span in dense] == [4, 8, 12]
    assert dense[0].start > went > dense[-1].ready
    assert all(after.start >= before.end for before, after in itertools.pairwise(dense))
    assert (tail.start, tail.end) == (dense[-1].ready, dense[-1].end)


def test_a_profilers_trace_has_each_bucket_though_the_lane_sums_it():
    with one_rank_group():
        model = ok.replicate(_Wide(), bucket_cap_mb=2)
        for _ in range(2):  # buckets are rebuilt after the first
            model.timings()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                model(torch.ones(1, 256)).sum().backward()
        buckets = [span for span in model.timings() if not span.exposed]
        noted = [event for event in profile.events() if event.name == "gloo:all_reduce"]
    assert len(noted) == len(buckets) == 3


def test_what_goes_wrong_in_the_lane_is_backwards_error(monkeypatch: pytest.MonkeyPatch):
    """Whatever it is: backward waits for the sum. And exit waits for none."""

    def fail(*arguments: object) -> None:
        raise MemoryError("no room for what others send")

    with one_rank_group():
        model = ok.replicate(gpt())
        assert not model._times._lane.lasting
        monkeypatch.setattr(ring, "all_reduce", fail)
        with pytest.raises(RuntimeError, match="MemoryError: no room for what others send"):
            loss_of(model, batch(0)).backward()


def test_what_overflows_on_the_wire_reaches_the_scaler():
    """On one rank of two only; on both the step is skipped, and the scale goes down."""

    def job(rank: int) -> tuple[list[float], bool, float]:
        model = ok.replicate(nn.Linear(2, 1, bias=False), compress="fp16")
        before = model.module.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        rows = torch.tensor([[1e5 if rank == 0 else 1.0, 1.0]])  # the largest fp16 is 65504
        scaler.scale(model(rows).sum()).backward()
        grads = model.module.weight.grad.flatten().tolist()
        scaler.step(optimizer)
        scaler.update()
        return grads, torch.equal(before, model.module.weight), scaler.get_scale()

    assert run_ranks(2, job) == [([float("inf"), 2.0], True, 1.0)] * 2
