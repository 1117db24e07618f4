"""shard(offload=): parameters and gradients on the host, the same numbers; pinned for a GPU only."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import overlapkit as ok
from overlapkit.parallel.offload import resolve_offload
from tests.parallel.models import batch, gpt, half, loss_of
from tests.ranks import one_rank_group, run_ranks

CPU: Any = SimpleNamespace(device_type="cpu")
GPU: Any = SimpleNamespace(device_type="cuda")


def test_two_ranks_train_as_without_also_clipped():
    def job(rank: int) -> bool:
        trained = []
        for offload in (False, True, CPUOffloadPolicy(pin_memory=False), OffloadPolicy()):
            model = ok.shard(gpt(), offload=offload, recompute="full")
            optimizer = ok.AdamW(model.parameters(), lr=0.1, max_norm=0.01)
            for step in range(3):
                loss_of(model, half(rank)(batch(step))).backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
            trained.append([parameter.full_tensor() for parameter in model.parameters()])
        return all(all(map(torch.equal, trained[0], other)) for other in trained[1:])

    assert run_ranks(2, job) == [True, True]


def test_memory_is_pinned_for_a_gpu_only():
    with one_rank_group():
        assert resolve_offload(False, CPU) is None
        assert resolve_offload(True, CPU) == CPUOffloadPolicy(pin_memory=False)
        assert resolve_offload(True, GPU) == CPUOffloadPolicy(pin_memory=True)
        chosen = CPUOffloadPolicy(pin_memory=False)
        assert resolve_offload(chosen, GPU) is chosen


def test_clipping_needs_a_backend_for_the_host(monkeypatch: pytest.MonkeyPatch):
    backends = {"cuda:nccl": True, "cpu:gloo,cuda:nccl": False}
    for backend, warns in backends.items():
        monkeypatch.setattr(torch.distributed, "get_backend_config", lambda backend=backend: backend)
        if warns:
            with pytest.warns(UserWarning, match="backends are 'cuda:nccl', none for the CPU"):
                resolve_offload(True, GPU)
        else:
            resolve_offload(True, GPU)


BAD = [
    (CPUOffloadPolicy(), ValueError, "pins memory, and the mesh is on 'cpu'"),
    (None, TypeError, "offload=None: give True, False, or a"),
    (1, TypeError, "offload=1"),
    ("cpu", TypeError, "offload='cpu'"),
    (CPUOffloadPolicy, TypeError, "offload=<class"),
]


@pytest.mark.parametrize(("offload", "kind", "message"), BAD)
def test_bad_input(offload: Any, kind: type[Exception], message: str):
    model = gpt()
    with one_rank_group(), pytest.raises(kind, match=message):
        ok.shard(model, offload=offload, recompute="full")
    assert not any("forward" in vars(module) for module in model.modules())


def test_without_a_group_it_is_not_dropped():
    with pytest.raises(ValueError, match="offload=True needs a process group"):
        ok.shard(gpt(), offload=True)
