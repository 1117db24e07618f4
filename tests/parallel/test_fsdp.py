"""shard: numerics against one process, counts and order of collectives, what stays gathered."""

import copy
import multiprocessing
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import overlapkit as ok
from overlapkit.parallel import describe
from tests.parallel.models import batch, gpt, half, loss_of, train, trained_alone, worst_error
from tests.ranks import one_rank_group, run_ranks

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "tied": ({"tied": True}, {}),
    "frozen first block": ({"frozen": ("embed", "blocks.0")}, {}),
    "frozen middle block": ({"frozen": ("blocks.1",)}, {}),
    "frozen head": ({"frozen": ("head",)}, {}),
    "reshard all": ({}, {"reshard": True}),
    "reshard none": ({}, {"reshard": False}),
    "no prefetch": ({}, {"forward_prefetch": 0, "backward_prefetch": 0}),
    "deep prefetch": ({}, {"forward_prefetch": 9, "backward_prefetch": 9}),
    "listed units": ({}, {"units": ["blocks.0.norm", "blocks.0", "blocks.2", ["norm", "head"]]}),
    "tied list": ({"tied": True}, {"units": ["blocks.0", ["embed", "head"]]}),
    "one unit": ({}, {"units": []}),
}


def _errors(rank: int) -> dict[str, tuple[float, float]]:
    errors = {}
    for name, (how, options) in VARIANTS.items():
        model = gpt(**how)
        truth = trained_alone(model)
        assert ok.shard(model, **options) is model
        train(model, half(rank))
        errors[name] = worst_error(model, truth)
    return errors


def test_two_ranks_train_as_one():
    for errors in run_ranks(2, _errors):
        assert errors.keys() == VARIANTS.keys()
        for name, (parameters, gradients) in errors.items():
            assert parameters < 2e-6, name
            assert gradients < 2e-6, name


def test_three_ranks_with_shards_of_nothing_and_tied_weights():
    def job(rank: int) -> float:
        model = gpt(tied=True)
        model.norm.bias = nn.Parameter(torch.zeros(7))
        model.extra = nn.Linear(7, 1)  # one row: two of the three ranks hold nothing of it
        truth = trained_alone(model)
        ok.shard(model, units=["extra", "blocks.0", "blocks.1", "blocks.2"])
        train(model, lambda rows: rows)  # the same rows on every rank: the mean is the whole
        return max(worst_error(model, truth))

    assert max(run_ranks(3, job)) < 2e-6


def test_copies_of_shards_on_a_2d_mesh():
    def job(rank: int) -> tuple[float, dict[Any, int], list[str]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = gpt()
        truth = trained_alone(model)
        ok.shard(model, mesh)
        train(model, half(rank, 4))
        error = max(worst_error(model, truth))
        counts = _counts(model)
        loss_of(model, batch(7)).backward()
        return error, counts, [span.name for span in model.timings() if not span.name.startswith("wait")][-2:]

    for error, counts, names in run_ranks(4, job):
        assert error < 2e-6
        assert counts == {"all_gather": 8, "reduce_scatter": 5, "all_reduce": 5}
        assert names == ["reduce_scatter embed", "all_reduce embed"]


def test_resharding_to_a_smaller_group():
    def job(rank: int) -> float:
        model = gpt()
        truth = trained_alone(model)
        ok.shard(model, reshard=2)
        train(model, half(rank, 4))
        return max(worst_error(model, truth))

    assert max(run_ranks(4, job)) < 2e-6


def test_bf16_rounds_parameters_and_reduces_in_fp32():
    def job(rank: int) -> tuple[set[torch.dtype], float, float, tuple[int, int]]:
        model = gpt()
        expected = _rounded_gradients(model)
        table = describe(model, mp_policy="bf16")
        ok.shard(model, mp_policy="bf16")
        loss_of(model, half(rank)(batch(0))).backward()
        own = {p.grad.dtype for p in model.parameters()}
        errors, sizes = [], []
        for name, parameter in model.named_parameters():
            errors.append((parameter.grad.full_tensor() - expected[name]).abs().max().item())
            sizes.append(expected[name].abs().max().item())
        total = sum(row.gathered for row in table.units), sum(row.reduced for row in table.units)
        return own, max(errors), max(sizes), total

    for dtypes, error, size, (gathered, reduced) in run_ranks(2, job):
        assert dtypes == {torch.float32}
        assert error < 2**-20 * size  # the rounding of two halves summed in fp32, no more
        assert reduced == 2 * gathered


def _rounded_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The mean over two halves of gradients computed by a bf16 copy, averaged in fp32."""
    total: dict[str, torch.Tensor] = {}
    for rank in range(2):
        rounded = copy.deepcopy(model).bfloat16()
        loss_of(rounded, half(rank)(batch(0))).backward()
        for name, parameter in rounded.named_parameters():
            total[name] = total.get(name, 0.0) + parameter.grad.float() / 2
    return total


def _counts(model: nn.Module, *, backward: bool = True) -> dict[str, int]:
    """From spans: over gloo both collectives are sends, which torch's CommDebugMode does not know."""
    model.timings()
    with torch.set_grad_enabled(backward):
        loss = loss_of(model, batch(7))
    if backward:
        loss.backward()
    kinds = [span.name.split()[0] for span in model.timings()]
    return dict(Counter(kind for kind in kinds if kind != "wait"))


def test_collectives_are_counted_by_hand():
    def job(rank: int) -> dict[str, Any]:
        counts = {}
        for name in (
            "default",
            "tied",
            "frozen middle block",
            "reshard all",
            "reshard none",
            "deep prefetch",
        ):
            how, options = VARIANTS[name]
            model = ok.shard(gpt(**how), **options)
            counts[name] = _counts(model)
            assert _counts(model) == counts[name], "the second step differs from the first"
        model = ok.shard(gpt())
        counts["inference"] = [_counts(model, backward=False) for _ in range(2)]
        counts["after it"] = _counts(model)
        return counts

    expected = {
        # Forward: embedding, 3 blocks, [norm, head]; backward: 3 blocks (a lookup's needs no weight).
        "default": {"all_gather": 8, "reduce_scatter": 5},
        # The root holds embedding, norm and head and stays gathered: root, 3 blocks; 3 blocks.
        "tied": {"all_gather": 7, "reduce_scatter": 4},
        "frozen middle block": {"all_gather": 8, "reduce_scatter": 4},
        "reshard all": {"all_gather": 9, "reduce_scatter": 5},  # the head, too, twice
        "reshard none": {"all_gather": 5, "reduce_scatter": 5},
        "deep prefetch": {"all_gather": 8, "reduce_scatter": 5},
        "inference": [{"all_gather": 5}] * 2,  # the head is freed, so nothing of it is stale later
        "after it": {"all_gather": 8, "reduce_scatter": 5},
    }
    assert run_ranks(2, job) == [expected] * 2


def test_weights_loaded_after_inference_are_used():
    def job(rank: int) -> float:
        model = ok.shard(gpt(tied=True))
        with torch.no_grad():
            model(batch(0))
            for parameter in model.parameters():
                parameter.zero_()  # what an averaging of weights would do
            return model(batch(0)).abs().max().item()

    assert run_ranks(2, job) == [0.0, 0.0]


def test_spans_have_order_bytes_and_names():
    def job(rank: int) -> tuple[list[Any], list[tuple[str, int, int]], int]:
        model = ok.shard(gpt())
        loss_of(model, batch(0)).backward()
        table = [(row.name, row.gathered, row.reduced) for row in describe(model).units]
        spans = model.timings()
        assert all(span.lane == "communication" and span.end >= span.start for span in spans)
        return [(span.name, span.bytes, span.exposed) for span in spans], table, len(model.timings())

    for spans, table, rest in run_ranks(2, job):
        gathered = {name: nbytes for name, nbytes, _ in table}
        reduced = {name: nbytes for name, _, nbytes in table}
        assert gathered["embed"] == 12 * 7 * 4  # 11 rows, padded to 12
        assert gathered["norm+head"] == (8 + 8 + 12 * 7) * 4
        assert gathered["blocks.0"] == (8 + 8 + 14 * 7 + 14 + 8 * 13 + 8) * 4
        assert [(name, n) for name, n, _ in spans if name.startswith("all_gather")] == [
            (f"all_gather {unit}", gathered[unit])
            for unit in ("embed", "blocks.0", "blocks.1", "blocks.2", "norm+head")
            + ("blocks.2", "blocks.1", "blocks.0")
        ]
        assert [span for span in spans if span[0].startswith("reduce_scatter")] == [
            (f"reduce_scatter {unit}", reduced[unit], False)
            for unit in ("norm+head", "blocks.2", "blocks.1", "blocks.0", "embed")
        ]
        waits = [span for span in spans if span[0].startswith("wait")]
        assert all(span[1] is None and span[2] for span in waits)
        assert not any(span[2] for span in spans if span[0].startswith("all_gather"))
        assert rest == 0


BACKWARD_ORDER = {
    1: "gather blocks.2, reduce norm+head, gather blocks.1, reduce blocks.2, gather blocks.0, "
    "reduce blocks.1, reduce blocks.0, reduce embed",
    0: "reduce norm+head, gather blocks.2, reduce blocks.2, gather blocks.1, reduce blocks.1, "
    "gather blocks.0, reduce blocks.0, reduce embed",
}


@pytest.mark.parametrize("depth", BACKWARD_ORDER)
def test_backward_prefetch_puts_gathers_before_reductions(depth: int):
    def job(rank: int) -> str:
        model = ok.shard(gpt(), backward_prefetch=depth)
        loss = loss_of(model, batch(0))
        model.timings()
        loss.backward()
        spans = [span for span in model.timings() if not span.name.startswith("wait")]
        return ", ".join(s.name.replace("all_gather", "gather").replace("_scatter", "") for s in spans)

    assert run_ranks(2, job) == [BACKWARD_ORDER[depth]] * 2


def test_the_next_gather_runs_while_a_block_computes():
    """pytorch#163153: prefetch did not overlap."""

    """Rank 1 starts the gather of block 1 only once rank 0 computes block 0: a blocking gather would hang."""
    computing = multiprocessing.get_context("fork").Event()

    def job(rank: int) -> list[str]:
        model = gpt()
        computes, embed_forward = model.blocks[0].up, model.embed
        ok.shard(model)
        if rank == 0:
            computes.register_forward_pre_hook(lambda module, args: computing.set())
        else:
            embed_forward.register_forward_hook(lambda module, args, output: _wait(computing))
        loss_of(model, batch(0)).backward()
        return [span.name for span in model.timings() if span.name.startswith("all_gather")][:3]

    assert run_ranks(2, job, timeout=20)[0] == [
        "all_gather embed",
        "all_gather blocks.0",
        "all_gather blocks.1",
    ]


def _wait(event: Any) -> None:
    assert event.wait(10)


def test_ignored_parameters_are_left_alone():
    def job(rank: int) -> tuple[bool, bool]:
        model = gpt()
        norm = model.norm.weight
        alone = copy.deepcopy(model)
        ok.shard(model, ignored=[norm, "blocks.1"])
        rows = half(rank)(batch(0))
        loss_of(model, rows).backward()
        loss_of(alone, rows).backward()  # this rank's rows only: nobody averages them
        same = model.norm.weight is norm and type(norm) is nn.Parameter
        return same, torch.allclose(norm.grad, alone.norm.weight.grad, atol=1e-6)

    assert run_ranks(2, job) == [(True, True)] * 2


def test_a_mesh_of_one_trains_as_without():
    model = gpt()
    truth = trained_alone(model)
    with one_rank_group():
        ok.shard(model)
        train(model)
        assert max(worst_error(model, truth)) < 2e-6
        assert [row.gathered for row in describe(model).units][0] == 11 * 7 * 4
        assert model.timings() == []  # nothing was communicated
        with pytest.raises(ValueError, match="model is sharded already"):
            ok.shard(model)


def test_state_and_names_are_those_of_the_plain_model():
    model = gpt()
    names, keys = [name for name, _ in model.named_parameters()], list(model.state_dict())
    with one_rank_group():
        ok.shard(model)
        assert [name for name, _ in model.named_parameters()] == names
        assert list(model.state_dict()) == keys
        assert dict(model.named_buffers()) == {}


def test_one_process_without_a_group_gets_its_model_back():
    model = gpt()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    assert not dist.is_initialized()
    assert ok.shard(model, forward_prefetch=2, units=["blocks.0"]) is model
    assert {name: id(p) for name, p in model.named_parameters()} == {n: i for n, (i, _) in before.items()}
    assert not hasattr(model, "timings")
