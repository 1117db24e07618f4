"""The schedule: options and what torch must have for them; order and bytes of all collectives, by hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import overlapkit as ok
from overlapkit.parallel.schedule import Schedule
from tests.parallel.models import batch, gpt, half, loss_of, train, trained_alone, worst_error
from tests.ranks import run_ranks

NAMES = {
    torch.ops.c10d._allgather_base_: "gather",
    torch.ops.c10d._reduce_scatter_base_: "scatter",
    torch.ops.c10d.allreduce_: "reduce",
}


class Collectives(TorchDispatchMode):
    """Kind and bytes of each collective, in order: of an all-gather its output, of the others their input."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := NAMES.get(func._overloadpacket)) is not None:
            tensor = {"gather": args[0], "scatter": args[1], "reduce": args[0][0]}[name] if args else None
            self.seen.append((name, tensor.nbytes))
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rows(count: int, ranks: int) -> int:
    """Padded to the ranks."""
    return -(-count // ranks) * ranks


def unit_bytes(ranks: int) -> dict[str, int]:
    """By hand, from the shapes of tests/parallel/models.py, in fp32."""
    up, down = rows(13, ranks) * 7 + rows(13, ranks), rows(7, ranks) * 13 + rows(7, ranks)
    norm = 2 * rows(7, ranks)
    block = 4 * (norm + up + down)
    return {"embed": 4 * rows(11, ranks) * 7, "block": block, "head": 4 * (norm + rows(11, ranks) * 7)}


def default_step(ranks: int) -> list[tuple[str, int]]:
    """Forward gathers one unit ahead; backward gathers the block before, then reduces the one behind."""
    size = unit_bytes(ranks)
    gather = {name: ("gather", nbytes) for name, nbytes in size.items()}
    scatter = {name: ("scatter", nbytes) for name, nbytes in size.items()}
    return [
        *(gather[name] for name in ("embed", "block", "block", "block", "head")),
        gather["block"],
        scatter["head"],
        *[gather["block"], scatter["block"]] * 2,
        scatter["block"],
        scatter["embed"],
    ]


def test_a_step_of_64_ranks():
    with fake_world(64):
        model = ok.shard(gpt())
        for _ in range(2):
            with Collectives() as collectives:
                loss_of(model, batch(0)).backward()
            assert collectives.seen == default_step(64)


def test_a_step_of_8_copies_of_8_shards():
    with fake_world(64):
        mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("replicate", "shard"))
        model = ok.shard(gpt(), mesh)
        with Collectives() as collectives:
            loss_of(model, batch(0)).backward()
    expected = []
    for kind, nbytes in default_step(8):
        expected += [(kind, nbytes)] + ([("reduce", nbytes // 8)] if kind == "scatter" else [])
    assert collectives.seen == expected


@pytest.mark.parametrize(
    "options",
    [
        {"reduce_scatter_buffers": 1},
        {"reduce_scatter_buffers": 7},
        {"separate_reduce_scatter": True},
        {"unshard_early": True},  # without an optimizer nothing is early
    ],
    ids=str,
)
def test_no_option_of_the_schedule_changes_what_is_communicated(options: dict[str, Any]):
    if "separate_reduce_scatter" in options and not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
        pytest.skip("needs torch 2.13")
    with fake_world(64):
        model = ok.shard(gpt(), **options)
        with Collectives() as collectives:
            loss_of(model, batch(0)).backward()
        assert collectives.seen == default_step(64)


@pytest.mark.parametrize("copies", [False, True])
def test_an_early_unit_adds_one_small_reduction(copies: bool):
    with fake_world(64):
        mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("replicate", "shard")) if copies else None
        model = ok.shard(gpt(), mesh, unshard_early=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, batch(0)).backward()
        with Collectives() as collectives:
            optimizer.step()
            assert [kind for kind, _ in collectives.seen] == ["gather"]
            loss_of(model, batch(0)).backward()
    step = default_step(8 if copies else 64)
    first, *rest = (one for one in collectives.seen if one != ("reduce", 8))
    assert first == step[0]
    assert collectives.seen[1] == ("reduce", 8)
    assert [one for one in rest if one[0] != "reduce"] == step[1:]


OPTIONS = {
    "all": {"reduce_scatter_buffers": 5, "unshard_early": True},
    "one buffer": {"reduce_scatter_buffers": 1},
    "own communicator": {"separate_reduce_scatter": True},
    "deep": {"forward_prefetch": 9, "backward_prefetch": 9, "reduce_scatter_buffers": 9},
}


def test_numbers_are_those_of_one_process():
    def job(rank: int) -> dict[str, float]:
        errors = {}
        for name, options in OPTIONS.items():
            if name == "own communicator" and not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
                continue
            model = gpt()
            truth = trained_alone(model, steps=3)
            ok.shard(model, **options)
            train(model, half(rank), steps=3)
            errors[name] = max(worst_error(model, truth))
        return errors

    for errors in run_ranks(2, job):
        assert errors
        assert all(error < 2e-6 for error in errors.values()), errors


def test_every_rank_gets_the_same_bits():
    """A replicated gradient, gathered from its shards, and a shard's own bits: both on every rank alike."""

    def job(rank: int) -> list[bytes]:
        model = ok.shard(gpt())
        loss_of(model, half(rank, 3)(batch(0, rows=6))).backward()
        return [p.grad.full_tensor().numpy().tobytes() for p in model.parameters()]

    first, *others = run_ranks(3, job)
    assert all(other == first for other in others)


def test_partial_sums_of_copies_are_not_rounded_between():
    """fp32 parameters reduced in bf16: the sum of shards is rounded once, that of copies once (#194628)."""

    def job(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = gpt()
        truth = trained_alone(model, steps=1)
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        ok.shard(model, mesh, mp_policy=policy)
        train(model, half(rank, 4), steps=1)
        whole = {name: p.grad for name, p in truth.named_parameters()}
        ratios = []
        for name, parameter in model.named_parameters():
            error = (parameter.grad.full_tensor().double() - whole[name]).abs().max().item()
            ratios.append(error / whole[name].abs().max().item())
        return max(ratios)

    assert max(run_ranks(4, job)) < 3 * 2**-8  # a rounding of each input, of each sum: bf16 keeps 8 bits


REFUSED = {
    "unshard_early=1": ({"unshard_early": 1}, TypeError),
    "separate_reduce_scatter='yes'": ({"separate_reduce_scatter": "yes"}, TypeError),
    "reduce_scatter_buffers=0": ({"reduce_scatter_buffers": 0}, ValueError),
    "reduce_scatter_buffers=True": ({"reduce_scatter_buffers": True}, ValueError),
    "reduce_scatter_buffers=1.5": ({"reduce_scatter_buffers": 1.5}, ValueError),
    "comm_memory='fast'": ({"comm_memory": "fast"}, ValueError),
    "reduce_scatter_buffers=2 with comm_memory='symmetric'": (
        {"reduce_scatter_buffers": 2, "comm_memory": "symmetric"},
        ValueError,
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_wrong_option_is_refused_before_anything_is_changed(text: str):
    options, error = REFUSED[text]
    model = gpt()
    with pytest.raises(error, match=text.replace("(", "[(]")):
        ok.shard(model, **options)
    assert not isinstance(model, FSDPModule)


@pytest.mark.parametrize(
    ("options", "method", "version"),
    [
        ({"separate_reduce_scatter": True}, "set_separate_reduce_scatter_group", "2.13"),
        ({"comm_memory": "symmetric"}, "set_symm_mem_for_comm", "2.12"),
        ({"reduce_scatter_buffers": 2}, "set_reduce_scatter_max_input_buffers", "2.13"),
    ],
    ids=str,
)
def test_what_this_torch_does_not_have_is_an_error_that_names_the_version(
    options: dict[str, Any], method: str, version: str
):
    reduced = {name: value for name, value in vars(FSDPModule).items() if name != method}
    older = type("FSDPModule", (), {name: value for name, value in reduced.items() if name[:2] != "__"})
    cuda = type("Mesh", (), {"device_type": "cuda"})
    with (
        mock.patch("torch.distributed.fsdp.FSDPModule", older),
        pytest.raises(RuntimeError, match=f"{next(iter(options))}=.* needs torch {version} or newer"),
    ):
        Schedule(**options).check(cuda)


def _skip_without_symmetric_memory(memory: str | None) -> None:
    if memory == "symmetric" and not hasattr(FSDPModule, "set_symm_mem_for_comm"):
        pytest.skip("FSDP2 has no symmetric memory before torch 2.12")


@pytest.mark.parametrize("memory", ["group", "symmetric"])
def test_memory_of_nccl_is_refused_on_the_cpu(memory: str):
    _skip_without_symmetric_memory(memory)
    with fake_world(2), pytest.raises(ValueError, match=f"comm_memory='{memory}' is NCCL's"):
        ok.shard(gpt(), comm_memory=memory)


class Recorded:
    """A unit's module: what is called on it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append(name)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (None, ["set_custom_all_gather", "set_custom_reduce_scatter"]),
        ("symmetric", ["set_symm_mem_for_comm", "set_custom_reduce_scatter"]),
        ("group", ["set_allocate_memory_from_process_group_for_comm"]),
    ],
)
def test_which_of_torchs_calls_a_gpu_gets(memory: str | None, expected: list[str]):
    """The calls exclude one another: torch refuses its own memory once a custom collective is set."""
    _skip_without_symmetric_memory(memory)
    unit = mock.Mock(modules=[Recorded()], parameters={}, name="a")
    sharding = mock.Mock(mesh=mock.Mock(device_type="cuda", ndim=1))
    with mock.patch("overlapkit.parallel.waits.GatherWaits.surround"):
        Schedule(comm_memory=memory)._set_collectives(sharding, 0, unit, mock.Mock())
    assert unit.modules[0].calls == expected
