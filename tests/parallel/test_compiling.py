"""compile_blocks: one graph for all blocks, names as they were, recomputation inside, hooks outside."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch._dynamo.backends.debugging import aot_eager

import overlapkit as ok
from overlapkit.parallel import compile_blocks, recompute
from tests.parallel.models import batch, gpt, half, loss_of
from tests.parallel.test_recomputing import POLICIES, Attention, Convolutions, Stack
from tests.ranks import run_ranks

# The compiler asks every tensor for its gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Counting:
    """The backend "aot_eager"; counts the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, example: Any) -> Any:
        self.graphs += 1
        return aot_eager(graph, example)


def _gradients(model: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss_of(model, tokens).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("policy", ["none", *POLICIES])
def test_one_graph_for_all_blocks_that_are_alike(policy: str):
    torch._dynamo.reset()
    truth = _gradients(gpt(10), batch(0))  # more than torch recompiles
    model = recompute(gpt(10), policy)
    names = [name for name, _ in model.named_modules()], list(model.state_dict())
    counting = Counting()
    assert compile_blocks(model, {"backend": counting, "fullgraph": True}) is model
    assert names == ([name for name, _ in model.named_modules()], list(model.state_dict()))
    assert all(map(torch.equal, _gradients(model, batch(0)), truth))
    assert counting.graphs == (2 if policy == "every:2" else 1)


def test_recomputation_inside_of_the_graph_keeps_less():
    kept = {}
    for policy in ("none", "full", "selective"):
        torch._dynamo.reset()
        model = compile_blocks(recompute(gpt(), policy), {"backend": "aot_eager"})
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model, batch(0))
        loss.backward()
        kept[policy] = sum(saved.values())
    assert kept["full"] < kept["selective"] < kept["none"]


@pytest.mark.parametrize("block", [lambda: Attention(0.4), Convolutions], ids=["dropout", "statistics"])
def test_the_same_bits_with_dropout_and_running_statistics(block: Any):
    def trained(policy: str) -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        model = compile_blocks(recompute(Stack(block), policy), {"backend": "aot_eager"})
        torch.manual_seed(2)
        for _ in range(2):
            model(torch.randn(3, 5, 8)).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return gradients | dict(model.named_buffers())

    truth = trained("none")
    for key, value in trained("full").items():
        assert torch.equal(value, truth[key]), key


def test_what_the_user_compiled_is_left_alone():
    model = gpt()
    model.blocks[0].compile(backend="eager")
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    theirs = model.blocks[0]._compiled_call_impl
    counting = Counting()
    compile_blocks(model, {"backend": counting}, blocks=[f"blocks.{place}" for place in range(3)])
    loss_of(model, batch(0))
    assert model.blocks[0]._compiled_call_impl is theirs
    assert model.blocks[1]._compiled_call_impl is None
    assert counting.graphs == 1


def test_compiled_blocks_of_a_sharded_model_have_no_hook_in_their_graph():
    def job(rank: int) -> list[Any]:
        truth = _gradients(ok.shard(gpt()), half(rank)(batch(3)))
        seen: list[Any] = []
        for policy in ("none", "full", "selective"):
            torch._dynamo.reset()
            counting = Counting()
            model = ok.shard(
                gpt(),
                recompute=policy,
                compile_blocks={"backend": counting, "fullgraph": True},
                unshard_early=True,
            )
            _gradients(model, half(rank)(batch(3)))
            torch.optim.SGD(model.parameters(), lr=0.0).step()  # the embedding is gathered early
            got = _gradients(model, half(rank)(batch(3)))
            kinds = [span.name.split()[0] for span in model.timings()]
            same = [torch.equal(a.to_local(), b.to_local()) for a, b in zip(got, truth, strict=True)]
            seen.append((all(same), counting.graphs, kinds.count("all_gather")))
        return seen

    assert run_ranks(2, job) == [[(True, 1, 2 * 8)] * 3] * 2


def test_replicas_compile_before():
    def job(rank: int) -> bool:
        truth = _gradients(ok.replicate(gpt()), half(rank)(batch(3)))
        counting = Counting()
        model = ok.replicate(compile_blocks(gpt(), {"backend": counting}))
        return all(map(torch.equal, _gradients(model, half(rank)(batch(3))), truth)) and counting.graphs == 1

    assert run_ranks(2, job) == [True, True]


BAD = [
    ("yes", TypeError, "compile_blocks='yes': give True, False, or a dict"),
    (None, TypeError, "compile_blocks=None"),
    ({"full_graph": True}, ValueError, "torch.compile takes no 'full_graph'; it takes backend, "),
    ({"model": 1}, ValueError, "takes no 'model'"),
    ({1: 2}, ValueError, "takes no 1"),
    ({"backend": "nvfuser"}, ValueError, r"compile_blocks=\{'backend': 'nvfuser'\}: Invalid backend"),
    ({"mode": "fast"}, ValueError, r"compile_blocks=\{'mode': 'fast'\}: Unrecognized mode"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD)
def test_bad_options_before_anything_is_changed(options: Any, kind: type[Exception], message: str):
    model = gpt()
    with pytest.raises(kind, match=message):
        ok.shard(model, recompute="full", compile_blocks=options)
    with pytest.raises(kind, match=message):
        compile_blocks(model, options)
    assert not any("forward" in vars(module) for module in model.modules())


def test_no_blocks_and_nothing_to_do():
    with pytest.raises(ValueError, match="compile_blocks=True: Linear has no repeated blocks"):
        compile_blocks(nn.Linear(2, 2))
    assert compile_blocks(gpt(), False).blocks[0]._compiled_call_impl is None
