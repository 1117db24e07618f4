"""Groups: how each computes and is scaled, single tensors as parameters, layouts that are the same."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import overlapkit as ok
from overlapkit.optim import by_torch
from overlapkit.optim.optimizer import AdamW


def step_through_scaler(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], value: float) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    for param in params:
        param.grad = torch.full_like(param, 8.0 * value)
    scaler.step(optimizer)


def test_a_group_may_be_a_single_tensor() -> None:
    groups = [
        {"params": nn.Parameter(torch.zeros(3))},
        {"params": nn.Parameter(torch.zeros(()))},
        {"params": []},
    ]
    assert AdamW.memory(groups) == 64 + 2 * 64 + 64 + 2 * 64
    assert [len(group["params"]) for group in ok.AdamW(groups, lr=np.float32(1e-3)).param_groups] == [1, 1, 0]


@pytest.mark.parametrize(
    ("whole", "own", "wanted"),
    [
        ({}, {"foreach": True}, (True, False)),
        ({"foreach": True}, {"fused": True}, (None, True)),
        ({"fused": False}, {"fused": None}, (None, False)),
        ({"foreach": True}, {}, (True, False)),
        ({}, {"fused": False}, (None, False)),
    ],
)
def test_a_group_chooses_how_it_computes(
    whole: dict[str, Any], own: dict[str, Any], wanted: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = ok.AdamW([{"params": [param], **own}], **whole)
    group = optimizer.param_groups[0]
    assert (group["foreach"], group["fused"]) == wanted
    seen: list[Any] = []
    real = by_torch.adamw
    monkeypatch.setattr(by_torch, "adamw", lambda *a, **k: (seen.append(k["foreach"]), real(*a, **k)))
    param.grad = torch.ones(3)
    optimizer.step()
    assert seen == ([] if wanted[1] else [wanted[0]])


@pytest.mark.parametrize("kind", ["sliced", "own loop"])
def test_a_scale_is_taken_out_where_torchs_loops_know_none(kind: str) -> None:
    def build() -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 6)[:, ::2])]

    ours, theirs = build(), build()
    groups = [{"params": ours[:1]}, {"params": ours[1:], **({} if kind == "sliced" else {"fused": False})}]
    a, b = ok.AdamW(groups), torch.optim.AdamW(theirs, foreach=False)
    step_through_scaler(a, ours, 0.5)
    step_through_scaler(b, theirs, 0.5)
    torch.testing.assert_close(ours, theirs)
    assert (ours[1] < 1).all()
    step_through_scaler(a, ours, float("inf"))
    torch.testing.assert_close(ours, theirs)
    assert [a.state[p]["step"].item() for p in ours] == [1, 1]


SAME_ORDER = {
    "depthwise, channels last": lambda: torch.randn(8, 1, 3, 3).to(memory_format=torch.channels_last),
    "a column": lambda: torch.randn(1, 4).t(),
    "a row of a table": lambda: torch.randn(2, 5, 3)[:1].transpose(0, 1),
}


@pytest.mark.parametrize("name", SAME_ORDER)
def test_strides_of_size_one_say_nothing_about_the_layout(name: str, path: str) -> None:
    """Planned anew and loaded again, such a parameter keeps its state."""
    param, other = nn.Parameter(SAME_ORDER[name]()), nn.Parameter(torch.ones(2))
    truth = nn.Parameter(param.detach().clone())
    a, b = ok.AdamW([param, other]), torch.optim.AdamW([truth], foreach=False)
    address = a.state[param]["exp_avg"].data_ptr()
    for step in range(3):
        param.grad, other.grad = torch.randn_like(param), torch.ones(2) if step != 1 else None
        truth.grad = param.grad.clone()
        a.step()
        b.step()
        a.load_state_dict(copy.deepcopy(a.state_dict()))
    assert a.state[param]["exp_avg"].data_ptr() == address
    torch.testing.assert_close(param, truth, rtol=1e-6, atol=1e-6)


def test_a_copy_made_before_the_first_step_may_be_converted() -> None:
    optimizer = copy.deepcopy(ok.AdamW(nn.Linear(3, 2).parameters()))
    for param in optimizer.param_groups[0]["params"]:
        param.data = param.data.double()
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all(state["exp_avg"].dtype == torch.float64 for state in optimizer.state.values())
