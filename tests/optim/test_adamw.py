"""AdamW against torch.optim.AdamW (bitwise), an fp64 reference of the paper, and torch's own clipping."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import overlapkit as ok
from overlapkit.optim import clip_by_global_norm_, global_norm, table
from tests.cuda_fake import fake_cuda, module_on_device, on_device
from tests.optim.on_fake import kernels_on
from tests.ranks import one_rank_group


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    net.register_parameter("scalar", nn.Parameter(torch.tensor(0.5)))
    net.register_parameter("empty", nn.Parameter(torch.zeros(0, 4)))
    net.register_parameter("strided", nn.Parameter(torch.randn(6, 4).t()))
    return net


def gradients(net: nn.Module, seed: int) -> None:
    """Random gradients in the parameters' layout: on others torch's fused kernel is wrong itself."""
    generator = torch.Generator().manual_seed(seed)
    for param in net.parameters():
        param.grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator))


OPTIONS = [
    {},
    {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3},
    {"amsgrad": True},
    {"maximize": True, "weight_decay": 0.0},
    {"lr": torch.tensor(2e-3)},
    {"foreach": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "default")
def test_bitwise_torch(options: dict) -> None:
    ours, theirs = model(), model()
    how = {} if options.get("foreach") else {"fused": True}
    a = ok.AdamW(ours.parameters(), **options)
    b = torch.optim.AdamW(theirs.parameters(), **how, **options)
    for step in range(10):
        gradients(ours, step)
        gradients(theirs, step)
        a.step()
        b.step()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_close_to_the_paper_in_fp64() -> None:
    net = model()
    params = [p.detach().double().clone() for p in net.parameters()]
    m = [torch.zeros_like(p) for p in params]
    v = [torch.zeros_like(p) for p in params]
    optimizer = ok.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    for t in range(1, 11):
        gradients(net, t)
        for i, param in enumerate(net.parameters()):
            grad = param.grad.double()
            params[i] *= 1 - 1e-2 * 0.1
            m[i] = 0.9 * m[i] + 0.1 * grad
            v[i] = 0.999 * v[i] + 0.001 * grad**2
            params[i] -= 1e-2 * (m[i] / (1 - 0.9**t)) / ((v[i] / (1 - 0.999**t)).sqrt() + 1e-8)
        optimizer.step()
    for p, truth in zip(net.parameters(), params, strict=True):
        torch.testing.assert_close(p.double(), truth, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("max_norm", [0.1, 1e4])
def test_clipping_is_torchs_over_all_groups(max_norm: float) -> None:
    ours, theirs = model(), model()

    def split(net: nn.Module) -> list[dict]:
        return [{"params": list(net.parameters())[:2], "lr": 1e-2}, {"params": list(net.parameters())[2:]}]

    a = ok.AdamW(split(ours), max_norm=max_norm)
    b = torch.optim.AdamW(split(theirs), fused=True)
    assert a.grad_norm is None
    for step in range(5):
        gradients(ours, step)
        gradients(theirs, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        a.step()
        b.step()
        assert torch.equal(a.grad_norm, norm)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)


def test_grad_scaler_and_clipping_see_unscaled_gradients() -> None:
    ours, theirs = model(), model()
    a = ok.AdamW(ours.parameters(), max_norm=0.1)
    b = torch.optim.AdamW(theirs.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        gradients(theirs, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        b.step()
        gradients(ours, step)
        scaler.scale(torch.zeros(()))
        for p in ours.parameters():
            p.grad.mul_(1024.0)
        scaler.step(a)
        scaler.update()
        torch.testing.assert_close(a.grad_norm, norm)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    before = [p.clone() for p in ours.parameters()]
    gradients(ours, 9)
    next(iter(ours.parameters())).grad.fill_(float("inf"))
    scaler.step(a)  # an infinite gradient skips the step, parameters and moments alike
    scaler.update()
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), before, strict=True))


def test_state_exists_from_the_start_and_the_first_step_makes_none() -> None:
    net = model()
    frozen = net[0].bias.requires_grad_(False)
    optimizer = ok.AdamW(net.parameters(), amsgrad=True)
    trained = [p for p in net.parameters() if p.requires_grad]
    before = {(i, k): t.data_ptr() for i, p in enumerate(trained) for k, t in optimizer.state[p].items()}
    assert {key for _, key in before} == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert not optimizer.state[frozen]
    gradients(net, 0)
    frozen.grad = None
    optimizer.step()
    after = {(i, k): t.data_ptr() for i, p in enumerate(trained) for k, t in optimizer.state[p].items()}
    assert before == after
    lazy = ok.AdamW(model().parameters(), eager_state=False)
    assert not any(lazy.state.values())


@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced"])
def test_gradients_of_another_layout_than_their_parameter(layout: str) -> None:
    param, truth = (nn.Parameter(torch.arange(12.0).view(3, 4)) for _ in range(2))
    grad = {
        "transposed": torch.arange(12.0).view(4, 3).t(),
        "expanded": torch.arange(4.0).expand(3, 4),
        "sliced": torch.arange(24.0).view(3, 8)[:, ::2],
    }[layout]
    a, b = ok.AdamW([param]), torch.optim.AdamW([truth], foreach=False)
    for _ in range(3):
        param.grad, truth.grad = grad, grad.contiguous()
        a.step()
        b.step()
    torch.testing.assert_close(param, truth, rtol=1e-6, atol=1e-6)


def test_intermittent_gradients_count_their_own_steps() -> None:
    ours, theirs = model(), model()
    a = ok.AdamW(ours.parameters())
    b = torch.optim.AdamW(theirs.parameters(), fused=True)
    for step in range(4):
        for net in (ours, theirs):
            gradients(net, step)
            for i, p in enumerate(net.parameters()):
                if (i + step) % 2:
                    p.grad = None
        a.step()
        b.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)
        assert a.state[p]["step"].item() == 2


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_state_dict_goes_both_ways(how: dict) -> None:
    ours, theirs = model(), model()
    a = ok.AdamW(ours.parameters(), lr=5e-3)
    b = torch.optim.AdamW(theirs.parameters(), lr=5e-3, **how)
    for step in range(3):
        gradients(ours, step)
        gradients(theirs, step)
        a.step()
        b.step()
    there = torch.optim.AdamW(theirs.parameters(), **how)
    there.load_state_dict(copy.deepcopy(a.state_dict()))
    here = ok.AdamW(ours.parameters())
    here.load_state_dict(copy.deepcopy(b.state_dict()))
    assert here.param_groups[0]["fused"] is True  # how to compute is this optimizer's own affair
    assert here.param_groups[0]["lr"] == 5e-3
    gradients(ours, 7)
    gradients(theirs, 7)
    here.step()
    there.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
        assert here.state[p]["step"].item() == there.state[q]["step"].item() == 4


def test_what_a_loaded_group_cannot_change() -> None:
    net = model()
    optimizer = ok.AdamW(net.parameters())
    for other in (
        torch.optim.Adam(net.parameters()),
        torch.optim.AdamW(net.parameters(), differentiable=True),
    ):
        optimizer.load_state_dict(other.state_dict())
        assert optimizer.param_groups[0]["decoupled_weight_decay"] is True
        assert optimizer.param_groups[0]["differentiable"] is False


def test_loading_the_state_of_a_torch_optimizer_that_never_stepped() -> None:
    net = model()
    optimizer = ok.AdamW(net.parameters())
    optimizer.load_state_dict(torch.optim.AdamW(net.parameters()).state_dict())
    assert all(set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"} for p in net.parameters())


def test_hooks_fire_once_although_torch_patched_its_own_step() -> None:
    torch.optim.AdamW(model().parameters())  # the first instance of a torch class patches that class's step
    net = model()
    optimizer = ok.AdamW(net.parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    gradients(net, 0)
    optimizer.step()
    assert calls == ["pre", "post"]


def test_closure_named_parameters_and_later_groups() -> None:
    net = model()
    optimizer = ok.AdamW(net[0].named_parameters())

    def closure() -> torch.Tensor:
        loss = net[0](torch.ones(2, 5)).square().sum()
        loss.backward()
        return loss

    before = net[0].weight.clone()
    assert optimizer.step(closure) > 0
    assert not torch.equal(before, net[0].weight)
    optimizer.add_param_group({"params": list(net[2].named_parameters()), "lr": 0.5})
    assert set(optimizer.state[net[2].weight]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("closure", [False, True])
def test_a_step_in_a_compiled_function(closure: bool) -> None:
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        optimizer = ok.AdamW(net.parameters(), lr=0.1, max_norm=0.5)

        def backward(net: nn.Module = net) -> Tensor:
            net.zero_grad()
            loss = net(torch.ones(1, 3)).square().sum()
            loss.backward()
            return loss

        def train(optimizer: ok.AdamW = optimizer, backward: Callable[[], Tensor] = backward) -> None:
            if closure:
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()

        step = torch.compile(train, backend="eager") if compiled else train
        for _ in range(3):
            step()
        found.append(net.weight)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_as_the_original(clone: Callable[[Any], Any]) -> None:
    net = model()
    optimizer = ok.AdamW(net.parameters(), max_norm=0.5)
    gradients(net, 0)
    optimizer.step()
    other = clone(optimizer)
    gradients(net, 1)
    there = other.param_groups[0]["params"]
    for p, q in zip(net.parameters(), there, strict=True):
        q.grad = p.grad.clone()
    optimizer.step()
    other.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), there, strict=True))
    assert torch.equal(optimizer.grad_norm, other.grad_norm)
    other.load_state_dict(optimizer.state_dict())
    assert other._step_supports_amp_scaling


@pytest.mark.parametrize(
    "convert", [lambda net: net.double(), lambda net: net.to(memory_format=torch.channels_last)]
)
def test_a_model_converted_after_the_optimizer_was_made(convert: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    ours = nn.Conv2d(3, 4, 3)
    theirs = copy.deepcopy(ours)
    a, b = ok.AdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters(), foreach=False)
    convert(ours)
    convert(theirs)
    for step in range(3):
        gradients(ours, step)
        gradients(theirs, step)
        a.step()
        b.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_moments_are_loaded_into_the_layout_of_their_parameter() -> None:
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = ok.AdamW(net.parameters())
    gradients(net, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].contiguous()
    twin = copy.deepcopy(net)
    other = ok.AdamW(twin.parameters())
    other.load_state_dict(saved)
    for which, each in ((net, optimizer), (twin, other)):
        gradients(which, 1)
        each.step()
    assert torch.equal(net.weight, twin.weight)


def test_dtensors_and_plain_parameters_in_one_group() -> None:
    with one_rank_group():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        twin = copy.deepcopy(net)
        ok.shard(net, ignored=[net[2]])
        a, b = ok.AdamW(net.parameters(), max_norm=0.1), ok.AdamW(twin.parameters(), max_norm=0.1)
        for _ in range(2):
            x = torch.randn(5, 3)
            for which, optimizer in ((net, a), (twin, b)):
                which(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            whole = p.full_tensor() if hasattr(p, "full_tensor") else p
            torch.testing.assert_close(whole, q)


def test_global_norm_of_nothing_and_of_odd_shapes() -> None:
    assert global_norm([]).item() == 0
    grads = [torch.tensor(3.0), torch.zeros(0), torch.full((2, 2), 2.0).t()]
    assert global_norm(grads).item() == 5
    clip_by_global_norm_(grads, 2.5, global_norm(grads))
    assert global_norm(grads).item() == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"max_norm": 0.5}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"precision": "bf16_sr", "moments": "int8"}),
    ],
    ids=str,
)
def test_the_default_device_is_for_others(dtype: torch.dtype, options: dict[str, Any], path: str) -> None:
    """As torch.set_default_device("cuda"), which must not move what belongs to parameters on the host."""
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        net = nn.Linear(130, 6).to(dtype)
        for step in range(3):
            gradients(net, step)
            with torch.device(device):
                if step == 0:
                    optimizer = ok.AdamW(net.parameters(), **options)
                optimizer.step()
                saved = copy.deepcopy(optimizer.state_dict())
                for state in saved["state"].values():
                    state["step"] = step + 1  # as old torch counted
                optimizer.load_state_dict(saved)
        found.append(list(net.parameters()))
    assert all(map(torch.equal, *found))


def test_what_is_page_locked_is_on_the_host_whatever_the_default_device_is() -> None:
    with fake_cuda(), torch.device("meta"):
        assert table._pinned(3).device.type == "cpu"


def test_a_table_is_not_used_again_while_another_stream_reads_it() -> None:
    """Made on one stream, read on another one, where the next one takes its place and it is freed."""
    with fake_cuda() as machine, kernels_on(machine):
        there = module_on_device(model())
        opt = ok.AdamW(there.parameters())
        kept = [on_device(torch.ones_like(p.raw)) for p in there.parameters()]
        for p, grad in zip(there.parameters(), kept, strict=True):
            p.grad = grad
        opt.step()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            opt.step()
            opt.param_groups[0]["lr"] = 0.1
            opt.step()
            opt.load_state_dict(opt.state_dict())
            opt.step()
        gc.collect()
        assert machine.faults == []
        torch.cuda.current_stream().wait_stream(side)


def test_scheduling_on_a_gpu_waits_for_nothing() -> None:
    """The table's copies and both launches on a recorder of streams; the launches run in the interpreter."""
    net = model()
    with fake_cuda() as machine, kernels_on(machine) as launches:
        there = module_on_device(model())
        a = ok.AdamW(there.parameters(), max_norm=0.5)
        b = ok.AdamW(net.parameters(), max_norm=0.5)
        for step in range(3):
            gradients(net, step)
            for p, q in zip(net.parameters(), there.parameters(), strict=True):
                q.grad = on_device(p.grad.clone())
            launches.clear()
            copies = len(machine.copies)
            a.step()
            assert launches == ["squares", "update"]
            assert len(machine.copies) - copies <= (2 if step == 0 else 1)  # and none where nothing changed
            b.step()
        assert machine.syncs == 0
        assert machine.faults == []
        assert a.grad_norm.is_cuda
        for p, q in zip(net.parameters(), there.parameters(), strict=True):
            assert torch.equal(p.detach(), q.detach().raw)
