"""A small training loop whose every part has a state, and what compares two such states bit for bit."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn

DATA = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))


class Cursor:
    """A loader: its position is its state."""

    def __init__(self) -> None:
        self.at = 0

    def __call__(self) -> torch.Tensor:
        self.at += 4
        return DATA[torch.arange(self.at - 4, self.at) % len(DATA)]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Dropout(0.2), nn.Linear(10, 3))


def build(model: nn.Module | None = None, seed: int = 0) -> dict[str, Any]:
    """A state: model, optimizer, scheduler, loader. Seeds the generators."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model = build_model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 7], gamma=0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": Cursor()}


def forward_backward(state: dict[str, Any]) -> float:
    noise = random.random() + float(np.random.rand()) + torch.rand(1).item()
    loss = state["model"](state["loader"]() * noise).square().mean()
    loss.backward()
    return loss.item()


def train_step(state: dict[str, Any]) -> float:
    loss = forward_backward(state)
    state["optimizer"].step()
    state["scheduler"].step()
    state["optimizer"].zero_grad(set_to_none=True)
    return loss


def snapshot(state: dict[str, Any]) -> dict[str, Any]:
    """Copies of all tensors of model and optimizer, and the other parts' states."""
    optimizer = state["optimizer"].state_dict()
    tensors = {f"model.{name}": value for name, value in state["model"].state_dict().items()}
    for index, moments in optimizer["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in moments.items()}
    return {
        "tensors": {name: value.detach().clone() for name, value in tensors.items()},
        "groups": [dict(group) for group in optimizer["param_groups"]],
        "scheduler": dict(state["scheduler"].state_dict()),
        "loader": state["loader"].state_dict(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].copy(),
        "random": random.getstate(),
    }


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two snapshots are the same, bit for bit."""
    assert one["tensors"].keys() == other["tensors"].keys()
    for name, value in one["tensors"].items():
        assert value.dtype == other["tensors"][name].dtype, name
        assert torch.equal(value, other["tensors"][name]), name
    for part in ("groups", "scheduler", "loader", "random"):
        assert one[part] == other[part], part
    assert torch.equal(one["torch"], other["torch"])
    assert (one["numpy"] == other["numpy"]).all()
