"""Recomputation and compilation of sharded models: the same bits, and no unit gathered more often."""

import time
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn as nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import overlapkit as ok
from overlapkit.parallel import ShardPlan
from tests.parallel.kept_bytes import kept_bytes
from tests.parallel.models import Gpt, batch, gpt, half, loss_of, train, trained_alone, worst_error
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .FSDPLinear. returned a view"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor:UserWarning"
    ),  # the compiler looks at it
]


def _counts(model: nn.Module) -> tuple[int, int]:
    """From spans: over gloo both collectives are sends, which torch's CommDebugMode does not know."""
    model.timings()
    loss_of(model, batch(7)).backward()
    kinds = [span.name.split()[0] for span in model.timings()]
    return kinds.count("all_gather"), kinds.count("reduce_scatter")


def _gradients(model: nn.Module, rank: int) -> list[torch.Tensor]:
    model.zero_grad()
    loss_of(model, half(rank)(batch(3))).backward()
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


INNER = ["blocks.0.up", "blocks.0.down", "blocks.0", "blocks.1.up", "blocks.1", "blocks.2"]


def test_recomputation_changes_neither_bits_nor_collectives():
    def job(rank: int) -> list[tuple[str, bool, tuple[int, int]]]:
        seen = []
        for units in ("auto", INNER):
            truth = _gradients(ok.shard(gpt(), units=units), rank)
            for policy in ("none", "full", "every:2", "selective"):
                for depth in (1, 3):
                    model = ok.shard(gpt(), units=units, recompute=policy, forward_prefetch=depth)
                    same = all(map(torch.equal, _gradients(model, rank), truth))
                    seen.append((str(units), same, _counts(model)))
        return seen

    # "auto": forward: embed, 3 blocks, [norm, head]; backward: 3 blocks; all five are reduced.
    # INNER: the root with the rest, gathered once; 6 units in forward and 6 in backward.
    expected = {"auto": (8, 5), str(INNER): (13, 7)}
    for seen in run_ranks(2, job):
        assert len(seen) == 2 * 4 * 2
        for units, same, counts in seen:
            assert same
            assert counts == expected[units], units


def test_the_collectives_are_those_of_wrappers_applied_by_hand():
    """checkpoint_wrapper around each block, fully_shard around that: what torchtitan does."""

    def job(rank: int) -> list[Any]:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        plain = gpt()
        for place, block in enumerate(plain.blocks):
            plain.blocks[place] = fully_shard(checkpoint_wrapper(block), mesh=mesh)
        fully_shard(plain, mesh=mesh)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the mode's own module hooks cause one
            with CommDebugMode() as mode:
                loss_of(plain, batch(7)).backward()
        c10d, counts = torch.ops.c10d, mode.get_comm_counts()
        ours = ok.shard(gpt(), units=["blocks.0", "blocks.1", "blocks.2"], recompute="full")
        return [(counts[c10d._allgather_base_], counts[c10d._reduce_scatter_base_]), _counts(ours)]

    assert run_ranks(2, job) == [[(7, 4), (7, 4)]] * 2


class Checkpointed(Gpt):
    """As users write it, and as transformers' gradient_checkpointing does."""

    def __init__(self, reentrant: bool, together: bool) -> None:
        super().__init__()
        self.again = partial(checkpoint, use_reentrant=reentrant)
        self.together = together

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.together:
            x = self.again(nn.Sequential.forward, self.blocks, x)
        else:
            for block in self.blocks:
                x = self.again(block, x)
        return self.head(self.norm(x))


def test_checkpoints_of_the_user_gather_nothing_twice_and_still_prefetch():
    """Automodel#3373: prefetch with recomputation gathered twice; verl#6317: it was silently off."""

    def job(rank: int) -> list[Any]:
        seen = []
        for reentrant in (True, False):
            for together in (True, False):
                torch.manual_seed(5)
                model = Checkpointed(reentrant, together)
                truth = trained_alone(model)
                ok.shard(model, forward_prefetch=2)
                train(model, half(rank))
                error = max(worst_error(model, truth))
                seen.append((error, _gathered_before_block_0(model), _counts(model), _counts(model)))
        return seen

    for seen in run_ranks(2, job):
        assert len(seen) == 4
        for error, forward, *counts in seen:
            assert error < 2e-6
            assert counts == [(8, 5), (8, 5)]
            assert forward == [f"all_gather {unit}" for unit in ("embed", "blocks.0", "blocks.1", "blocks.2")]


def test_a_unit_inside_of_a_recomputed_one_is_gathered_as_often_as_without():
    """pytorch#175406: nested units with recomputation gathered twice."""
    nested = [f"blocks.{place}{name}" for place in range(3) for name in ("", ".up", ".down")]
    units = ["embed", *nested, ["norm", "head"]]

    def job(rank: int) -> list[tuple[int, int]]:
        return [
            _counts(ok.shard(gpt(), units=units, recompute=policy)) for policy in (None, "full", "selective")
        ]

    assert run_ranks(2, job) == [[(20, 11)] * 3] * 2  # nine units twice, embedding and head once


def _gathered_before_block_0(model: nn.Module) -> list[str]:
    """All-gathers that forward had begun when block 0 began to compute."""
    computes: list[int] = []
    hook = model.blocks[0].up.register_forward_pre_hook(lambda *_: computes.append(time.perf_counter_ns()))
    model.timings()
    loss = loss_of(model, batch(0))
    spans = [span for span in model.timings() if span.name.startswith("all_gather")]
    loss.backward()
    hook.remove()
    return [span.name for span in spans if span.start < computes[0]]


def test_the_plan_decides():
    model = ok.shard(gpt(), plan=ShardPlan(recompute="every:2"))
    assert ["forward" in vars(block) for block in model.blocks] == [True, False, True]
    with pytest.raises(ValueError, match="recompute='full' is given, and the plan decides it too"):
        ok.shard(gpt(), plan=ShardPlan(recompute="none"), recompute="full")


def test_one_process_without_a_group_recomputes_and_compiles():
    compiled: list[int] = []
    model = gpt()
    plain = kept_bytes(lambda: loss_of(gpt(), batch(0)))[1]
    assert ok.shard(model, recompute="full", compile_blocks={"backend": _counting(compiled)}) is model
    loss_of(model, batch(0)).backward()
    assert len(compiled) == 1
    assert kept_bytes(lambda: loss_of(ok.shard(gpt(), recompute="full"), batch(0)))[1] < plain
    assert not hasattr(model, "timings")


def _counting(graphs: list[int]) -> Any:
    """The backend "aot_eager", which says how many operations each graph has."""
    from torch._dynamo.backends.debugging import aot_eager

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return aot_eager(graph, example)

    return backend
