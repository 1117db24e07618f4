"""What a forward leaves gathered and what an exception leaves half done does not reach the next step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import overlapkit as ok
from tests.parallel.models import Gpt, batch, half, loss_of, worst_error
from tests.ranks import run_ranks

Part = Callable[[torch.Tensor], torch.Tensor]


class Exits(Gpt):
    """Leaves after some blocks, where `depth` says so."""

    depth: int | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks[: self.depth]:
            x = block(x)
        return self.head(self.norm(x))


class Keeps(Gpt):
    """Its forward returns nothing."""

    def forward(self, tokens: torch.Tensor) -> None:
        vars(self)["logits"] = super().forward(tokens)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        raise ArithmeticError


def failing(model: nn.Module, tokens: torch.Tensor, forward: bool) -> None:
    """A step that raises in the middle of its forward, or of its backward."""

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if forward:
            raise ArithmeticError
        return Fails.apply(output)

    handle = model.blocks[1].register_forward_hook(hook)
    with pytest.raises(ArithmeticError):
        loss_of(model, tokens).backward()
    handle.remove()


def a_backward_raises(model: nn.Module, part: Part) -> None:
    failing(model, part(batch(5)), forward=False)
    model.zero_grad()


def a_forward_raises_and_the_optimizer_steps(model: nn.Module, part: Part) -> None:
    loss_of(model, part(batch(6))).backward()
    failing(model, part(batch(5)), forward=True)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def inference_raises(model: nn.Module, part: Part) -> None:
    with torch.no_grad():
        failing(model, part(batch(5)), forward=True)
    change(model)


def a_loss_is_thrown_away(model: nn.Module, part: Part) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss_of(model, part(batch(6))).backward()
    loss_of(model, part(batch(5)))
    optimizer.step()


def inference_ends_early(model: nn.Module, part: Part) -> None:
    """The block that comes next was gathered for nobody."""
    model.depth = 1
    with torch.no_grad():
        model(part(batch(5)))
    change(model)
    model.depth = None


def a_forward_raises_in_accumulation(model: nn.Module, part: Part) -> None:
    """What earlier microbatches have accumulated stays, as in one process."""
    sharded = hasattr(model, "set_requires_gradient_sync")
    if sharded:
        model.set_requires_gradient_sync(False)
    loss_of(model, part(batch(6))).backward()
    failing(model, part(batch(5)), forward=True)
    if sharded:
        model.set_requires_gradient_sync(True)


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


CASES = [
    a_backward_raises,
    a_forward_raises_and_the_optimizer_steps,
    inference_raises,
    a_loss_is_thrown_away,
    inference_ends_early,
    a_forward_raises_in_accumulation,
]


@pytest.mark.parametrize("tied", [False, True])
def test_the_next_steps_are_those_of_one_process(tied: bool):
    def job(rank: int) -> dict[str, float]:
        errors = {}
        for case in CASES:
            torch.manual_seed(5)
            model = Exits(tied=tied)
            truth = copy.deepcopy(model).double()
            ok.shard(model, min_unit_mb=0)
            for each, part in ((truth, lambda rows: rows), (model, half(rank))):
                optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
                loss_of(each, part(batch(0))).backward()
                optimizer.step()
                optimizer.zero_grad()
                case(each, part)
                for step in (1, 2):
                    loss_of(each, part(batch(step))).backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=step == 1)
                loss_of(each, part(batch(3))).backward()
            errors[case.__name__] = max(worst_error(model, truth))
        return errors

    for errors in run_ranks(2, job):
        assert max(errors.values()) < 4e-6, errors


def test_a_forward_that_raises_frees_what_it_gathered():
    def job(rank: int) -> bool:
        model = ok.shard(Gpt(), reshard=False)
        names = [type(parameter).__name__ for parameter in model.parameters()]
        failing(model, batch(0), forward=True)
        return names == [type(parameter).__name__ for parameter in model.parameters()]

    assert run_ranks(2, job) == [True, True]


def test_a_forward_that_returns_nothing_has_not_failed():
    def step(model: nn.Module, tokens: torch.Tensor) -> None:
        model(tokens[:, :-1])
        F.cross_entropy(model.logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    def job(rank: int) -> float:
        torch.manual_seed(5)
        model = Keeps(tied=True)
        truth = copy.deepcopy(model).double()
        ok.shard(model)
        for each, part in ((truth, lambda rows: rows), (model, half(rank))):
            step(each, part(batch(0)))
        return worst_error(model, truth)[1]

    assert max(run_ranks(2, job)) < 2e-6


class Loops(Gpt):
    """Uses each block twice, in reentrant checkpoints: of each block, or of all."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        def through(x: torch.Tensor, blocks: Any = self.blocks) -> torch.Tensor:
            for block in blocks:
                x = block(x)
            return x

        x = self.embed(tokens)
        for _ in range(2):
            parts = [self.blocks] if self.whole else [[block] for block in self.blocks]
            for part in parts:
                x = checkpoint(through, x, part, use_reentrant=True)
        return self.head(self.norm(x))


def test_units_are_used_several_times_in_one_backward_by_reentrant_checkpoints():
    """FSDP2 reduces the first use that backward comes to; it kept the others' gradients for the next step."""

    def job(rank: int) -> list[float]:
        errors = []
        for whole in (False, True):
            torch.manual_seed(5)
            model = Loops(whole)
            truth = copy.deepcopy(model).double()
            ok.shard(model, min_unit_mb=0)
            for each, part in ((truth, lambda rows: rows), (model, half(rank))):
                for step in (0, 1):
                    loss_of(each, part(batch(step))).backward()
                (loss_of(each, part(batch(2))) - 0.3 * loss_of(each, part(batch(3)))).backward()
            errors.append(worst_error(model, truth)[1])
        return errors

    for errors in run_ranks(2, job):
        assert max(errors) < 4e-6


def test_hooks_that_would_not_be_called_are_refused():
    model = Gpt()
    model.head.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ValueError, match="head.weight has a hook on its gradient, and shard replaces"):
        ok.shard(model)

    def job(rank: int) -> str:
        model = ok.shard(Gpt())
        handle = model.blocks[1].up.weight.register_hook(lambda gradient: 2 * gradient)
        with pytest.raises(RuntimeError) as error:
            loss_of(model, batch(0)).backward()
        handle.remove()
        model.zero_grad()
        truth = Gpt()
        truth.load_state_dict({name: tensor.full_tensor() for name, tensor in model.state_dict().items()})
        for each in (model, truth):
            loss_of(each, batch(0)).backward()
        assert worst_error(model, truth)[1] < 2e-6
        return str(error.value)

    for text in run_ranks(2, job):
        assert text.startswith(
            "parameter blocks.1.up.weight has a hook of register_hook, which is not called"
        )
