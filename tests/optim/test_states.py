"""States going out and coming in: torch's optimizers, dtypes, shards, other world sizes, checkpoints."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import overlapkit as ok
from overlapkit.optim import clip_grad_norm_, global_norm
from overlapkit.optim.place import place_of
from tests.interpreter import interpreter
from tests.ranks import run_ranks

FORMS: list[dict[str, Any]] = [
    {},
    {"precision": "bf16_kahan", "moments": "bf16"},
    {"precision": "bf16_sr", "moments": "int8"},
]


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(130, 6), nn.Linear(6, 130), nn.Linear(130, 4, bias=False)).to(dtype)


def give(net: nn.Module, step: int) -> None:
    """The same gradients however the parameters are sharded."""
    generator = torch.Generator().manual_seed(step)
    for param in net.parameters():
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = grad


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit: remainders are integers in the guise of fp16, NaN among them."""
    here, there = (getattr(x, "_local_tensor", x).contiguous() for x in (a, b))
    same = here.dtype == there.dtype and here.shape == there.shape
    return same and torch.equal(here.reshape(-1).view(torch.uint8), there.reshape(-1).view(torch.uint8))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give(net, step)
        optimizer.step()


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_our_own_state_goes_on_bitwise(options: dict[str, Any], path: str) -> None:
    net = model()
    a = ok.AdamW(net.parameters(), lr=1e-2, **options)
    train(net, a, range(3))
    twin = copy.deepcopy(net)
    b = ok.AdamW(twin.parameters(), lr=1e-2, **options)
    addresses = [x.data_ptr() for state in b.state.values() for x in state.values()]
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    assert addresses == [x.data_ptr() for state in b.state.values() for x in state.values()]
    train(net, a, range(3, 5))
    train(twin, b, range(3, 5))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_torch_saves_and_loads_states_of_every_dtype(dtype: torch.dtype, moments: str) -> None:
    net = model(dtype)
    a, b = (ok.AdamW(net.parameters(), moments=moments) for _ in range(2))
    train(net, a, range(1))
    for saved in (a.state_dict(), a):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        found = torch.load(file, weights_only=saved is not a)
        b.load_state_dict(found if saved is not a else found.state_dict())
        for param in net.parameters():
            assert all(equal(b.state[param][key], value) for key, value in a.state[param].items())


@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_torch_takes_our_state_and_gives_it_back(options: dict[str, Any], how: dict[str, bool]) -> None:
    net = model()
    ours = ok.AdamW(net.parameters(), lr=1e-2, **options)
    train(net, ours, range(2))
    theirs = torch.optim.AdamW(net.parameters(), **how)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(net, theirs, range(2, 3))
    back = ok.AdamW(net.parameters(), **options)
    back.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert back.param_groups[0]["lr"] == 1e-2
    for param in net.parameters():
        assert back.state[param]["step"] == 3
        known = ours.state[param]
        assert {k: v.dtype for k, v in back.state[param].items()} == {k: v.dtype for k, v in known.items()}
    train(net, back, range(3, 4))


def test_fp32_moments_of_bf16_parameters_stay_fp32_and_torchs_bf16_ones_become_it() -> None:
    net = model()
    ours, other = ok.AdamW(net.parameters()), ok.AdamW(net.parameters())
    train(net, ours, range(2))
    other.load_state_dict(ours.state_dict())
    for param in net.parameters():
        for key, value in ours.state[param].items():
            assert equal(other.state[param][key], value), key
    theirs = torch.optim.AdamW(net.parameters())
    train(net, theirs, range(2))
    other.load_state_dict(theirs.state_dict())
    for param in net.parameters():
        assert other.state[param]["exp_avg"].dtype == torch.float32
        assert torch.equal(other.state[param]["exp_avg"].bfloat16(), theirs.state[param]["exp_avg"])
        assert not other.state[param]["remainder"].any()


def test_a_step_that_is_counted_in_the_group_is_taken() -> None:
    """As apex's FusedAdam has it: from 0 again, bias correction would multiply the next updates."""
    net = model(torch.float32)
    optimizer, saved = ok.AdamW(net.parameters()), torch.optim.AdamW(net.parameters())
    train(net, saved, range(3))
    state = copy.deepcopy(saved.state_dict())
    for group in state["param_groups"]:
        group["step"] = 3
    for one in state["state"].values():
        del one["step"]
    optimizer.load_state_dict(state)
    assert [optimizer.state[p]["step"].item() for p in net.parameters()] == [3] * 5
    assert "step" not in optimizer.param_groups[0]  # nobody would count it on
    del state["param_groups"][0]["step"]
    with pytest.raises(ValueError, match="no 'step' for a parameter of shape"):
        optimizer.load_state_dict(state)


def test_old_and_foreign_forms_of_states_are_taken_and_wrong_ones_refused() -> None:
    net = model(torch.float32)
    optimizer = ok.AdamW(net.parameters(), amsgrad=True)
    saved = torch.optim.AdamW(net.parameters())
    train(net, saved, range(1))
    state = copy.deepcopy(saved.state_dict())
    for group in state["param_groups"]:
        for key in ("maximize", "capturable", "decoupled_weight_decay"):
            del group[key]
        group["amsgrad"] = True
    state["state"][0]["step"] = 7  # torch < 1.12 had a number
    state["state"][1]["step"] = torch.ones(1)  # pytorch#108860
    optimizer.load_state_dict(state)
    steps = [optimizer.state[p]["step"] for p in net.parameters()]
    assert [s.shape for s in steps] == [()] * 5
    assert [s.item() for s in steps[:2]] == [7, 1]
    assert optimizer.param_groups[0]["maximize"] is False
    first = next(net.parameters())
    assert torch.equal(optimizer.state[first]["max_exp_avg_sq"], saved.state[first]["exp_avg_sq"])
    for change, message in (
        ({"exp_avg": torch.zeros(3)}, r"'exp_avg' of shape \(3,\)"),
        ({"exp_avg": None}, "no tensor 'exp_avg'"),
    ):
        wrong = copy.deepcopy(saved.state_dict())
        wrong["state"][0].update(change)
        with pytest.raises(ValueError, match=message):
            ok.AdamW(net.parameters()).load_state_dict(wrong)


def test_a_refused_state_changes_nothing() -> None:
    net = model()
    optimizer = ok.AdamW(net.parameters(), lr=1e-2)
    train(net, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["param_groups"][0]["lr"] = 0.5
    for state in saved["state"].values():
        state["step"] += 7
    saved["state"][4]["exp_avg_sq"] = torch.zeros(3)
    with pytest.raises(ValueError, match="'exp_avg_sq' of shape"):
        optimizer.load_state_dict(saved)
    now = optimizer.state_dict()
    assert now["param_groups"] == before["param_groups"]
    for place, state in before["state"].items():
        assert all(equal(value, now["state"][place][name]) for name, value in state.items())
    train(net, optimizer, range(2, 3))
    assert all(state["step"] == 3 for state in optimizer.state.values())


def test_parameters_without_saved_state_start_from_zero_where_they_were() -> None:
    net = model()
    net[2].weight.requires_grad_(False)
    optimizer = ok.AdamW(net.parameters())
    train(net[0], optimizer, range(2))
    addresses = [s["exp_avg"].data_ptr() for s in optimizer.state.values()]
    optimizer.load_state_dict(torch.optim.AdamW(net.parameters()).state_dict())
    assert [s["exp_avg"].data_ptr() for s in optimizer.state.values()] == addresses
    assert not any(x.any() for s in optimizer.state.values() for x in s.values())
    assert len([s for s in optimizer.state.values() if s]) == 4  # none for what is frozen


def _another_step(state: dict[str, Any]) -> None:
    state["step"] = torch.zeros(())


def _another_moment(state: dict[str, Any]) -> None:
    state["exp_avg_sq"] = torch.ones_like(state["exp_avg_sq"])


def _other_memory(state: dict[str, Any]) -> None:
    for value in state.values():
        value.data = value.data.clone()


@pytest.mark.parametrize("edit", [_another_step, _another_moment, _other_memory])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("within", [False, True], ids=["after backward", "in backward"])
def test_a_state_that_was_edited_is_the_one_that_is_stepped(
    edit: Callable[[dict[str, Any]], None], dtype: torch.dtype, within: bool, path: str
) -> None:
    net = model(dtype)
    twin = copy.deepcopy(net)
    a = ok.optim.optimizer_in_backward(net) if within else ok.AdamW(net.parameters())
    b = torch.optim.AdamW(twin.parameters(), foreach=False)
    for step in range(5):
        if step == 3:
            for state in (*a.state.values(), *b.state.values()):
                edit(state)
        for each, optimizer in ((net, a), (twin, b)):
            optimizer.zero_grad()
            each(torch.linspace(step, 1, 130, dtype=dtype)).square().sum().backward()
            optimizer.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert a.state[p]["step"] == b.state[q]["step"]


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_what_a_program_keeps_beside_it_stays(options: dict[str, Any], path: str) -> None:
    net = model()
    optimizer, twin = ok.AdamW(net.parameters(), **options), ok.AdamW(net.parameters(), **options)
    optimizer.state["of all"] = 5
    for state in list(optimizer.state.values())[:-1]:
        state["of one"] = 0.5
    train(net, optimizer, range(2))
    twin.load_state_dict(optimizer.state_dict())
    train(net, twin, range(1))
    assert twin.state["of all"] == 5
    assert [twin.state[p]["of one"] for p in net.parameters()] == [0.5] * 5


def test_hooks_of_others_see_tensors() -> None:
    net = model()
    a, b = ok.AdamW(net.parameters()), ok.AdamW(net.parameters())
    train(net, a, range(1))
    seen: list[Any] = []
    b.register_load_state_dict_pre_hook(lambda _, given: seen.append(given["state"][0]["exp_avg"].dtype))
    b.register_load_state_dict_post_hook(lambda o: seen.append(next(iter(o.state.values()))["step"].item()))
    b.load_state_dict(a.state_dict())
    assert seen == [torch.float32, 1.0]


def _sharded(rank: int, options: dict[str, Any], in_kernel: bool, folder: str) -> list[torch.Tensor]:
    """Train on two ranks, save in three ways; return the whole parameters."""
    net = model()
    ok.shard(net)
    optimizer = ok.AdamW(net.parameters(), lr=1e-2, max_norm=1.0, **options)
    if in_kernel:
        with interpreter():
            train(net, optimizer, range(2))
    else:
        train(net, optimizer, range(2))
    assert all(s.item() == 2 for s in (optimizer.state[p]["step"] for p in net.parameters()))
    whole = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")
    twin = model()
    ok.shard(twin)
    twin.load_state_dict(net.state_dict())
    other = ok.AdamW(twin.parameters(), **options)
    set_optimizer_state_dict(twin, other, get_optimizer_state_dict(net, optimizer))
    with ok.Checkpointer(f"{folder}/ckpt", every=1) as ckpt:
        ckpt.save(2, {"model": net, "optimizer": optimizer})
    for param, q in zip(net.parameters(), twin.parameters(), strict=True):
        for key, value in optimizer.state[param].items():
            assert equal(value, other.state[q][key]), key
    return [param.full_tensor() for param in net.parameters()]


@pytest.mark.parametrize(
    ("options", "in_kernel"), [(FORMS[0], True), (FORMS[1], False), (FORMS[2], False)], ids=str
)
def test_two_ranks_are_one_and_their_checkpoints_fit_it(
    options: dict[str, Any], in_kernel: bool, tmp_path: Path
) -> None:
    found = run_ranks(2, _sharded, options, in_kernel, str(tmp_path))
    net = model()
    optimizer = ok.AdamW(net.parameters(), lr=1e-2, max_norm=1.0, **options)
    train(net, optimizer, range(2))
    for params in found:
        for p, q in zip(params, net.parameters(), strict=True):
            # the two norms differ in the last digit; what is rounded at random may then round otherwise
            assert ((p.float() - q.float()).abs() > 1e-6 + 2**-9 * q.float().abs()).float().mean() <= 0.01
    again = model()
    restored = ok.AdamW(again.parameters(), lr=1e-2, **options)
    with ok.Checkpointer(tmp_path / "ckpt", every=1) as ckpt:
        assert ckpt.restore({"model": again, "optimizer": restored}) == 2
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), found[0], strict=True))
    twin = ok.AdamW(again.parameters(), lr=1e-2, **options)
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    set_optimizer_state_dict(again, twin, whole, options=StateDictOptions(full_state_dict=True))
    for param in again.parameters():
        for key, value in restored.state[param].items():
            assert equal(value, twin.state[param][key]), key


def _meshes(rank: int) -> tuple[float, float]:
    """Parameters that are plain, sharded over both mesh dimensions, over one, and replicated; two meshes."""
    torch.manual_seed(0)
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    layouts = [None, (flat, [Shard(0)]), (square, [Replicate(), Shard(0)]), (square, [Shard(0), Shard(1)])]
    layouts.append((square, [Shard(1), Replicate()]))
    whole = [torch.randn(10, 64) for _ in layouts]
    grads = [torch.randn(10, 64) for _ in layouts]

    def placed(x: torch.Tensor, layout: Any) -> torch.Tensor:
        return x.clone() if layout is None else distribute_tensor(x, *layout, src_data_rank=None)

    for layout in layouts[3:]:  # a block of int8 moments belongs to the whole tensor, not to a shard
        with pytest.raises(ValueError, match="another dimension than the first"):
            ok.AdamW([nn.Parameter(placed(whole[0], layout))], moments="int8")
    places = [place_of(placed(torch.arange(640).view(10, 64), layout)) for layout in layouts]
    for place, layout in zip(places, layouts, strict=True):
        here = placed(torch.arange(640).view(10, 64), layout)
        here = getattr(here, "_local_tensor", here).flatten()
        i = torch.arange(len(here))
        assert torch.equal(place.base + i // place.inner * place.outer + i % place.inner, here)
    params = [nn.Parameter(placed(x, layout)) for x, layout in zip(whole, layouts, strict=True)]
    single = [nn.Parameter(x.bfloat16()) for x in whole]
    half = [nn.Parameter(placed(x.bfloat16(), layout)) for x, layout in zip(whole, layouts, strict=True)]
    a, b = ok.AdamW(params, max_norm=0.5), ok.AdamW([nn.Parameter(x) for x in whole], max_norm=0.5)
    c, d = (ok.AdamW(p, lr=1e-2, precision="bf16_sr") for p in (half, single))
    for p, q, r, s, grad, layout in zip(
        params, b.param_groups[0]["params"], half, single, grads, layouts, strict=True
    ):
        p.grad, q.grad = placed(grad, layout), grad
        r.grad, s.grad = placed(grad.bfloat16(), layout), grad.bfloat16()
    with interpreter():
        for optimizer in (a, b, c, d):
            optimizer.step()
    for p, q in zip(params, b.param_groups[0]["params"], strict=True):
        full = p.full_tensor() if isinstance(p, DTensor) else p
        torch.testing.assert_close(full, q, rtol=1e-6, atol=1e-6)
    for r, s in zip(half, single, strict=True):  # however it is sharded, it is rounded alike
        assert torch.equal(r.full_tensor() if isinstance(r, DTensor) else r, s)
    norms = []
    for kind in (2.0, float("inf")):
        truth = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]), kind)
        torch.testing.assert_close(global_norm([p.grad for p in params], kind), truth, rtol=1e-6, atol=0)
        with interpreter():
            norm = clip_grad_norm_(params, 0.3, kind)
        torch.testing.assert_close(norm, truth, rtol=1e-6, atol=0)
        for p, grad, layout in zip(params, grads, layouts, strict=True):
            clipped = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            torch.testing.assert_close(clipped, grad * (0.3 / (truth + 1e-6)))
            p.grad = placed(grad, layout)
        norms.append(norm.item())
    dist.barrier()
    return norms[0], a.grad_norm.item()


def test_mixed_meshes_are_stepped_clipped_and_rounded_as_whole_tensors() -> None:
    found = run_ranks(4, _meshes)
    assert len(set(found)) == 1
    assert found[0][0] == pytest.approx(found[0][1])


def _empty(rank: int) -> list[float]:
    """One row on two ranks: the second has nothing of it, and must count the same steps (TE#1986)."""
    net = nn.Linear(3, 1, bias=False)
    ok.shard(net)
    optimizer = ok.AdamW(net.parameters())
    with interpreter():
        train(net, optimizer, range(2))
    return [state["step"].item() for state in optimizer.state.values()]


def test_a_rank_without_elements_counts_its_steps() -> None:
    assert run_ranks(2, _empty) == [[2.0], [2.0]]
