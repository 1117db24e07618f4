"""A unit gathered early: whatever is done to weights before forward, it computes with what they are."""

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import overlapkit as ok
from overlapkit.parallel.early import EarlyUnshard
from tests.parallel.models import batch, gpt, half, loss_of
from tests.ranks import one_rank_group, run_ranks

Edit = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def _nothing(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    pass


def _in_place(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def _foreach(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """What an average of weights is copied in with; on DTensors it bumps no version."""
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def _data(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def _one_rank(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """A row that one rank holds: all ranks must gather again, or none may, else they wait for ever."""
    if rank == 1:
        model.embed.weight.to_local().data.mul_(0.5)


def _loaded(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    state = {name: value.detach() * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def _saved(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    assert all(value.isfinite().all() for value in model.state_dict().values())


def _stepped_twice(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    optimizer.step()


def _second_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    torch.optim.SGD(model.embed.parameters(), lr=0.3).step()


def _evaluated(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    with torch.no_grad():
        model(batch(9)[:, :-1])


def _evaluated_then_edited(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    _evaluated(model, optimizer, rank)
    _data(model, optimizer, rank)


def _edited_then_evaluated(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    _foreach(model, optimizer, rank)
    _evaluated(model, optimizer, rank)


def _embedded_alone(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """The unit is used without the root's forward before it."""
    _data(model, optimizer, rank)
    with torch.no_grad():
        out.append(model.embed(torch.arange(3)).clone())


out: list[torch.Tensor] = []
EDITS: list[Edit] = [
    _nothing,
    _in_place,
    _foreach,
    _data,
    _one_rank,
    _loaded,
    _saved,
    _stepped_twice,
    _second_optimizer,
    _evaluated,
    _evaluated_then_edited,
    _edited_then_evaluated,
]


def _trained(model: nn.Module, edit: Edit, rank: int) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights of two steps with the edit after each."""
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(2):
        loss = loss_of(model, half(rank)(batch(step)))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        edit(model, optimizer, rank)
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        losses.append(loss_of(model, half(rank)(batch(7))).item())
    return losses, [p.full_tensor().detach() for p in model.parameters()]


def _all_edits(rank: int) -> dict[str, int]:
    gathered: dict[str, int] = {}
    real = EarlyUnshard.gather

    def counted(self: EarlyUnshard) -> None:
        gathered[name] += 1
        real(self)

    EarlyUnshard.gather = counted  # type: ignore[method-assign]  # the process is the test's own
    for how, edits in (({}, EDITS), ({"tied": True}, [_data, _evaluated])):  # first: the embedding; the root
        for edit in edits:
            name = f"{edit.__name__} {how}"
            gathered[name] = 0
            truth = _trained(ok.shard(gpt(**how)), edit, rank)
            assert gathered[name] == 0
            model = ok.shard(gpt(**how), unshard_early=True)
            losses, weights = _trained(model, edit, rank)
            assert losses == truth[0], name  # to the bit: the same sums in the same order
            assert all(map(torch.equal, weights, truth[1])), name
    return gathered


def test_every_way_to_change_weights_gives_what_it_gives_without():
    for gathered in run_ranks(2, _all_edits, timeout=110):
        for name, times in gathered.items():
            twice = name.startswith(("_stepped_twice", "_second_optimizer"))
            assert times == (4 if twice else 2), name


def test_a_unit_that_is_called_alone_is_checked_too():
    def job(rank: int) -> bool:
        results = []
        for early in (False, True):
            out.clear()
            model = ok.shard(gpt(), unshard_early=early)
            model(batch(0)[:, :-1])  # torch wants the root's forward once before a unit's
            _trained(model, _embedded_alone, rank)
            results.append(torch.stack(out))
        return torch.equal(*results)

    assert run_ranks(2, job) == [True, True]


def test_what_was_gathered_early_is_used():
    """The gather runs before forward begins, once, and forward has no other of that unit."""

    def job(rank: int) -> list[tuple[str, bool]]:
        model = ok.shard(gpt(), unshard_early=True)
        optimizer = sgd(model.parameters())
        loss_of(model, batch(0)).backward()
        model.timings()
        optimizer.step()
        forward = time.perf_counter_ns()
        loss_of(model, batch(0)).backward()
        gathers = [span for span in model.timings() if span.name.startswith("all_gather")]
        return [(span.name, span.start < forward) for span in gathers][:2]

    assert run_ranks(2, job) == [[("all_gather embed", True), ("all_gather blocks.0", False)]] * 2


def test_late_staging_saves_the_weights_of_the_step(tmp_path: Any):
    """The copy runs during the next forward and backward, beside what was gathered early."""

    def job(rank: int) -> bool:
        model = ok.shard(gpt(), unshard_early=True)
        optimizer = ok.AdamW(model.parameters(), lr=0.1)
        saved: list[list[torch.Tensor]] = []
        with ok.Checkpointer(tmp_path, every=1, keep=4, stage="late") as checkpointer:
            for step in range(1, 4):
                loss_of(model, half(rank)(batch(step))).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                checkpointer.save(step, {"model": model, "optimizer": optimizer})
                saved.append([p.full_tensor().detach().clone() for p in model.parameters()])
        other = ok.shard(gpt(), unshard_early=True)
        with ok.Checkpointer(tmp_path, every=1, keep=4) as checkpointer:
            step = checkpointer.restore({"model": other, "optimizer": ok.AdamW(other.parameters(), lr=0.1)})
        restored = [p.full_tensor().detach() for p in other.parameters()]
        return step == 3 and all(map(torch.equal, restored, saved[-1]))

    assert run_ranks(2, job) == [True, True]


def test_a_restore_between_two_steps_is_seen(tmp_path: Any):
    def job(rank: int) -> list[bool]:
        losses: list[list[float]] = []
        for early in (False, True):
            model = ok.shard(gpt(), unshard_early=early)
            optimizer = sgd(model.parameters())
            losses.append([])
            with ok.Checkpointer(tmp_path / str(early), every=1, keep=9) as checkpointer:
                for step in range(1, 4):
                    loss = loss_of(model, half(rank)(batch(step)))
                    losses[-1].append(loss.item())
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    if step == 1:
                        checkpointer.save(step, {"model": model})
                    else:
                        checkpointer.wait()
                        checkpointer.restore({"model": model})
        return [losses[0] == losses[1], losses[0][1] != losses[0][2]]

    assert run_ranks(2, job) == [[True, True]] * 2


def test_an_optimizer_of_other_parameters_and_a_step_in_backward_gather_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    gathered: list[int] = []
    monkeypatch.setattr(EarlyUnshard, "gather", lambda self: gathered.append(1))
    with one_rank_group():
        model = ok.shard(gpt(), unshard_early=True)
        loss_of(model, batch(0)).backward()
        torch.optim.SGD(model.blocks.parameters(), lr=0.1).step()
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
        assert gathered == []
        inside = torch.optim.SGD(model.embed.parameters(), lr=0.1)
        model.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda _: inside.step())
        loss_of(model, batch(0)).backward()
        assert gathered == []
        inside.step()
        assert gathered == [1]


def test_torchs_global_hooks_go_with_the_model():
    gc.collect()
    before = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    with one_rank_group():
        model = ok.shard(gpt(), unshard_early=True)
        assert len(_global_optimizer_post_hooks) == before[1] + 1
        gone = weakref.ref(model)
        del model
        gc.collect()
    assert gone() is None
    assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == before
