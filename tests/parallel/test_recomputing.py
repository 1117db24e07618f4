"""recompute: the same bits, fewer bytes kept, no name changed."""

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import overlapkit as ok
from overlapkit.parallel import recompute
from tests.interpreter import interpreter
from tests.parallel.kept_bytes import kept_bytes
from tests.parallel.models import WIDTH, batch, gpt, half, loss_of
from tests.ranks import run_ranks

POLICIES = ("full", "every:2", "selective")


class Attention(nn.Module):
    """Two heads with dropout inside and behind, and a nested structure as argument and result."""

    def __init__(self, inside: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.inside = inside

    def forward(self, state: dict[str, torch.Tensor], *, scale: float) -> dict[str, torch.Tensor]:
        q, k, v = self.qkv(state["x"]).unflatten(-1, (3, 2, 4)).transpose(-2, -4).unbind(-3)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.inside).transpose(-2, -3).flatten(-2)
        x = state["x"] + F.dropout(self.out(mixed), 0.3) * scale
        return {"x": F.dropout(x, 0.1)}


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(inplace=True))

    def forward(self, state: dict[str, torch.Tensor], *, scale: float) -> dict[str, torch.Tensor]:
        return {"x": super().forward(state["x"].transpose(-1, -2)).transpose(-1, -2) * scale}


class Kernels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.gate, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, state: dict[str, torch.Tensor], *, scale: float) -> dict[str, torch.Tensor]:
        x = ok.kernels.rms_norm(state["x"], self.weight, 1e-5)
        x = self.down(ok.kernels.swiglu(self.gate(x), self.up(x)))
        return {"x": ok.kernels.dropout_add(x * scale, state["x"], 0.2)}


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = {"x": x}
        for block in self.blocks:
            state = block(state, scale=0.5)
        return state["x"].square().mean()


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Attention(0.0),
    "attention that drops out": lambda: Attention(0.4),
    "convolutions": Convolutions,
}


def _trained(model: nn.Module, autocast: bool = False) -> dict[str, torch.Tensor]:
    """Gradients of two batches summed, buffers, and the next random number."""
    torch.manual_seed(2)
    x = torch.randn(3, 5, 8)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x)
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradients | dict(model.named_buffers()) | {"random": torch.rand(1)}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_same_bits(name: str, autocast: bool):
    truth = _trained(Stack(BLOCKS[name]), autocast)
    for policy in POLICIES:
        if (name, policy) == ("convolutions", "selective"):
            continue  # changes a kept result in place
        _assert_same(_trained(recompute(Stack(BLOCKS[name]), policy), autocast), truth)


def test_the_same_bits_with_the_operators_that_a_gpu_has():
    with interpreter():
        truth = _trained(Stack(Kernels, 1))
        for policy in ("full", "selective"):
            _assert_same(_trained(recompute(Stack(Kernels, 1), policy, blocks=["blocks.0"])), truth)


def _assert_same(got: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert got.keys() == truth.keys()
    for key, value in got.items():
        assert torch.equal(value, truth[key]), key


def test_a_kept_result_that_is_changed_in_place_is_torchs_error():
    model = recompute(Stack(Convolutions), "selective")
    model.blocks[0][1] = nn.Identity()
    with pytest.raises(RuntimeError, match="has been mutated"):
        model(torch.randn(3, 5, 8)).backward()


def test_kept_bytes_by_hand():
    """Of a row 7 numbers come in; norm gives 7 + 2, up 13, gelu 13, down 7 (kept by selective only)."""
    kept = {}
    for policy in ("none", *POLICIES):
        model = recompute(gpt(), policy)
        _, kept[policy] = kept_bytes(lambda model=model: loss_of(model, batch(0)))
    row = 4 * 4 * 5  # of fp32, 4 x 5 tokens
    assert kept["none"] - kept["full"] == 3 * row * (2 + 7 + 13 + 13)
    assert kept["none"] - kept["every:2"] == 2 * row * (2 + 7 + 13 + 13)
    assert kept["selective"] - kept["full"] == 3 * row * (13 + 7)


class Count(TorchDispatchMode):
    """Operators by name, those inside of DTensors' instead of DTensors'."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def test_selective_runs_no_product_twice_and_cheap_ones_again():
    def count(policy: str) -> Counter[str]:
        model = recompute(Stack(lambda: Attention(0.0)), policy)
        with Count() as mode:
            model(torch.randn(3, 5, 8)).backward()
        return mode.counts

    plain, kept, all_again = (count(policy) for policy in ("none", "selective", "full"))
    product, attention = "aten::addmm", "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert (plain[product], kept[product], all_again[product]) == (6, 6, 12)
    assert (plain[attention], kept[attention], all_again[attention]) == (3, 3, 6)
    assert kept["aten::bernoulli_.float"] == 2 * plain["aten::bernoulli_.float"] == 12


def test_names_hooks_copies_and_pickles():
    model = gpt()
    names = list(model.state_dict()), [name for name, _ in model.named_modules()]
    calls: list[str] = []
    model.blocks[1].register_forward_hook(lambda *_: calls.append("hook"))
    recompute(model, "full")
    assert names == (list(model.state_dict()), [name for name, _ in model.named_modules()])
    loss_of(model, batch(0)).backward()
    assert calls == ["hook"], "a block's hooks are not a part of what is recomputed"
    model.blocks[1]._forward_hooks.clear()
    _, kept = kept_bytes(lambda: loss_of(model, batch(0)))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss, kept_again = kept_bytes(lambda again=again: loss_of(again, batch(0)))
        assert kept_again == kept
        model.zero_grad()
        again.zero_grad()
        loss.backward()
        assert model.blocks[0].up.weight.grad is None, "the copy ran the original"
        assert again.blocks[0].up.weight.grad.abs().sum() > 0


def test_a_forward_of_the_instance_is_kept_and_twice_backward_works():
    model, truth = gpt(), gpt()
    for each in (model, truth):
        plain = each.blocks[0].forward
        each.blocks[0].forward = lambda x, plain=plain: plain(x) * 2
    recompute(model, "full")
    for each in (model, truth):
        loss = loss_of(each, batch(0))
        loss.backward(retain_graph=True)
        loss.backward()
    for got, wanted in zip(model.parameters(), truth.parameters(), strict=True):
        assert torch.equal(got.grad, wanted.grad)


def test_without_gradients_nothing_is_kept_and_none_changes_nothing():
    model = recompute(gpt(), "selective")
    with torch.no_grad():
        result, kept = kept_bytes(lambda: model(batch(0)))
    assert kept == result.nbytes
    for policy in ("none", None):
        assert "forward" not in vars(recompute(gpt(), policy).blocks[0])


def test_listed_blocks():
    model = recompute(gpt(), "every:2", blocks=["embed", model_block := "blocks.2", "head"])
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == ["embed", "head"]
    recompute(other := gpt(), "full", blocks=[other.get_submodule(model_block)])
    assert [name for name, module in other.named_modules() if "forward" in vars(module)] == ["blocks.2"]


def test_replicas_train_as_without():
    def job(rank: int) -> bool:
        same = True
        for policy in POLICIES:
            ours, plain = ok.replicate(recompute(gpt(), policy)), DistributedDataParallel(gpt())
            for model in (ours, plain):
                loss_of(model, half(rank)(batch(0))).backward()
            pairs = zip(ours.parameters(), plain.parameters(), strict=True)
            same &= all(torch.equal(a.grad, b.grad) for a, b in pairs)
        return same

    assert run_ranks(2, job) == [True, True]


class PostNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, state: dict[str, torch.Tensor], *, scale: float) -> dict[str, torch.Tensor]:
        return {"x": self.norm(state["x"] + self.down(F.gelu(self.up(state["x"])))) * scale}


def test_tensor_parallel_blocks_reduce_once_when_selective():
    def job(rank: int) -> list[tuple[bool, int]]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2,))
        seen: list[tuple[bool, int]] = []
        truth: dict[str, torch.Tensor] = {}
        for policy in ("none", "full", "selective"):
            model = Stack(PostNorm)
            for block in model.blocks:
                parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            recompute(model, policy)
            with Count() as mode:
                got = _trained(model)
            truth = truth or got
            same = [torch.equal(_whole(value), _whole(truth[name])) for name, value in got.items()]
            seen.append((all(same), mode.counts["_c10d_functional::all_reduce"]))
        return seen

    # Two steps of three blocks: one reduction in forward, one in backward, and one again with "full"; the
    # first block's input needs no gradient.
    assert run_ranks(2, job) == [[(True, 2 * 5), (True, 2 * 8), (True, 2 * 5)]] * 2


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


BAD = [
    ("half", {}, ValueError, "recompute='half': give 'none', 'full', 'selective', or 'every:N'"),
    ("every:0", {}, ValueError, "recompute='every:0'"),
    ("every:", {}, ValueError, "recompute='every:'"),
    ("every:-1", {}, ValueError, "recompute='every:-1'"),
    (True, {}, ValueError, "recompute=True"),
    (2, {}, ValueError, "recompute=2"),
    ("full", {"blocks": "blocks"}, TypeError, "blocks='blocks': give 'auto', or a list"),
    ("full", {"blocks": ["nowhere"]}, ValueError, "no part 'nowhere'"),
    ("full", {"blocks": [nn.Linear(1, 1)]}, ValueError, "no part Linear"),
    ("full", {"blocks": ["blocks"]}, ValueError, "'blocks' has no forward of its own"),
    ("full", {"blocks": [3]}, ValueError, "no part 3"),
    ("full", {"blocks": []}, ValueError, r"blocks=\[\] names none, so recompute='full' would do nothing"),
]


@pytest.mark.parametrize(("policy", "options", "kind", "message"), BAD)
def test_bad_input(policy: Any, options: dict[str, Any], kind: type[Exception], message: str):
    model = gpt()
    with pytest.raises(kind, match=message):
        recompute(model, policy, **options)
    assert not any("forward" in vars(module) for module in model.modules())


def test_models_that_have_no_blocks_or_recompute_already():
    with pytest.raises(ValueError, match=r"recompute='full': Linear has no repeated blocks; .* blocks=\["):
        recompute(nn.Linear(WIDTH, WIDTH), "full")
    with pytest.raises(TypeError, match="model=str"):
        recompute("model", "full")
    model = recompute(recompute(gpt(), "full", blocks=["blocks.0"]), "selective", blocks=["blocks.1.up"])
    for block, first in (("blocks.0.up", "blocks.0"), ("blocks.1", "blocks.1.up"), ("blocks.0", "blocks.0")):
        with pytest.raises(ValueError, match=f"model.{first} recomputes already"):
            recompute(model, "full", blocks=[block])
    model = gpt()
    model.gradient_checkpointing = True  # as Hugging Face's models have it
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        recompute(model, "full")
    model.gradient_checkpointing = False
    model.config = SimpleNamespace(use_cache=True)
    with pytest.raises(ValueError, match="model.config.use_cache = False"):
        recompute(model, "full")
    model.config.use_cache = False
    recompute(model, "full")
