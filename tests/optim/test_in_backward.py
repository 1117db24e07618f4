"""The optimizer in backward against the same optimizer after it, and what it refuses."""

import copy

import pytest
import torch
from torch import nn

import overlapkit as ok
from overlapkit.optim import optimizer_in_backward
from tests.ranks import run_ranks


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def test_updates_as_adamw_does_and_frees_gradients() -> None:
    inside, after = model(), model()
    a, b = optimizer_in_backward(inside, lr=1e-2), ok.AdamW(after.parameters(), lr=1e-2)
    for step in range(4):
        x = torch.randn(3, 5)
        for net, optimizer in ((inside, a), (after, b)):
            net(x).square().sum().backward()
            if net is inside:
                assert all(p.grad is None for p in net.parameters())
            optimizer.step()
            optimizer.zero_grad()
        a.param_groups[0]["lr"] = b.param_groups[0]["lr"] = 1e-2 / (step + 1)
    for p, q in zip(inside.parameters(), after.parameters(), strict=True):
        assert torch.equal(p, q)
    b.load_state_dict(a.state_dict())
    assert b.state[next(after.parameters())]["step"] == 4
    a.remove()
    inside(torch.ones(1, 5)).sum().backward()
    assert all(p.grad is not None for p in inside.parameters())


def test_a_parameter_is_updated_while_others_have_no_gradient_yet() -> None:
    net = model()
    optimizer = optimizer_in_backward(net)
    first, last = net[0].weight.clone(), net[2].weight.clone()
    seen = []
    net[0].weight.register_hook(lambda g: seen.append(torch.equal(net[2].weight, last)))
    net(torch.ones(1, 5)).sum().backward()
    assert seen == [False]
    assert not torch.equal(net[0].weight, first)
    optimizer.step()


def test_a_model_that_was_moved_and_groups_that_came_later(path: str) -> None:
    inside, after = model(), model()
    a, b = optimizer_in_backward(inside, lr=1e-2), ok.AdamW(after.named_parameters(), lr=1e-2)
    for step in range(3):
        for net, optimizer in ((inside, a), (after, b)):
            if step == 1:
                net[0].weight.data = net[0].weight.detach().clone()
            if step == 2:
                net.append(nn.Linear(2, 2).requires_grad_(True))
                nn.init.ones_(net[3].weight)
                nn.init.zeros_(net[3].bias)
                optimizer.add_param_group({"params": list(net[3].named_parameters("3")), "lr": 0.5})
            net(torch.ones(1, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(inside.parameters(), after.parameters(), strict=True))
    assert not torch.equal(inside[3].weight, torch.ones(2, 2))
    a.remove()
    a.remove()


def test_what_cannot_be_right_is_refused() -> None:
    net = model()
    with pytest.raises(ValueError, match="max_norm=1.0: the global norm"):
        optimizer_in_backward(net, max_norm=1.0)
    with pytest.raises(TypeError, match="model is a list"):
        optimizer_in_backward(list(net.parameters()))
    with pytest.raises(ValueError, match="nothing would be updated"):
        optimizer_in_backward(nn.Tanh())
    optimizer = optimizer_in_backward(net)
    net(torch.ones(1, 5)).sum().backward()
    with pytest.raises(RuntimeError, match=r"2\.bias got a second gradient|2\.weight got a second gradient"):
        net(torch.ones(1, 5)).sum().backward()
    optimizer.zero_grad()
    for param in net.parameters():
        param.grad = None
    optimizer.step()
    net[0].weight.grad = torch.ones_like(net[0].weight)
    with pytest.raises(RuntimeError, match=r"0\.weight has a gradient"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: 0.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(optimizer)


def _sharded(rank: int) -> None:
    inside, after = model(), model()
    ok.shard(inside)
    ok.shard(after)
    a, b = optimizer_in_backward(inside, lr=1e-2), ok.AdamW(after.parameters(), lr=1e-2)
    for step in range(3):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        for net, optimizer in ((inside, a), (after, b)):
            net(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(inside.parameters(), after.parameters(), strict=True):
        assert p.grad is None
        assert torch.equal(p.to_local(), q.to_local())
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        optimizer_in_backward(nn.parallel.DistributedDataParallel(model()))


def test_with_fsdp2() -> None:
    run_ranks(2, _sharded)
