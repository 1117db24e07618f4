"""replicate: the same bits as DDP, spans of each bucket, compression within rounding."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it; here once, and not in each rank
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import overlapkit as ok
from overlapkit.parallel.shard_plan import ShardPlan
from tests.parallel.models import WIDTH, batch, gpt, half, loss_of, train, trained_alone, worst_error
from tests.ranks import one_rank_group, run_ranks

GRADIENT_BYTES = 4 * sum(p.numel() for p in gpt().parameters())


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_two_ranks_train_as_one():
    def job(rank: int) -> list[float]:
        errors = []
        for how, options in (
            ({}, {}),
            ({"tied": True}, {}),
            ({"frozen": ("blocks.1",)}, {"static_graph": True}),
            ({}, {"bucket_cap_mb": 0.0005}),
        ):
            model = gpt(**how)
            truth = trained_alone(model)
            replica = ok.replicate(model, **options)
            train(replica, half(rank))
            errors.append(max(worst_error(replica, truth)))
        return errors

    for errors in run_ranks(2, job):
        assert max(errors) < 2e-6


@pytest.mark.parametrize(("world", "dtype"), [(2, None), (4, None), (4, torch.bfloat16)], ids=str)
def test_gradients_add_up_in_one_order_wherever_they_lie_in_buckets(world: int, dtype: torch.dtype | None):
    """So a process's first backward, whose buckets are DDP's guess, gives the bits of any other."""

    def job(rank: int) -> list[bool]:
        models = [ok.replicate(gpt().to(dtype), bucket_cap_mb=cap) for cap in (None, 0.001)]
        models += [DistributedDataParallel(gpt().to(dtype))] if world == 2 else []  # two have one order
        found = []
        for model in models:
            for _ in range(2):  # buckets are rebuilt after the first
                model.zero_grad()
                loss_of(model, batch(0, 8).chunk(world)[rank]).backward()
                found.append(_gradients(model))
        return [all(map(torch.equal, gradients, found[0])) for gradients in found[1:]]

    assert all(all(same) for same in run_ranks(world, job))


def test_spans_of_every_bucket_and_one_tail():
    def job(rank: int) -> list[list[tuple[str, Any, bool]]]:
        model = ok.replicate(gpt(), bucket_cap_mb=0.001)
        steps = []
        for step in range(3):
            loss_of(model, batch(step)).backward()
            spans = model.timings()
            (tail,) = [span for span in spans if span.exposed]
            others = [span for span in spans if span is not tail]
            assert max(span.end for span in others) == tail.end
            assert max(span.ready for span in others) == tail.start
            steps.append([(span.name, span.bytes, span.exposed) for span in others])
        with model.no_sync():
            loss_of(model, batch(9)).backward()
        return [*steps, model.timings()]

    for *steps, silent in run_ranks(2, job):
        assert silent == []
        assert [len(spans) > 2 for spans in steps] == [
            False,
            True,
            True,
        ]  # DDP's first backward has one bucket
        for spans in steps:
            assert sum(nbytes for _, nbytes, _ in spans) == GRADIENT_BYTES
        assert steps[0][0][0] == "all_reduce embed.weight .. head.weight (22)"
        names = [name for name, _, _ in steps[-1]]
        assert names[0].startswith("all_reduce head.weight .. "), "gradients are ready from the head down"
        assert names[-1].endswith("embed.weight (5)"), names


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("wire", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_compression_is_one_rounding_and_one_sum(wire: str, dtype: torch.dtype, world: int):
    def job(rank: int) -> tuple[bool, int, torch.dtype]:
        model = ok.replicate(gpt(), compress=wire)
        loss_of(model, half(rank, world)(batch(0))).backward()
        sent = []
        for other in range(world):
            alone = gpt()
            loss_of(alone, half(other, world)(batch(0))).backward()
            sent.append([(g * (1 / world)).to(dtype).float() for g in _gradients(alone)])
        expected = [sum(parts[1:], parts[0]).to(dtype).float() for parts in zip(*sent, strict=True)]
        same = all(torch.equal(a, b) for a, b in zip(_gradients(model), expected, strict=True))
        moved = sum(span.bytes for span in model.timings() if span.bytes)
        return same, moved, _gradients(model)[0].dtype

    assert run_ranks(world, job) == [(True, GRADIENT_BYTES // 2, torch.float32)] * world


class _Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(
            torch.randn(37, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
        )
        self.gain = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.turn.abs().sum() + self.gain.sum()) * x


@pytest.mark.parametrize("world", [2, 3])
def test_complex_gradients(world: int):
    """A bucket holds them as two real numbers each."""

    def job(rank: int) -> bool:
        models = ok.replicate(_Waves()), DistributedDataParallel(_Waves())
        for model in models:
            model(torch.tensor(1.0 + rank)).backward()
        return all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(*map(_gradients, models), strict=True))

    assert all(run_ranks(world, job))


class _Fork(nn.Module):
    """Uses its second branch on demand, and its third never."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, 3, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.a(x) + self.b(x) if both else self.a(x)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_parameters_unused_on_one_rank_and_on_all(option: str):
    def job(rank: int) -> list[list[float | None]]:
        model, steps = ok.replicate(_Fork(), **{option: True}), []
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, WIDTH), both=rank == 0).sum().backward()
            grads = [p.grad for p in model.parameters()]
            steps.append([None if grad is None else grad[0, 0].item() for grad in grads])
        return steps

    assert run_ranks(2, job) == [[[2.0, 1.0, None]] * 3] * 2


def test_copies_and_pickles_are_as_those_of_ddp():
    with one_rank_group():
        model = ok.replicate(gpt())
        plain = DistributedDataParallel(gpt())
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [name for name, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        loss_of(model, batch(0)).backward()
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin.zero_grad()
            loss_of(twin, batch(0)).backward()
            assert all(torch.equal(a, b) for a, b in zip(_gradients(twin), _gradients(model), strict=True))
            assert {span.name for span in twin.timings()} == {
                "all_reduce embed.weight .. head.weight (22)",
                "all_reduce tail",
            }
        assert len(model.timings()) == 2  # one bucket and the tail


def test_a_copy_that_one_rank_keeps_for_itself_does_not_part_it_from_the_others():
    """As an average of the weights on rank 0. What is replicated later is told apart on all ranks."""

    def job(rank: int) -> list[list[torch.Tensor]]:
        first = ok.replicate(gpt())
        if rank == 0:
            copy.deepcopy(first)
        found = []
        for model in (first, ok.replicate(gpt())):
            loss_of(model, half(rank)(batch(0))).backward()
            found.append(_gradients(model))
        return found

    for first, second in run_ranks(2, job):
        assert all(map(torch.equal, first, second))


def _on_a_gpu(rank: int) -> tuple[bool, list[list[tuple[str, Any, bool]]]]:
    ours = ok.replicate(gpt().cuda(), bucket_cap_mb=0.001)
    alone = gpt().cuda()
    steps = []
    for step in range(2):
        for model in (ours, alone):
            model.zero_grad()
            loss_of(model, batch(step).cuda()).backward()
        torch.cuda.synchronize()
        steps.append([(span.name, span.bytes, span.exposed) for span in ours.timings()])
    pairs = zip(_gradients(ours), _gradients(alone), strict=True)
    return all(torch.allclose(a, b, atol=1e-6) for a, b in pairs), steps


@pytest.mark.gpu
def test_spans_of_queued_reductions_on_a_gpu():
    ((same, steps),) = run_ranks(1, _on_a_gpu, backend="nccl", start="spawn")
    assert same
    for spans in steps:
        assert sum(nbytes for _, nbytes, _ in spans if nbytes) == GRADIENT_BYTES
        assert [name for name, _, exposed in spans if exposed] == ["all_reduce tail"]


def test_one_process_without_a_group_gets_its_model_back(monkeypatch: pytest.MonkeyPatch):
    model = gpt()
    assert not dist.is_initialized()
    assert ok.replicate(model, static_graph=True) is model
    with pytest.raises(ValueError, match="compress='bf16' needs a process group"):
        ok.replicate(model, compress="bf16")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        ok.replicate(model)


BAD = [
    ({"plan": object()}, TypeError, "plan="),
    (
        {"plan": ShardPlan(bucket_caps_mb=(1.0,)), "bucket_cap_mb": 5},
        ValueError,
        "the plan decides the buckets",
    ),
    ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb=0"),
    ({"bucket_cap_mb": "25"}, ValueError, "bucket_cap_mb='25'"),
    ({"bucket_cap_mb": float("nan")}, ValueError, "bucket_cap_mb=nan"),
    ({"broadcast_buffers": 1}, TypeError, "broadcast_buffers=1"),
    ({"static_graph": True, "find_unused_parameters": True}, ValueError, "leave one of the two out"),
    ({"compress": "int8"}, ValueError, "compress='int8'"),
    ({"compress": [1]}, ValueError, r"compress=\[1\]: give 'bf16', 'fp16' or None"),
    ({"static_graph": "x"}, TypeError, "static_graph='x': give True or False"),
    ({"find_unused_parameters": "x"}, TypeError, "find_unused_parameters='x': give True or False"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD)
def test_bad_options(options: dict[str, Any], kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        ok.replicate(gpt(), **options)


def test_bad_models():
    with pytest.raises(TypeError, match="model=int"):
        ok.replicate(3)
    with pytest.raises(ValueError, match="no parameters"):
        ok.replicate(nn.ReLU())
    with pytest.raises(ValueError, match="model is a ModuleList, which has no forward"):
        ok.replicate(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match="requires a gradient"):
        ok.replicate(gpt().requires_grad_(False))
    with one_rank_group():
        with pytest.raises(ValueError, match=r"compress='bf16': model.0 has sparse gradients"):
            ok.replicate(nn.Sequential(nn.Embedding(3, 2, sparse=True)), compress="bf16")
        with pytest.raises(TypeError, match="mesh='dp': give a torch DeviceMesh"):
            ok.replicate(gpt(), "dp")
        with pytest.raises(ValueError, match="mesh has 2 dimensions: replicate averages over one"):
            ok.replicate(gpt(), init_device_mesh("cpu", (1, 1)))
        twice = ok.replicate(gpt())
        with pytest.raises(ValueError, match="wrapped in DistributedDataParallel already"):
            ok.replicate(twice)


def test_a_plan_decides_recomputation_with_and_without_a_group():
    plan = ShardPlan(bucket_caps_mb=(0.001,), recompute="every:2")

    def recomputing(model: nn.Module) -> list[bool]:
        return ["forward" in vars(block) for block in model.blocks]

    def job(rank: int) -> tuple[list[bool], float]:
        model = gpt()
        truth = trained_alone(model)
        replica = ok.replicate(model, plan=plan)
        train(replica, half(rank))
        return recomputing(model), max(worst_error(replica, truth))

    assert recomputing(ok.replicate(gpt(), plan=plan)) == [True, False, True]
    for found, error in run_ranks(2, job):
        assert found == [True, False, True]
        assert error < 2e-6
    with pytest.raises(ValueError, match="recompute='every:2': Linear has no repeated blocks"):
        ok.replicate(nn.Linear(2, 2), plan=plan)
