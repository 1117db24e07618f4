"""Sharding together with what else a job has: compilation, recomputation, kernels, clipping, checkpoints."""

import copy
import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import overlapkit as ok
from overlapkit.checkpoint import describe
from tests.parallel.models import batch, gpt, loss_of
from tests.ranks import run_ranks

# The compiler asks every tensor for its gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

STEPS = 3


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    names = ((name.replace("_orig_mod.", ""), p) for name, p in model.named_parameters())
    return {name: whole(parameter) for name, parameter in names}


def rows(rank: int, world: int, step: int) -> torch.Tensor:
    return batch(step, 8).chunk(world)[rank]


def trained_by_torch(max_norm: float) -> dict[str, torch.Tensor]:
    """The truth: one process, whole batches, torch's own parts, fp64."""
    model = gpt().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        loss_of(model, batch(step, 8)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def assert_close(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        torch.testing.assert_close(found[name].double(), value, atol=2e-5, rtol=0, msg=name)


def test_compiled_recomputed_sharded_and_with_our_kernels() -> None:
    def train(rank: int) -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        model = gpt()
        assert ok.kernels.swap(model)
        model = ok.shard(
            model, recompute="selective", compile_blocks={"backend": "aot_eager", "fullgraph": True}
        )
        optimizer = ok.AdamW(model.parameters(), lr=0.01, max_norm=0.5)
        for step in range(STEPS):
            loss_of(model, rows(rank, 2, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    truth = trained_by_torch(0.5)
    for found in run_ranks(2, train):
        assert_close(found, truth)


@pytest.mark.parametrize("defer", ["all", "all_reduce", "none"])
def test_accumulation_with_clipping_on_a_hybrid_mesh(defer: str) -> None:
    def train(rank: int) -> tuple[dict[str, torch.Tensor], list[float]]:
        model = ok.shard(gpt(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        optimizer = ok.AdamW(model.parameters(), lr=0.01, max_norm=0.05)
        norms = []
        for step in range(STEPS):
            micro = rows(rank, 4, step).split(1)
            for tokens, scale in ok.accumulate(model, micro, defer=defer):
                (loss_of(model, tokens) * scale).backward()
            optimizer.step()
            norms.append(optimizer.grad_norm.item())
            optimizer.zero_grad(set_to_none=True)
        return weights(model), norms

    truth, results = trained_by_torch(0.05), run_ranks(4, train)
    for found, norms in results:
        assert_close(found, truth)
        assert norms == results[0][1]
        assert min(norms) > 0.05  # so it was clipped


MODES = [
    {"precision": "fp32"},
    {"precision": "bf16_master"},
    {"precision": "bf16_master", "moments": "bf16"},
    {"precision": "bf16_master", "moments": "int8"},
    {"precision": "bf16_kahan", "moments": "int8"},
    {"precision": "bf16_sr", "moments": "bf16"},
    {"precision": "bf16_sr", "amsgrad": True},
]


class Wide(nn.Sequential):
    """Has rows that int8 moments take, and others that they leave."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 5))
        self.to(dtype)


def built(mode: dict[str, Any], sharded: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    model: nn.Module = Wide(torch.float32 if mode["precision"] == "fp32" else torch.bfloat16)
    model = ok.shard(model) if sharded else model
    return {"model": model, "optimizer": ok.AdamW(model.parameters(), lr=0.01, max_norm=1.0, **mode)}


def step_of(state: dict[str, Any], step: int, rank: int, world: int) -> None:
    x = torch.randn(12, 96, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
    dtype = next(state["model"].parameters()).dtype
    state["model"](x.to(dtype)).float().square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def everything(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": value for name, value in weights(state["model"]).items()}
    for index, values in state["optimizer"].state_dict()["state"].items():
        found |= {f"{index}.{n}": whole(v) for n, v in values.items() if isinstance(v, torch.Tensor)}
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A remainder is kept in a dtype in which some of its values are NaN."""
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(bits(found[name]), bits(value)), name


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
def test_every_form_of_the_optimizer_is_saved_resharded_and_resumed_bitwise(
    tmp_path: Path, mode: dict[str, Any]
) -> None:
    def first(rank: int) -> list[dict[str, torch.Tensor]]:
        state = built(mode, True)
        with ok.Checkpointer(tmp_path) as checkpointer:
            for step in range(2):
                step_of(state, step, rank, 2)
            checkpointer.save(2, state)
            seen = [everything(state)]
            for step in range(2, 5):  # the first of them while the save is copied
                step_of(state, step, rank, 2)
        return [*seen, everything(state)]

    def again(rank: int, world: int) -> list[dict[str, torch.Tensor]]:
        state = built(mode, world > 1)
        for step in range(3):  # it had another life before
            step_of(state, 7 + step, rank, world)
        with ok.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.restore(state) == 2
            seen = [everything(state)]
            for step in range(2, 5):
                step_of(state, step, rank, world)
            return [*seen, everything(state)]

    saved, after = run_ranks(2, first)[0]
    assert describe(tmp_path).world == 2
    for found, resumed in run_ranks(2, again, 2):
        assert_same(found, saved)
        assert_same(resumed, after)
    for world in (1, 3):
        results = run_ranks(world, again, world) if world > 1 else [again(0, 1)]
        for found, resumed in results:
            assert_same(found, saved)
            moved = {name: (value - found[name]).abs().max() for name, value in resumed.items()}
            assert any(moved.values())


def test_a_frozen_part_gradient_hooks_and_an_evaluation_between_steps() -> None:
    """Hooks see each gradient once a backward, as in one process; evaluation leaves no trace."""

    def train(rank: int, world: int, evaluate: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
        model = gpt(frozen=("blocks.1",))
        model = ok.shard(model) if world > 1 else model
        seen: list[str] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:

                def halve(parameter: nn.Parameter, name: str = name) -> None:
                    seen.append(name)
                    parameter.grad.mul_(0.5)

                parameter.register_post_accumulate_grad_hook(halve)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = ok.AdamW(trained, lr=0.01, max_norm=0.5)
        for step in range(STEPS):
            if evaluate:
                model.eval()
                with torch.no_grad():
                    assert loss_of(model, rows(rank, world, 90 + step)).isfinite()
                model.train()
            loss_of(model, rows(rank, world, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model), seen

    truth, hooks = train(0, 1, False)
    assert all(
        torch.equal(truth[name], value) for name, value in weights(gpt()).items() if "blocks.1" in name
    )
    plain = run_ranks(2, train, 2, False)
    for (found, seen), (other, _) in zip(plain, run_ranks(2, train, 2, True), strict=True):
        assert sorted(seen) == sorted(hooks)
        assert_close(found, {name: value.double() for name, value in truth.items()})
        assert all(torch.equal(value, other[name]) for name, value in found.items())


def test_a_model_of_one_parameter_and_one_that_is_smaller_than_the_world(tmp_path: Path) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([2.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    def train(rank: int, kind: str) -> tuple[float, float]:
        model: nn.Module = ok.shard(One()) if kind == "shard" else ok.replicate(One())
        optimizer = ok.AdamW(model.parameters(), lr=0.1, max_norm=1.0)
        state = {"model": model, "optimizer": optimizer}
        with (
            ok.Checkpointer(tmp_path / kind) as checkpointer,
            closing(ok.StepMeter(model, optimizer)) as meter,
        ):
            for step in range(3):
                with meter.step():
                    model(torch.tensor([float(rank + 1)])).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                checkpointer.save(step + 1, state)
            last = next(iter(weights(model).values())).item()
            checkpointer.restore(state, 2)
            return last, next(iter(weights(model).values())).item()

    model = One()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen = []
    for _ in range(3):
        (model(torch.tensor([1.0, 2.0, 3.0])).square().sum() / 3).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(model.scale.item())
    for kind, (last, second) in itertools.product(("shard", "replicate"), [(seen[2], seen[1])]):
        for found in run_ranks(3, train, kind):
            assert found == pytest.approx((last, second), abs=1e-6)


def test_a_copy_of_a_model_is_no_part_of_the_job() -> None:
    """An average of weights that is kept beside the model: taken before sharding, it stays whole."""

    def train(rank: int) -> tuple[bool, bool]:
        model = gpt()
        average = copy.deepcopy(model).requires_grad_(False)
        model = ok.shard(model)
        optimizer = ok.AdamW(model.parameters(), lr=0.01)
        loss_of(model, rows(rank, 2, 0)).backward()
        optimizer.step()
        before = weights(average)
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(whole(theirs), 0.5)
        dist.barrier()
        moved = weights(average)
        now = weights(model)
        same = all(torch.allclose(moved[n], torch.lerp(before[n], now[n], 0.5)) for n in moved)
        return same, loss_of(average, batch(1)).isfinite().item()

    assert run_ranks(2, train) == [(True, True)] * 2
