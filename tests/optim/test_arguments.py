"""What AdamW refuses, with the argument's name."""

import pytest
import torch
from torch import nn

import overlapkit as ok
from tests.optim.test_adamw import model


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    cases = {
        "params is empty": lambda: ok.AdamW([]),
        "params is empty: give": lambda: ok.AdamW([{"params": []}]),
        "group with max_norm=1": lambda: ok.AdamW([{"params": net.parameters(), "max_norm": 1}]),
        "for CUDA graphs": lambda: ok.AdamW(net.parameters(), capturable=True),
        "betas=0.9": lambda: ok.AdamW(net.parameters(), betas=0.9),
        "two decay rates": lambda: ok.AdamW(net.parameters(), betas=(0.9, 0.99, 0.999)),
        "lr=-1": lambda: ok.AdamW(net.parameters(), lr=-1),
        "eps=-1": lambda: ok.AdamW(net.parameters(), eps=-1),
        "eps=nan": lambda: ok.AdamW(net.parameters(), eps=float("nan")),
        "weight_decay=-1": lambda: ok.AdamW(net.parameters(), weight_decay=-1),
        r"betas\[1\]=1.0": lambda: ok.AdamW(net.parameters(), betas=(0.9, 1.0)),
        "lr is a tensor of 2": lambda: ok.AdamW(net.parameters(), lr=torch.ones(2)),
        "max_norm=0": lambda: ok.AdamW(net.parameters(), max_norm=0),
        "precision='fp8'": lambda: ok.AdamW(net.parameters(), precision="fp8"),
        "moments='fp4'": lambda: ok.AdamW(net.parameters(), moments="fp4"),
        "is for bf16 parameters": lambda: ok.AdamW(net.parameters(), precision="bf16_sr"),
        "precision='fp32', and": lambda: ok.AdamW(model().bfloat16().parameters(), precision="fp32"),
        "its range is too small": lambda: ok.AdamW(model().half().parameters()),
        "foreach=True: torch's own": lambda: ok.AdamW(net.parameters(), moments="bf16", foreach=True),
        "fused=False: torch's own": lambda: ok.AdamW(model().bfloat16().parameters(), fused=False),
        "amsgrad=True with moments='int8'": lambda: ok.AdamW(
            nn.Linear(64, 3).parameters(), moments="int8", amsgrad=True
        ),
        "a part of another tensor": lambda: ok.AdamW(
            [nn.Parameter(torch.zeros(4, 6)[:, ::2])], moments="bf16"
        ),
        "differentiable=True": lambda: ok.AdamW(net.parameters(), differentiable=True),
        "exclude each other": lambda: ok.AdamW(net.parameters(), foreach=True, fused=True),
        "foreach=True and fused=True": lambda: ok.AdamW(
            [{"params": net.parameters(), "foreach": True, "fused": True}]
        ),
        "complex64": lambda: ok.AdamW([torch.zeros(2, dtype=torch.complex64, requires_grad=True)]),
    }
    for message, build in cases.items():
        with pytest.raises(ValueError, match=message):
            build()
    wrong = {
        "params is a Parameter": lambda: ok.AdamW(net.scalar),
        "params is a Sequential": lambda: ok.AdamW(net),
        "params is a int": lambda: ok.AdamW(5),
        "with 'params'": lambda: ok.AdamW([{}]),
        "lr='x'": lambda: ok.AdamW(net.parameters(), lr="x"),
        "eps=None": lambda: ok.AdamW(net.parameters(), eps=None),
        "weight_decay=True": lambda: ok.AdamW(net.parameters(), weight_decay=True),
        "eps is a tensor": lambda: ok.AdamW(net.parameters(), eps=torch.tensor(1e-8)),
        "max_norm='1'": lambda: ok.AdamW(net.parameters(), max_norm="1"),
        "max_norm is a tensor": lambda: ok.AdamW(net.parameters(), max_norm=torch.tensor(1.0)),
        "amsgrad='x'": lambda: ok.AdamW(net.parameters(), amsgrad="x"),
        "foreach='x'": lambda: ok.AdamW(net.parameters(), foreach="x"),
        "fused=0.5": lambda: ok.AdamW([{"params": net.parameters(), "fused": 0.5}]),
        "lr='y'": lambda: ok.AdamW([{"params": net.parameters(), "lr": "y"}]),
    }
    for message, build in wrong.items():
        with pytest.raises(TypeError, match=message):
            build()
    optimizer = ok.AdamW(net[0].parameters())
    with pytest.raises(ValueError, match="eps=-2"):
        optimizer.add_param_group({"params": net[2].parameters(), "eps": -2})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="'param_groups'"):
        optimizer.load_state_dict({})
    sparse = nn.Embedding(4, 2, sparse=True)
    optimizer = ok.AdamW(sparse.parameters())
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="SparseAdam"):
        optimizer.step()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        ok.AdamW(net.parameters())
