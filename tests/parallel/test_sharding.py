"""Bad input of shard and describe: one clear error, before anything is changed."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import overlapkit as ok
from overlapkit.parallel import describe, sharding
from overlapkit.parallel.meshes import check_current_gpu
from tests.parallel.models import gpt
from tests.ranks import one_rank_group

BAD_OPTIONS = [
    ({"forward_prefetch": -1}, ValueError, "forward_prefetch=-1"),
    ({"forward_prefetch": True}, ValueError, "forward_prefetch=True"),
    ({"backward_prefetch": 1.5}, ValueError, "backward_prefetch=1.5"),
    ({"reshard": "yes"}, ValueError, "reshard='yes'"),
    ({"reshard": None}, ValueError, "reshard=None"),
    ({"reshard": (True, False)}, ValueError, r"reshard=\(True, False\): give 'auto'"),
    ({"mp_policy": "fp8"}, ValueError, "mp_policy='fp8'"),
    ({"mp_policy": torch.bfloat16}, ValueError, "mp_policy=torch.bfloat16"),
    ({"units": "blocks"}, ValueError, "units='blocks'"),
    ({"ignored": "head"}, TypeError, "ignored='head'"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD_OPTIONS)
@pytest.mark.parametrize("function", [ok.shard, describe])
def test_bad_options_also_without_a_group(function: Any, options: Any, kind: Any, message: str):
    with pytest.raises(kind, match=message):
        function(gpt(), **options)


def test_the_policy_is_not_dropped_where_there_is_no_group():
    with pytest.raises(ValueError, match="mp_policy='bf16' needs a process group"):
        ok.shard(gpt(), mp_policy="bf16")


def test_a_number_of_ranks_to_reshard_among_is_right_without_a_group():
    model = gpt()
    assert ok.shard(model, reshard=3) is model


def test_world_size_without_a_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        ok.shard(gpt())
    monkeypatch.setenv("WORLD_SIZE", "1")
    ok.shard(gpt())


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3))


def _scalar() -> nn.Module:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    return model


def _strided() -> nn.Module:
    model = nn.Linear(2, 3)
    model.weight = nn.Parameter(torch.ones(2, 3).t())
    return model


def _empty() -> nn.Module:
    model = nn.Linear(2, 2)
    model.none = nn.Parameter(torch.ones(0, 3))
    return model


def _mixed() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model[0].bfloat16()
    return model


BAD_MODELS = [
    (lambda: "gpt", TypeError, "model=str"),
    (lambda: nn.ReLU(), ValueError, "no parameters"),
    (_lazy, ValueError, "0.weight has no shape yet"),
    (_scalar, ValueError, r"scale is a scalar .* shape \(1,\)"),
    (_strided, ValueError, "weight is not contiguous"),
    (_empty, ValueError, r"none of shape \(0, 3\) has no elements"),
    (lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)), ValueError, "model.0 has sparse gradients"),
    (_mixed, ValueError, "0.weight is torch.bfloat16, 1.weight is torch.float32"),
    (lambda: nn.ModuleList([nn.Linear(2, 2)]), ValueError, "model is a ModuleList"),
]


@pytest.mark.parametrize(("make", "kind", "message"), BAD_MODELS)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_bad_models(make: Any, kind: Any, message: str):
    with pytest.raises(kind, match=message):
        ok.shard(make())


def test_what_is_not_reduced_may_be_empty_or_sparse():
    with one_rank_group():
        model = nn.Sequential(nn.Embedding(3, 2, sparse=True), _empty())
        model[1].none.requires_grad_(False)
        ok.shard(model, ignored=["0"])
        model(torch.arange(3)).sum().backward()
        assert model[0].weight.grad.is_sparse
        assert model[1].weight.grad is not None
        ok.shard(nn.Sequential(nn.Embedding(3, 2, sparse=True).requires_grad_(False), nn.Linear(2, 2)))


def test_frozen_parameters_may_have_a_dtype_of_their_own():
    model = _mixed()
    model[0].requires_grad_(False)
    ok.shard(model)


def test_a_compiled_model_is_too_late():
    with pytest.raises(ValueError, match="call shard first, then compile"):
        ok.shard(torch.compile(gpt(), backend="eager"))


def test_wrapped_models_and_bad_meshes():
    with one_rank_group():
        ddp = nn.parallel.DistributedDataParallel(gpt())
        with pytest.raises(ValueError, match="model is wrapped in DistributedDataParallel"):
            ok.shard(ddp)
        partly = gpt()
        ok.shard(partly.blocks[0])
        for function in (ok.shard, ok.replicate):
            with pytest.raises(ValueError, match=r"model.blocks.0 is sharded already"):
                function(partly)
        with pytest.raises(TypeError, match="mesh='cpu'"):
            ok.shard(gpt(), "cpu")
        with pytest.raises(ValueError, match="3 dimensions"):
            ok.shard(gpt(), init_device_mesh("cpu", (1, 1, 1)))
        with pytest.raises(ValueError, match="without names"):
            ok.shard(gpt(), init_device_mesh("cpu", (1, 1)))
        with pytest.raises(ValueError, match="reshard=3: .* the 1 ranks"):
            ok.shard(gpt(), reshard=3)
        named = gpt()
        named.timings = 3
        with pytest.raises(ValueError, match="'timings' already"):
            ok.shard(named)
        assert type(named).__name__ == "Gpt", "an error must leave the model as it was"


def test_a_model_on_this_rank_s_gpu_while_the_first_one_is_current(monkeypatch: pytest.MonkeyPatch):
    model, mesh = nn.Linear(2, 2, bias=False), mock.Mock(device_type="cuda", ndim=1)
    mesh.size.return_value = 2
    with FakeTensorMode():
        model.weight = nn.Parameter(torch.empty(2, 2, device="cuda:1"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(sharding, "resolve_mesh", lambda *_: mesh)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ValueError, match=r"'cuda:1'.*LOCAL_RANK.*is 'cuda:0': call torch.cuda.set_device"):
        ok.shard(model)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    check_current_gpu(model, mesh)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("CUDA is not asked for nothing"))
    check_current_gpu(nn.Linear(2, 2), mesh)  # FSDP2 moves it, as ever
    check_current_gpu(model, mock.Mock(device_type="cpu"))
    check_current_gpu(model, None)
