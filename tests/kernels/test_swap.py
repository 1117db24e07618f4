import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from overlapkit import kernels
from tests.ranks import run_ranks


class LlamaRMSNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Odd(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(8, eps=1e-6)
        self.linear = nn.Linear(8, 8)
        self.norm2 = nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.norm2(self.linear(self.norm1(x)))
        assert isinstance(out, Tensor)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.loss = nn.CrossEntropyLoss(ignore_index=3, label_smoothing=0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        loss = self.loss(x, y)
        assert isinstance(loss, Tensor)
        return loss


NAMES = ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "loss"]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 8, generator=generator), torch.randint(8, (6,), generator=generator)
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), [p.detach().clone() for p in model.parameters()]


def test_training_goes_on_as_before(path: str) -> None:
    """With the optimizer that was there already: names, parameter objects, flags and hooks stay."""
    theirs = Model()
    mine = copy.deepcopy(theirs)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (theirs, mine)]
    step(theirs, optimizers[0])
    step(mine, optimizers[1])
    mine.eval()
    calls: list[str] = []
    mine.blocks[0].norm1.register_forward_hook(lambda *_: calls.append("norm1"))
    parameters, norm = dict(mine.named_parameters()), mine.blocks[0].norm1
    result = kernels.swap(mine)
    assert result.changed == NAMES
    assert result.skipped == {}
    assert {name: id(p) for name, p in mine.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    assert mine.blocks[0].norm1 is norm
    assert isinstance(norm, kernels.RMSNorm)
    assert isinstance(mine.loss, kernels.CrossEntropyLoss)
    assert not norm.training
    for _ in range(3):
        a, b = step(theirs, optimizers[0]), step(mine, optimizers[1])
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert calls == ["norm1"] * 3


@pytest.mark.parametrize("module", [nn.CrossEntropyLoss(), nn.LayerNorm(8), nn.RMSNorm(8)])
def test_arguments_may_be_named_as_torch_names_them(module: nn.Module) -> None:
    given = dict(
        zip(inspect.signature(module.forward).parameters, (torch.randn(3, 8), torch.arange(3)), strict=False)
    )
    before = module(**given)
    assert kernels.swap(module).changed
    torch.testing.assert_close(module(**given), before)


def test_undo_gives_everything_back() -> None:
    model = Model()
    result = kernels.swap(model)
    result.undo()
    assert result.changed == []
    kinds = {Model, nn.ModuleList, Block, nn.RMSNorm, nn.Linear, nn.CrossEntropyLoss}
    assert {type(m) for m in model.modules()} == kinds
    result.undo()
    assert kernels.swap(model).changed == NAMES


def test_no_class_is_changed() -> None:
    forward = nn.RMSNorm.forward
    other = nn.RMSNorm(8)
    kernels.swap(Model())
    assert nn.RMSNorm.forward is forward
    assert type(other) is nn.RMSNorm


def test_what_is_left_alone_is_named_with_its_reason() -> None:
    own = nn.RMSNorm(8)
    own.forward = lambda x: x  # type: ignore[method-assign]
    model = nn.ModuleDict(
        {
            "odd": Odd(8),
            "llama": LlamaRMSNorm(),
            "own": own,
            "ours": kernels.RMSNorm(8),
            "linear": nn.Linear(8, 8),
        }
    )
    result = kernels.swap(model)
    assert result.changed == []
    reasons = {
        "odd": "its numbers are not an RMSNorm's",
        "llama": "LlamaRMSNorm has not an RMSNorm's form",
        "own": "forward of its own",
        "ours": "runs fused already",
    }
    assert list(result.skipped) == list(reasons)
    for name, reason in reasons.items():
        assert reason in result.skipped[name]
    assert "skipped 'odd'" in str(result)


def test_only() -> None:
    model = Model()
    assert kernels.swap(model, only=["blocks.*.norm1"]).changed == ["blocks.0.norm1", "blocks.1.norm1"]
    assert type(model.blocks[0].norm2) is nn.RMSNorm
    one = kernels.swap(Model(), only=["blocks.0.norm1"])
    assert str(one).startswith("1 module runs fused: 'blocks.0.norm1'")
    with pytest.raises(ValueError, match="only='block.*' matches no module"):
        kernels.swap(model, only=["block.*"])
    with pytest.raises(TypeError, match="only='loss' is one string"):
        kernels.swap(model, only="loss")
    with pytest.raises(TypeError, match="only=5: pass a list of names"):
        kernels.swap(model, only=5)
    with pytest.raises(TypeError, match="only holds 5: pass names"):
        kernels.swap(model, only=[5])


def test_nothing_to_swap_says_so() -> None:
    result = kernels.swap(nn.Linear(2, 2))
    assert (result.changed, result.skipped) == ([], {})
    assert str(result).startswith("nothing to swap")


def test_the_model_itself_and_shared_modules() -> None:
    norm = nn.RMSNorm(8)
    assert kernels.swap(norm).changed == [""]
    assert isinstance(norm, kernels.RMSNorm)
    layer_norm, x = nn.LayerNorm(8, bias=False), torch.randn(3, 8)
    expected = layer_norm(x)
    assert kernels.swap(layer_norm).changed == [""]
    assert isinstance(layer_norm, kernels.LayerNorm)
    torch.testing.assert_close(layer_norm(x), expected)
    shared = nn.RMSNorm(8)
    model = nn.Sequential(shared, nn.Linear(8, 8), shared)
    assert kernels.swap(model).changed == ["0"]
    assert model[2] is shared


@pytest.mark.parametrize("model", [None, [nn.RMSNorm(8)], nn.RMSNorm])
def test_a_wrong_type(model: Any) -> None:
    with pytest.raises(TypeError, match="pass a torch.nn.Module"):
        kernels.swap(model)


def sharded(rank: int, order: str) -> list[Tensor]:
    torch.manual_seed(0)
    model, mesh = Model(), init_device_mesh("cpu", (2,))
    if order == "swap first":
        assert kernels.swap(model).changed == NAMES
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if order == "shard first":
        assert kernels.swap(model).changed == NAMES
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer)
    return [p.full_tensor() for p in model.parameters()]


def test_before_and_after_fully_shard() -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        _, whole = step(model, optimizer)
    for order in ("swap first", "shard first", "no swap"):
        for parameters in run_ranks(2, sharded, order):
            torch.testing.assert_close(parameters, whole)


def own_unit(rank: int) -> tuple[list[str], dict[str, str], str]:
    model, mesh = Model(), init_device_mesh("cpu", (1,))
    fully_shard(model.blocks[0].norm1, mesh=mesh)
    result = kernels.swap(model)
    fully_shard(model.blocks[1].norm1, mesh=mesh)
    with pytest.raises(RuntimeError, match="undo before fully_shard"):
        result.undo()
    assert isinstance(model.loss, kernels.CrossEntropyLoss), "nothing is undone by halves"
    return result.changed, result.skipped, str(model.blocks[1].norm1(torch.ones(8)).sum().item())


def test_a_norm_that_is_an_fsdp_unit_is_refused_with_the_order_to_use() -> None:
    changed, skipped, total = run_ranks(1, own_unit)[0]
    assert changed == NAMES[1:]
    assert "call kernels.swap before fully_shard" in skipped["blocks.0.norm1"]
    assert float(total) == pytest.approx(8.0, rel=1e-4)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch has it since 2.13")
def test_a_head_with_its_loss(path: str) -> None:
    torch.manual_seed(0)
    make: Any = nn.LinearCrossEntropyLoss
    x, y = torch.randn(5, 8), torch.tensor([0, 4, 10, 3, 3])
    for target, options in ((y, {"ignore_index": 4}), (torch.rand(5, 11), {})):
        theirs = make(8, 11, bias=True, label_smoothing=0.1, weight=torch.rand(11), **options)
        mine = copy.deepcopy(theirs)
        done = kernels.swap(mine)
        assert done.changed == [""]
        losses = [module(x, target) for module in (mine, theirs)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    again = copy.deepcopy(mine)
    assert torch.equal(again(x, y), mine(x, y))
    assert kernels.swap(again).skipped == {"": "it runs fused already"}
    done.undo()
    assert type(mine) is make
    assert "out_features" in kernels.swap(make(8, 11, out_features=(2,))).skipped[""]
    chunked = make(8, 11, options=nn.LinearCrossEntropyOptions())
    assert "options" in kernels.swap(chunked).skipped[""]
