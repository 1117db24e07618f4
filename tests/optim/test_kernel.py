"""The kernel in the interpreter against torch.optim.AdamW: every kind of parameter, gradient and option."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import overlapkit as ok
from overlapkit import launch
from overlapkit.launch import Kernel
from overlapkit.optim import adamw, adamw_state
from tests.kernels.ledger import ledger


@pytest.fixture(autouse=True)
def _interpreted(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "processors", lambda device: 1)  # 16 programs: each gets several tensors


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    names: list[str] = []
    run = Kernel.launch

    def recorded(self: Kernel, *args: Any, **options: Any) -> None:
        names.append(self.__name__)
        run(self, *args, **options)

    monkeypatch.setattr(Kernel, "launch", recorded)
    return names


def same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Equal up to a few ulps of fp32, or one of the parameter's dtype."""
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6 if p.dtype == torch.float32 else 1e-9)


def twins(build: Callable[[], list[Tensor]]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    made = build()
    copies = [torch.empty_like(x).copy_(x) for x in made]
    return [nn.Parameter(x) for x in made], [nn.Parameter(x) for x in copies]


def run(
    ours: list[nn.Parameter],
    theirs: list[nn.Parameter],
    a: torch.optim.Optimizer,
    b: torch.optim.Optimizer,
    gradient: Callable[[Tensor, int], Tensor | None] = lambda p, step: torch.randn(p.shape, dtype=p.dtype),
    steps: int = 3,
) -> None:
    for step in range(steps):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = gradient(p, step)
            q.grad = None if p.grad is None else torch.empty_like(q).copy_(p.grad)
        a.step()
        b.step()
    same(ours, theirs)


SETS: dict[str, Callable[[], list[Tensor]]] = {
    "sizes": lambda: [torch.randn(n) for n in (1, 0, 127, 1024, 4097)] + [torch.tensor(0.5)],
    "permuted": lambda: [
        torch.randn(30, 50).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    "unaligned": lambda: [torch.randn(2051)[3:], torch.randn(70)],
    "a part of another": lambda: [torch.randn(4, 60)[:, ::2], torch.randn(5)],
    "fp64 beside fp32": lambda: [torch.randn(9).double(), torch.randn(1030)],
    "none": lambda: [torch.zeros(0, 3)],
}


@pytest.mark.parametrize("name", SETS)
def test_parameters_of_every_kind(name: str) -> None:
    ours, theirs = twins(SETS[name])
    run(ours, theirs, ok.AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2, foreach=False))


GRADIENTS: dict[str, Callable[[Tensor, int], Tensor | None]] = {
    "permuted": lambda p, _: torch.randn(p.shape[::-1]).permute(*range(p.dim())[::-1]),
    "expanded": lambda p, _: torch.randn(()).expand(p.shape),
    "sliced": lambda p, _: torch.randn(*p.shape[:-1], 2 * p.shape[-1])[..., ::2],
    "unaligned": lambda p, _: torch.randn(p.numel() + 1)[1:].view(p.shape),
    "intermittent": lambda p, step: None if (p.shape[0] + step) % 3 == 0 else torch.randn(p.shape),
    "never": lambda p, _: None,
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_every_kind(name: str) -> None:
    ours, theirs = twins(lambda: [torch.randn(33, 65), torch.randn(64, 32), torch.randn(5, 7)])
    a, b = ok.AdamW(ours), torch.optim.AdamW(theirs, foreach=False)
    run(ours, theirs, a, b, GRADIENTS[name])
    for p, q in zip(ours, theirs, strict=True):
        assert a.state[p]["step"] == b.state[q].get("step", 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_of_another_dtype_than_their_parameter(dtype: torch.dtype) -> None:
    """torch has no such gradients outside of autograd's reach; FSDP2 with reduce_dtype hands them over."""
    params = [nn.Parameter(torch.randn(300)) for _ in range(2)]
    states, grad = adamw_state(params), torch.randn(300).to(dtype)
    with torch.no_grad():
        adamw(params[:1], [grad], states[:1], lr=1e-2)
    truth = nn.Parameter(params[1].detach().clone())
    truth.grad = grad.float()
    start = params[1].detach().clone()
    torch.optim.AdamW([truth], lr=1e-2, foreach=False).step()
    adamw(params[1:], [grad.float()], states[1:], lr=1e-2)
    same([params[1]], [truth])
    assert not torch.equal(params[1], start)
    assert torch.equal(states[0]["exp_avg"], states[1]["exp_avg"])


OPTIONS: list[dict[str, Any]] = [
    {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3},
    {"amsgrad": True},
    {"maximize": True, "weight_decay": 0.0},
    {"betas": (0.0, 0.0), "eps": 1e-3},
    {"lr": torch.tensor(2e-3)},
    {"lr": 0.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o))
def test_options(options: dict[str, Any]) -> None:
    ours, theirs = twins(lambda: [torch.randn(1030), torch.randn(3, 5)])
    run(ours, theirs, ok.AdamW(ours, **options), torch.optim.AdamW(theirs, foreach=False, **options))


def test_groups_of_every_option_and_dtype_are_one_launch(launches: list[str]) -> None:
    shapes = [(1030,), (3, 5), (2, 300), ()]
    ours, theirs = twins(lambda: [torch.randn(s) for s in shapes])

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        options = [{"lr": 1e-2}, {"maximize": True}, {"amsgrad": True, "eps": 1e-5}, {"weight_decay": 0.5}]
        return [{"params": [p], **o} for p, o in zip(params, options, strict=True)]

    a, b = ok.AdamW(groups(ours)), torch.optim.AdamW(groups(theirs), foreach=False)
    later, other = twins(lambda: [torch.randn(40)])
    half = nn.Parameter(torch.randn(1, 130).bfloat16())
    for optimizer, more in ((a, later), (b, other)):
        optimizer.add_param_group({"params": more, "betas": (0.5, 0.9)})
    a.add_param_group({"params": [half]})
    half.grad = torch.ones_like(half)
    run(ours + later, theirs + other, a, b)
    assert launches == ["update"] * 3
    a.max_norm = 1e9
    launches.clear()
    a.step()
    assert launches == ["squares", "update"]


def test_hyperparameters_that_change_are_seen() -> None:
    ours, theirs = twins(lambda: [torch.randn(50), torch.randn(1100)])
    a, b = ok.AdamW(ours), torch.optim.AdamW(theirs, foreach=False)
    for step in range(3):
        for optimizer in (a, b):
            optimizer.param_groups[0].update(lr=1e-2 / (step + 1), weight_decay=0.1 * step, betas=(0.5, 0.9))
        run(ours, theirs, a, b, steps=1)
        for optimizer in (a, b):  # and with gradients where they were
            optimizer.param_groups[0]["lr"] = 3e-2
            optimizer.step()
    same(ours, theirs)


@pytest.mark.parametrize("max_norm", [0.1, 1e4])
def test_clipping_with_scaled_gradients_of_several_dtypes(max_norm: float) -> None:
    ours, theirs = twins(lambda: [torch.randn(1500), torch.randn(3, 5), torch.randn(200)])
    a, b = ok.AdamW(ours, max_norm=max_norm), torch.optim.AdamW(theirs, foreach=False)
    a.grad_scale, a.found_inf = torch.tensor([1024.0]), torch.tensor([0.0])
    for _ in range(3):
        kept = []
        for p, q in zip(ours, theirs, strict=True):
            q.grad = torch.randn(q.shape)
            p.grad = q.grad * 1024.0
            kept.append(p.grad.clone())
        norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        a.step()
        b.step()
        torch.testing.assert_close(a.grad_norm, norm)
        assert all(torch.equal(p.grad, k) for p, k in zip(ours, kept, strict=True))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    before = [p.clone() for p in ours]
    a.found_inf = torch.tensor([1.0])
    a.step()
    assert all(torch.equal(p, k) for p, k in zip(ours, before, strict=True))
    assert [a.state[p]["step"].item() for p in ours] == [3, 3, 3]


def test_an_infinite_norm_spoils_all_as_in_torch() -> None:
    ours, theirs = twins(lambda: [torch.randn(5), torch.randn(3)])
    a, b = ok.AdamW(ours, max_norm=1.0), torch.optim.AdamW(theirs, foreach=False)
    for params in (ours, theirs):
        params[0].grad, params[1].grad = torch.full((5,), float("inf")), torch.ones(3)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    a.step()
    b.step()
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert a.grad_norm.isinf()


def test_two_runs_agree_bitwise_and_gradients_stay_as_they_are() -> None:
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        params = [nn.Parameter(torch.randn(s).bfloat16()) for s in ((5, 130), (700,))]
        optimizer = ok.AdamW(params, precision="bf16_sr", moments="int8", max_norm=0.5)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn(p.shape).bfloat16()
            before = [p.grad.clone() for p in params]
            optimizer.step()
            assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))
        results.append([*params, *(s for state in optimizer.state.values() for s in state.values())])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_a_graph_that_still_needs_the_old_weight_notices_the_step() -> None:
    param = nn.Parameter(torch.randn(4))
    optimizer = ok.AdamW([param])
    loss = (param * param).sum()
    param.grad = torch.ones(4)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 2)), min_size=1, max_size=5),
    programs=st.integers(1, 3),
    missing=st.integers(0, 31),
)
def test_any_set_of_parameters(sizes: list[tuple[int, int]], programs: int, missing: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("overlapkit.optim.table._PROGRAMS", programs)
        torch.manual_seed(len(sizes))
        ours, theirs = twins(lambda: [torch.randn(n) for n, _ in sizes])
        index = {0: [], 1: [], 2: []}
        for i, (_, group) in enumerate(sizes):
            index[group].append(i)

        def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
            return [{"params": [params[i] for i in index[g]], "lr": 10.0**-g} for g in index if index[g]]

        places = {id(p): i for i, p in enumerate(ours)}
        a, b = ok.AdamW(groups(ours)), torch.optim.AdamW(groups(theirs), foreach=False)
        run(
            ours,
            theirs,
            a,
            b,
            lambda p, _: None if missing >> places[id(p)] & 1 else torch.randn(p.shape),
            steps=2,
        )


FLOORS = [
    ({}, torch.float32, torch.float32, 28),
    ({"moments": "bf16"}, torch.float32, torch.float32, 20),
    ({}, torch.bfloat16, torch.bfloat16, 26),
    ({"precision": "bf16_sr"}, torch.bfloat16, torch.bfloat16, 22),
    ({"precision": "bf16_kahan", "moments": "bf16"}, torch.bfloat16, torch.bfloat16, 18),
    ({"precision": "bf16_sr", "moments": "int8"}, torch.bfloat16, torch.bfloat16, 10.125),
    ({"amsgrad": True}, torch.float32, torch.float32, 36),
]


@pytest.mark.parametrize(("options", "dtype", "grad_dtype", "floor"), FLOORS, ids=str)
def test_bytes_per_parameter(
    options: dict[str, Any], dtype: torch.dtype, grad_dtype: torch.dtype, floor: float
) -> None:
    """Each tensor read once and written once: what the table costs is below 2 %, at 32,768 elements."""
    params = [nn.Parameter(torch.zeros(64, 256, dtype=dtype)) for _ in range(2)]
    optimizer = ok.AdamW(params, **options)
    for p in params:
        p.grad = torch.zeros(p.shape, dtype=grad_dtype)
    optimizer.step()
    with ledger() as count:
        optimizer.step()
    assert floor <= count.total / (2 * 64 * 256) <= 1.02 * floor
    optimizer.max_norm = 1.0
    with ledger() as clipped:
        optimizer.step()
    floor += grad_dtype.itemsize
    assert floor <= clipped.total / (2 * 64 * 256) <= 1.02 * floor
