"""What is found by structure and numbers: modules as people write them, and those that only look so."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from overlapkit import kernels
from overlapkit.kernels.swap.fused import Fused, Gated
from tests.ranks import run_ranks

W, HIDDEN = 8, 12


class Norm(nn.Module):
    """As Llama's: rounded to x's dtype before the weight."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(W) + 0.5)
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class ZeroCentred(nn.Module):
    """As Gemma's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(W) - 0.5)
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class Sub(nn.RMSNorm):
    """Of a class that there is a kernel for."""


class Centred(Norm):
    """As Cohere's: a LayerNorm without a bias."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class InFloat32(nn.LayerNorm):
    """As CLIP's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type_as(x)


class FeedForward(nn.Module):
    """As Meta's Llama: no names that say anything, no module for the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(W, HIDDEN, bias=False), nn.Linear(W, HIDDEN)
        self.w2 = nn.Linear(HIDDEN, W)

    def forward(self, x: Tensor) -> Tensor:
        y = self.w2(F.silu(self.w1(x)) * self.w3(x))
        assert isinstance(y, Tensor)
        return y


class GatedMLP(nn.Module):
    """As transformers have them."""

    def __init__(self, act_fn: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(W, HIDDEN),
            nn.Linear(W, HIDDEN),
            nn.Linear(HIDDEN, W),
        )
        self.act_fn = act_fn

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PackedMLP(nn.Module):
    def __init__(self, gate_first: bool) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(W, 2 * HIDDEN), nn.Linear(HIDDEN, W)
        self.gate_first = gate_first

    def forward(self, x: Tensor) -> Any:
        first, second = self.gate_up_proj(x).chunk(2, dim=-1)
        gate, up = (first, second) if self.gate_first else (second, first)
        return self.down_proj(up * F.gelu(gate))


class Square(nn.Module):
    """All three layers have one size: only numbers tell which is which."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(W, W) for _ in "abc")

    def forward(self, x: Tensor) -> Any:
        return self.a(self.b(x) * F.silu(self.c(x)))


FOUND: dict[str, Callable[[], nn.Module]] = {
    "norm": Norm,
    "zero-centred norm": ZeroCentred,
    "subclass": lambda: Sub(W, eps=1e-6),
    "centred norm": Centred,
    "in float32": lambda: InFloat32(W),
    "feed-forward": FeedForward,
    "silu": lambda: GatedMLP(nn.SiLU()),
    "gelu": lambda: GatedMLP(nn.GELU()),
    "gelu tanh": lambda: GatedMLP(nn.GELU("tanh")),
    "gate first": lambda: PackedMLP(True),
    "gate last": lambda: PackedMLP(False),
    "square": Square,
}


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found_computes_the_same(path: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = FOUND[name]()
    x = (3 * torch.randn(2, 5, W)).requires_grad_()
    expected, keys = gradients(module, x), list(module.state_dict())
    kind, attributes = type(module), dict(vars(module))
    result = kernels.swap(module)
    assert result.changed == [""], result.skipped
    assert isinstance(module, kind)
    assert type(module).__name__ == f"Fused{kind.__name__}"
    assert repr(module).startswith(f"Fused{kind.__name__}(")
    assert list(module.state_dict()) == keys
    torch.testing.assert_close(gradients(module, x), expected, rtol=1e-4, atol=1e-4)
    assert "runs fused already" in kernels.swap(module).skipped[""]
    result.undo()
    assert type(module) is kind
    assert vars(module).keys() == attributes.keys()
    for a, b in zip(gradients(module, x), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("silu", Gated("gate_proj", "up_proj", "down_proj", "silu")),
        ("gelu", Gated("gate_proj", "up_proj", "down_proj", "gelu")),
        ("gelu tanh", Gated("gate_proj", "up_proj", "down_proj", "gelu_tanh")),
        ("gate last", Gated("gate_up_proj", None, "down_proj", "gelu", "up_gate")),
        ("square", Gated("c", "b", "a", "silu")),
        ("feed-forward", Gated("w1", "w3", "w2", "silu")),
    ],
)
def test_the_right_one_of_close_forms(name: str, expected: Gated) -> None:
    module = FOUND[name]()
    kernels.swap(module)
    assert isinstance(module, Fused)
    assert module._fused == expected


def test_the_kernels_run(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from overlapkit.launch import Kernel

    launched: list[str] = []
    launch = Kernel.launch
    monkeypatch.setattr(
        Kernel, "launch", lambda self, *a, **k: (launched.append(self.fn.__module__), launch(self, *a, **k))
    )
    model = nn.Sequential(Norm(), FeedForward(), PackedMLP(True))
    kernels.swap(model)
    assert launched == [], "a probe is float64, and needs none"
    model(torch.randn(3, W))
    assert [name.rpartition(".")[2] for name in launched] == ["norm_forward", "gated", "gated"]


class Clipped(GatedMLP):
    def forward(self, x: Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=7.0) * self.up_proj(x))


class Dropping(GatedMLP):
    def forward(self, x: Tensor) -> Any:
        return F.dropout(super().forward(x), 0.5, self.training)


class Fixed(GatedMLP):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.view(-1, W))


class TwoArguments(Norm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * gate


class ByColumns(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.abs().amax(0))


class OtherEps(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (
            x * (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon).reciprocal() * self.weight
        )


def hooked() -> nn.Module:
    module = GatedMLP(nn.SiLU())
    module.act_fn.register_forward_hook(lambda *_: None)
    return module


def of_its_own() -> nn.Module:
    module = FeedForward()
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


def with_buffer() -> nn.Module:
    module = nn.Module()
    module.register_buffer("inv_freq", torch.ones(3))
    return module


def with_experts() -> nn.Module:
    module = nn.Module()
    module.gate_up_proj = nn.Parameter(torch.ones(2, 3, 4))
    return module


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: GatedMLP(nn.ReLU()), "its numbers are not silu's or gelu's, gated"),
        (lambda: GatedMLP(nn.Sigmoid()), "its numbers are not silu's or gelu's, gated"),
        (lambda: Clipped(nn.SiLU()), "its numbers are not silu's"),
        (lambda: Dropping(nn.SiLU()).eval(), "its numbers are not silu's"),
        (lambda: Fixed(nn.SiLU()), "could not be probed: RuntimeError"),
        (hooked, "'act_fn' in it has hooks"),
        (of_its_own, "forward of its own"),
        (TwoArguments, "its forward takes 2 arguments"),
        (ByColumns, "its numbers are not an RMSNorm's"),
        (OtherEps, "its numbers are not an RMSNorm's"),
        (with_buffer, "call kernels.rope there"),
        (with_experts, "call kernels.swiglu_packed or geglu_packed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_only_looks_so_is_left_alone(
    make: Callable[[], nn.Module], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make()
    monkeypatch.setattr(torch, "manual_seed", lambda _: pytest.fail("seeds the GPUs' generators"))
    kind, state = type(module), torch.get_rng_state()
    result = kernels.swap(module)
    assert result.changed == []
    assert reason in result.skipped[""]
    assert type(module) is kind
    assert torch.equal(torch.get_rng_state(), state), "the loop's random numbers are its own"


@pytest.mark.parametrize(
    "module",
    [nn.GroupNorm(1, W), nn.Sequential(nn.Linear(W, 2 * W), nn.Linear(2 * W, W)), nn.CosineSimilarity()],
)
def test_what_does_not_look_so_is_not_mentioned(module: nn.Module) -> None:
    result = kernels.swap(module)
    assert (result.changed, result.skipped) == ([], {})


def test_on_the_meta_device_and_in_bfloat16() -> None:
    """A probe needs neither memory nor float64 of the module itself."""
    with torch.device("meta"):
        model = nn.Sequential(Norm(), FeedForward())
    assert kernels.swap(model).changed == ["0", "1"]
    assert kernels.swap(nn.Sequential(Norm(), FeedForward()).bfloat16()).changed == ["0", "1"]


@pytest.mark.parametrize("norm", [Norm, ZeroCentred])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_of_a_norm_stay(path: str, norm: Any, weight: torch.dtype, x: torch.dtype) -> None:
    module, rows = norm().to(weight), torch.randn(5, W).to(x)
    expected = module(rows)
    kernels.swap(module)
    y = module(rows)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=1e-6)


def test_copies_and_pickles_stay_fused(path: str) -> None:
    module, x = FeedForward(), torch.randn(3, W)
    kernels.swap(module)
    calls: list[int] = []
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    others = [copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))]
    for other in (*others, torch.load(file, weights_only=False)):
        assert type(other) is type(module)
        assert torch.equal(other(x), module(x))
    module.register_forward_hook(lambda *_: calls.append(1))
    module(x)
    assert calls == [1]


def test_an_argument_may_be_named_as_before() -> None:
    module, x = Norm(), torch.randn(3, W)
    kernels.swap(module)
    assert torch.equal(module(hidden_states=x), module(x))
    with pytest.raises(TypeError, match="FusedNorm got 2 arguments: pass one tensor"):
        module(x, x)


def test_compiled_in_one_graph_is_bitwise_the_same(path: str) -> None:
    torch._dynamo.reset()
    model, x = nn.Sequential(Norm(), FeedForward(), PackedMLP(False)), torch.randn(3, W).requires_grad_()
    kernels.swap(model)
    eager = gradients(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for a, b in zip(eager, gradients(compiled, x), strict=True):
        assert torch.equal(a, b)


def sharded(rank: int, order: str) -> Any:
    torch.manual_seed(0)
    model, mesh = (
        nn.Sequential(Norm(), FeedForward(), nn.Sequential(FeedForward())),
        init_device_mesh("cpu", (2,)),
    )
    if order == "swap first":
        assert kernels.swap(model).changed == ["0", "1", "2.0"]
    if order != "no shard":
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
    if order == "shard first":
        result = kernels.swap(model)
        assert result.changed == ["0", "2.0"]
        assert "call kernels.swap before fully_shard" in result.skipped["1"]
    model(torch.linspace(-3, 3, 4 * W).view(4, W)).square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if order != "no shard" else g for g in grads]


def test_before_and_after_fully_shard() -> None:
    found = {order: run_ranks(2, sharded, order)[0] for order in ("no shard", "swap first", "shard first")}
    torch.testing.assert_close(found["swap first"], found["no shard"])
    torch.testing.assert_close(found["shard first"], found["no shard"])


def test_one_class_for_all_of_a_kind() -> None:
    model = nn.Sequential(Norm(), Norm(1e-5), Norm())
    kernels.swap(model)
    assert len({type(module) for module in model}) == 1
    assert isinstance(model[0], Fused)
