"""FSDP2's two collectives: values and spans, and when the training thread waits for a reduce-scatter."""

import threading
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import overlapkit as ok
from overlapkit.parallel import exchange
from overlapkit.parallel.collectives import AllGather, ReduceScatter
from overlapkit.parallel.traffic import Traffic
from tests.cuda_fake import FakeCuda, fake_cuda, on_device
from tests.parallel.models import batch, gpt, half, loss_of, train, trained_alone, worst_error
from tests.ranks import run_ranks


def test_gathered_values_and_spans():
    def job(rank: int) -> Any:
        traffic = Traffic()
        gather = AllGather("a", ("a.weight",), 0, traffic)
        output = gather.allocate((6,), dtype=torch.float32, device=torch.device("cpu"))
        mine = output.narrow(0, 3 * rank, 3)
        mine.copy_(torch.arange(3.0) + 10 * rank)
        handle = gather(output, mine, dist.group.WORLD)
        assert isinstance(handle, dist.Work)
        assert handle.wait()
        assert handle.is_completed()
        (span,) = [span for span in traffic.log.take() if not span.exposed]
        assert span.ready == span.start <= span.end
        return output.tolist(), span.name, span.bytes, span.parameters

    for values, *span in run_ranks(2, job):
        assert values == [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]
        assert span == ["all_gather a", 24, ("a.weight",)]


class Held:
    """Keeps every reduction from ending until `let_go`: what reads a gradient before that reads rubbish."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.begun = 0
        real = exchange.reduce

        def reduce(output: torch.Tensor, *args: Any, **options: Any) -> Any:
            self.begun += 1
            output.fill_(float("nan"))
            finish = real(output, *args, **options)

            def late() -> None:
                assert self.gate.wait(20), "the training thread waits for a reduction that is held"
                finish()

            return late

        monkeypatch.setattr(exchange, "reduce", reduce)


def test_backward_goes_on_while_reductions_are_under_way(monkeypatch: pytest.MonkeyPatch):
    """All five are held until backward is at its end: a thread that waited for one would not get there."""

    def job(rank: int) -> tuple[float, int, list[str]]:
        held = Held(monkeypatch)
        model = gpt()
        truth = trained_alone(model, steps=1)
        ok.shard(model, reduce_scatter_buffers=9)
        model.embed.register_forward_hook(
            lambda module, args, output: output.register_hook(lambda gradient: held.gate.set()) and None
        )
        train(model, half(rank), steps=1)
        names = [span.name for span in model.timings() if span.exposed and "reduce" in span.name]
        return max(worst_error(model, truth)), held.begun, names

    for error, begun, names in run_ranks(2, job, timeout=40):
        assert error < 2e-6
        assert begun == 5
        assert all(name.startswith("wait reduce_scatter ") for name in names)


def test_no_more_reductions_are_under_way_than_there_are_buffers(monkeypatch: pytest.MonkeyPatch):
    def job(rank: int) -> int:
        held = Held(monkeypatch)
        model = ok.shard(gpt(), reduce_scatter_buffers=3)
        threading.Timer(0.5, lambda: (seen.append(held.begun), held.gate.set())).start()
        seen: list[int] = []
        loss_of(model, batch(0)).backward()
        return seen[0]

    assert run_ranks(2, job, timeout=40) == [3, 3]


def _grads_kept(model: nn.Module) -> None:
    loss_of(model, batch(3)).backward()


def _hooked(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(1.0))


def _kept_whole(model: nn.Module) -> None:
    model.set_reshard_after_backward(False)


WHEN_READ = {
    "gradients are kept": (_grads_kept, {}, {}),
    "a hook reads the gradient": (_hooked, {}, {}),
    "units stay gathered": (
        _kept_whole,
        {},
        {"late": 1},
    ),  # all but the embedding, which needs none in backward
    "a rounded reduction is converted": (
        lambda model: None,
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
        {"tolerance": 2e-3},
    ),
    "fp16 is scaled afterwards": (
        lambda model: None,
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
        {"tolerance": 2e-3},
    ),
    "nobody reads it": (lambda model: None, {}, {"late": 5}),
}


def test_the_training_thread_waits_where_fsdp2_reads_the_result(monkeypatch: pytest.MonkeyPatch):
    """Each reduction writes NaN first and its result later: reading it early shows in the gradient."""

    def job(rank: int) -> dict[str, Any]:
        held = Held(monkeypatch)
        held.gate.set()
        results = {}
        for name, (prepare, options, _) in WHEN_READ.items():
            plain, model = gpt(), ok.shard(gpt(), **options)
            late: list[bool] = []
            real = Traffic.wait_late
            prepare(model)
            if prepare is _grads_kept:
                loss_of(plain, batch(3)).backward()
            with monkeypatch.context() as patch:
                patch.setattr(
                    Traffic,
                    "wait_late",
                    lambda self, one, real=real, late=late: (late.append(True), real(self, one)),
                )
                loss_of(model, batch(4)).backward()
            loss_of(plain, batch(4)).backward()
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            worst = max((ours.grad.full_tensor() - p.grad).abs().max().item() for ours, p in pairs)
            results[name] = worst, len(late)
        return results

    for results in run_ranks(2, job, timeout=60):
        for name, (worst, late) in results.items():
            expected = WHEN_READ[name][2]
            assert worst < expected.get("tolerance", 2e-6), name
            assert late == expected.get("late", 0), name


def test_a_failed_reduction_fails_backward(monkeypatch: pytest.MonkeyPatch):
    def job(rank: int) -> str:
        def fail(*args: Any, **options: Any) -> Any:
            def finish() -> None:
                raise RuntimeError("rank 7 is gone")

            return finish

        monkeypatch.setattr(exchange, "reduce", fail)
        model = ok.shard(gpt())
        with pytest.raises(RuntimeError, match="rank 7 is gone"):
            loss_of(model, batch(0)).backward()
        return "raised"

    assert run_ranks(2, job) == ["raised"] * 2


def _sharded(group_mesh: Any) -> DTensor:
    return distribute_tensor(torch.zeros(4), group_mesh, [Shard(0)])


def test_what_counts_as_only_named():
    def job(rank: int) -> dict[str, bool]:
        mesh, other = init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        two = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        mine, tensor_parallel = nn.Parameter(_sharded(mesh)), nn.Parameter(_sharded(other))
        kept = nn.Parameter(_sharded(mesh))
        kept.grad = _sharded(mesh)
        frozen = nn.Parameter(_sharded(mesh).bfloat16(), requires_grad=False)
        other_gradient = nn.Parameter(_sharded(mesh))
        other_gradient.grad_dtype = torch.bfloat16
        named = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))

        def asked(mesh: Any, *parameters: torch.Tensor) -> bool:
            finders = {str(place): (lambda p=p: p) for place, p in enumerate(parameters)}
            return ReduceScatter("a", finders, 0, Traffic(), mesh)._only_named(torch.float32)

        return {
            "new": asked(mesh, mine, frozen),
            "one kept": asked(mesh, mine, kept),
            "gathered": asked(mesh, nn.Parameter(torch.zeros(4))),
            "tensor-parallel and gathered": asked(named, tensor_parallel),
            "another dtype": asked(mesh, nn.Parameter(_sharded(mesh).bfloat16())),
            "another dtype of gradients": asked(mesh, other_gradient),
            "two dimensions": asked(two, mine),
        }

    (asked,) = run_ranks(1, job)
    assert asked == {name: name == "new" for name in asked}


# CUDA: the real FSDP2 needs one; the fake drives the collectives as FSDP2 does.


@pytest.fixture(params=[None, 1, 2])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    def copy(output: torch.Tensor, given: torch.Tensor, **options: Any) -> None:
        output.copy_(given)

    monkeypatch.setattr("overlapkit.parallel.collectives.all_gather", copy)
    monkeypatch.setattr("overlapkit.parallel.collectives.reduce_scatter", copy)
    monkeypatch.setattr("overlapkit.parallel.collectives.group_name", lambda group: "")
    with fake_cuda(request.param) as machine:
        yield machine
        assert machine.faults == []


def _taken(traffic: Traffic) -> list[Any]:
    return [span for _ in range(12) for span in traffic.log.take()]  # events answer late


def _gather_as_fsdp2(gather: AllGather, stream: Any, *, prefetched: bool, arrive: Any) -> None:
    """Copy-in, all-gather on its stream; the compute stream waits before the unit's forward."""
    shard = on_device(torch.ones(4))
    device = shard.device
    if not prefetched:
        arrive()
    output = gather.allocate((4,), dtype=torch.float32, device=device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert gather(output, shard, None) is None
        event = stream.record_event()
    if prefetched:
        arrive()
    torch.cuda.current_stream().wait_event(event)
    gather.waits.after(device)
    output.add_(1)


def test_only_a_gather_that_ends_after_the_compute_stream_came_was_waited_for(machine: FakeCuda):
    traffic, stream = Traffic(), torch.cuda.Stream()
    gather = AllGather("a", ("a.weight",), 0, traffic)
    arrive = partial(gather.waits.before, torch.device("cuda", 0))
    _gather_as_fsdp2(gather, stream, prefetched=True, arrive=arrive)
    (span,) = _taken(traffic)
    assert (span.name, span.bytes, span.exposed, span.device) == ("all_gather a", 16, False, True)
    assert span.ready <= span.start <= span.end
    assert span.parameters == ("a.weight",)

    _gather_as_fsdp2(gather, stream, prefetched=False, arrive=arrive)
    wait, gathered = sorted(_taken(traffic), key=lambda span: span.name, reverse=True)
    assert (wait.name, wait.exposed, wait.parameters) == ("wait all_gather a", True, ("a.weight",))
    assert wait.start <= gathered.start <= gathered.end <= wait.end

    arrive()
    gather.waits.after(torch.device("cuda", 0))  # the unit is still gathered: nothing was waited for
    assert _taken(traffic) == []


def test_hooks_stand_on_both_sides_of_those_that_are_there(machine: FakeCuda):
    """FSDP2 puts a pre-hook on the unit and, in its forward hook, one on the output's gradient."""
    traffic, seen = Traffic(), []
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda *_: seen.append("FSDP2 in forward"))

    def output_hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: seen.append("FSDP2 in backward"))

    module.register_forward_hook(output_hook)
    gather = AllGather("a", (), 0, traffic)
    gather.waits.before = lambda device: seen.append("before")
    gather.waits.after = lambda device: seen.append("after")
    gather.waits.surround([module])
    module({"x": torch.ones(1, 2)}["x"]).sum().backward()
    assert seen == ["before", "FSDP2 in forward", "after", "before", "FSDP2 in backward", "after"]


@pytest.mark.parametrize("copies", [False, True])
def test_reductions_on_a_device_and_the_tail_behind_them(machine: FakeCuda, copies: bool):
    traffic, scatter, reduce = Traffic(), torch.cuda.Stream(), torch.cuda.Stream()
    mesh = mock.Mock(ndim=2 if copies else 1)
    units = [
        ReduceScatter(name, {f"{name}.w": lambda: nn.Parameter(torch.zeros(1))}, place, traffic, mesh)
        for place, name in enumerate("ba")
    ]

    kept: list[Any] = []

    def reduced_as_fsdp2(unit: ReduceScatter) -> None:
        gradients = unit.allocate((4,), dtype=torch.float32, device=torch.device("cuda", 0))
        gradients.fill_(1.0)
        scatter.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(scatter):
            output = unit.allocate((4,), dtype=torch.float32, device=torch.device("cuda", 0))
            unit(output, gradients, None, dist.ReduceOp.AVG)
        if copies:
            reduce.wait_stream(scatter)
            with torch.cuda.stream(reduce):
                output.mul_(1.0)
                unit.all_reduced(output)
        kept.append((gradients, output))  # as FSDP2 does until backward ends

    class Units(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            for unit in units:
                reduced_as_fsdp2(unit)
            return gradient

    Units.apply(torch.ones(1, requires_grad=True)).backward()
    spans = _taken(traffic)
    for stream in (scatter, reduce):
        torch.cuda.current_stream().wait_stream(stream)
    names = ["reduce_scatter a", "reduce_scatter b", "reduce_scatter tail"]
    names += ["all_reduce a", "all_reduce b"] if copies else []
    assert sorted(span.name for span in spans) == sorted(names)
    found = {span.name: span for span in spans}
    assert [name for name, span in found.items() if span.exposed] == ["reduce_scatter tail"]
    assert found["reduce_scatter a"].ready <= found["reduce_scatter a"].start
    assert found["reduce_scatter a"].parameters == ("a.w",)
    assert found["reduce_scatter tail"].start >= found["reduce_scatter b"].end  # of the last one only
    if copies:
        assert found["all_reduce a"].bytes == 16
        assert found["all_reduce b"].end <= found["all_reduce a"].start
    kept.clear()


class Queued:
    """Work on a stream of the backend's own, 1000 s long; `get_future().wait` is the current stream's."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(1_000_000_000_000)

    def get_future(self) -> "Queued":
        return self

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)


def test_a_gather_that_the_backend_queues_is_timed_from_its_turn_to_its_end(
    machine: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("overlapkit.parallel.collectives.all_gather", lambda *args, **options: Queued())
    traffic, computing = Traffic(), torch.cuda.current_stream()
    gather, output = AllGather("a", (), 0, traffic), on_device(torch.zeros(4))
    torch.cuda._sleep(2_000_000_000_000)
    before = computing.busy_until
    assert isinstance(gather(output, output, None, async_op=True), Queued)
    assert computing.busy_until < before + 900e3, "the step's own stream waits for nothing"
    arrived = traffic.log.mark(computing)
    traffic.log.between("communication", "waited", computing, (arrived, gather.waits.gathered))
    (span, waited) = sorted(_taken(traffic), key=lambda span: span.name)
    assert 900e9 < span.end - span.start < 1100e9
    assert waited.end >= span.end


class Late(dist.Work):
    """Its output is there when somebody has waited for it."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output

    def wait(self, timeout: Any = None) -> bool:
        self.output.fill_(7.0)
        return True


def test_an_all_reduce_begins_where_the_reduce_scatter_before_it_ends(
    machine: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    def slow(output: torch.Tensor, given: torch.Tensor, **options: Any) -> None:
        torch.cuda._sleep(100_000_000_000)

    monkeypatch.setattr("overlapkit.parallel.collectives.reduce_scatter", slow)
    traffic, stream = Traffic(), torch.cuda.current_stream()
    unit = ReduceScatter("a", {}, 0, traffic, mock.Mock(ndim=2))
    output = on_device(torch.zeros(4))
    unit(output, output, None, dist.ReduceOp.AVG)
    torch.cuda._sleep(100_000_000_000)
    unit.all_reduced(output)
    first, second = sorted((s for s in _taken(traffic) if "tail" not in s.name), key=lambda s: s.start)
    assert (first.name, second.name) == ("reduce_scatter a", "all_reduce a")
    assert second.start >= first.end
    assert second.end - second.start > 90e9
    stream.synchronize()


def test_a_backend_that_is_not_gloo_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    def job(rank: int) -> list[float]:
        for name in ("all_gather", "reduce_scatter"):
            monkeypatch.setattr(
                f"overlapkit.parallel.collectives.{name}", lambda output, given, **options: Late(output)
            )
        monkeypatch.setattr(exchange, "direct", lambda group: False)
        traffic, mesh = Traffic(), mock.Mock(ndim=2)
        gathered, scattered, mine = torch.zeros(1), torch.zeros(1), torch.zeros(1)
        AllGather("a", (), 0, traffic)(gathered, mine, dist.group.WORLD).wait()
        ReduceScatter("a", {}, 0, traffic, mesh)(scattered, mine, dist.group.WORLD, dist.ReduceOp.AVG)
        return [gathered.item(), scattered.item()]

    assert run_ranks(1, job) == [[7.0, 7.0]]


def test_a_reduction_waits_for_room_before_it_begins(monkeypatch: pytest.MonkeyPatch):
    """With room for one, for the one under way; what is not the oldest is not waited for."""

    def job(rank: int) -> list[str]:
        said: list[str] = []

        def begin(output: torch.Tensor, given: torch.Tensor, **options: Any) -> Late:
            said.append("begun")
            return Late(output)

        monkeypatch.setattr("overlapkit.parallel.collectives.reduce_scatter", begin)
        monkeypatch.setattr(exchange, "direct", lambda group: False)
        traffic, tensor = Traffic(reductions=2), torch.zeros(1)
        traffic._late.extend(mock.Mock(wait=partial(said.append, name)) for name in ("oldest", "newest"))
        ReduceScatter("a", {}, 0, traffic, mock.Mock(ndim=2))(
            tensor, tensor, dist.group.WORLD, dist.ReduceOp.AVG
        )
        return said

    assert run_ranks(1, job) == [["oldest", "begun"]]


def test_a_reduction_outside_of_any_backward_is_waited_for_at_once():
    waited: list[bool] = []
    Traffic().wait_late(mock.Mock(wait=lambda: waited.append(True)))
    assert waited == [True]


def _on_a_gpu(rank: int) -> list[tuple[str, Any, bool]]:
    traffic, device = Traffic(), torch.device("cuda")
    mesh = init_device_mesh("cuda", (1,))
    gather = AllGather("a", ("a.w",), 0, traffic)
    scatter = ReduceScatter("a", {}, 0, traffic, mesh)
    mine = torch.arange(3.0, device=device)
    output, reduced = torch.empty_like(mine), torch.empty_like(mine)
    assert gather(output, mine, dist.group.WORLD) is None
    scatter(reduced, mine, dist.group.WORLD, dist.ReduceOp.SUM)
    queued = gather(output, mine, dist.group.WORLD, async_op=True)
    assert queued is not None
    queued.wait()
    torch.cuda.synchronize()
    assert torch.equal(output, mine)
    assert torch.equal(reduced, mine)
    return [(span.name, span.bytes, span.exposed) for span in traffic.log.take()]


@pytest.mark.gpu
def test_spans_on_a_gpu_are_of_its_stream():
    (spans,) = run_ranks(1, _on_a_gpu, backend="nccl", start="spawn")
    assert spans == [
        ("all_gather a", 12, False),
        ("reduce_scatter a", 12, False),
        ("all_gather a", 12, False),
    ]
