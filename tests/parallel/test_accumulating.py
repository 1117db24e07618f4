"""accumulate: the gradient of one big batch, its collectives, and what is left when the loop ends early."""

import gc
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it; here once, and not in each rank
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import overlapkit as ok
from overlapkit.optim import clip_grad_norm_
from overlapkit.parallel import recompute, weights
from overlapkit.parallel.synchronizers import groups_of
from tests.cuda_fake import fake_cuda, on_device
from tests.parallel.collectives import Collectives
from tests.parallel.models import VOCABULARY, ZEROS_FOR_UNUSED, gpt
from tests.ranks import RanksFailed, one_rank_group, run_ranks

Batch = tuple[torch.Tensor, torch.Tensor]


def microbatches(world: int, count: int = 3) -> list[list[Batch]]:
    """For each rank rows of tokens and targets; unequally many of those are ignored, all of the very last."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(world * count):
        tokens = torch.randint(VOCABULARY, (3, 6), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.4] = -100
        batches.append((tokens[:, :-1], targets))
    batches[-1][1].fill_(-100)
    return [batches[rank * count : (rank + 1) * count] for rank in range(world)]


def counted(batch: Batch) -> torch.Tensor:
    return (batch[1] != -100).sum()


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def big_batch(ranks: list[list[Batch]], model: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """The truth: gradients of the mean over all tokens, in one process."""
    model = (model or gpt()).double()
    loss_of(model, tuple(torch.cat(parts) for parts in zip(*sum(ranks, []), strict=True))).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    grads = {n.replace("module.", "").replace("_orig_mod.", ""): p.grad for n, p in model.named_parameters()}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}


def error_of(model: nn.Module, truth: dict[str, torch.Tensor]) -> float:
    return max((g - truth[name]).abs().max().item() for name, g in whole_gradients(model).items())


def by_hand(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def hybrid(model: nn.Module) -> nn.Module:
    return ok.shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ours": ok.replicate,
    "ours, static": lambda model: ok.replicate(model, static_graph=True),
    "DDP, static": lambda model: DistributedDataParallel(model, static_graph=True),
    "shard": ok.shard,
    "shard, kept": lambda model: ok.shard(model, reshard=False),
    "recomputed": lambda model: ok.shard(recompute(model, "full")),
    "fully_shard": by_hand,
    "compiled": lambda model: torch.compile(ok.replicate(model), backend="eager"),
    "hybrid": hybrid,
}
BASIC = ("ours", "shard", "hybrid")
NAMES = {1: ("ours", "shard"), 2: set(WRAPPERS) - {"hybrid"}, 4: ("ours", "hybrid")}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_gradient_is_that_of_one_big_batch(world: int):
    def job(rank: int) -> dict[str, float]:
        ranks = microbatches(world)
        truth, errors = big_batch(ranks), {}
        for name, wrap in WRAPPERS.items():
            if name not in NAMES[world]:
                continue
            for defer in ("all", "all_reduce", "none") if name in BASIC else ("all",):
                model = wrap(gpt().double())
                for step in range(2):  # DDP rebuilds its buckets between the two
                    model.zero_grad()
                    for batch, scale in ok.accumulate(model, ranks[rank], tokens=counted, defer=defer):
                        (loss_of(model, batch) * scale).backward()
                    errors[f"{name} {defer} {step}"] = error_of(model, truth)
        return errors

    for errors in run_ranks(world, job):
        assert len(errors) == {1: 12, 2: 24, 4: 12}[world]
        for name, error in errors.items():
            assert error < 1e-15, name


def test_only_the_ranks_that_share_a_model_count():
    """Two models side by side: on a mesh of one dimension, on one of two, and beside tensor parallelism."""

    def split(model: nn.Module, mesh: Any) -> nn.Module:
        for block in model.blocks:
            block.up, block.down = nn.Linear(7, 14), nn.Linear(14, 7)
            for parameter in (*block.up.parameters(), *block.down.parameters()):
                nn.init.constant_(parameter, 0.1)
            if mesh is not None:
                parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model

    def job(rank: int) -> list[float]:
        errors, every = [], microbatches(4)
        names = ("job", "replicate", "shard")
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
        pair = every[:2] if rank < 2 else every[2:]
        for wrap in (
            lambda it: ok.shard(it, mesh["shard"]),
            lambda it: ok.shard(it, mesh["replicate", "shard"]),
        ):
            model = wrap(gpt().double())
            for batch, scale in ok.accumulate(model, pair[rank % 2], tokens=counted):
                (loss_of(model, batch) * scale).backward()
            errors.append(error_of(model, big_batch(pair)))
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = ok.shard(split(gpt(), both["tp"]).double(), both["dp"])
        for batch, scale in ok.accumulate(model, every[rank // 2], tokens=counted):
            (loss_of(model, batch) * scale).backward()
        errors.append(error_of(model, big_batch(every[:2], split(gpt(), None))))
        return errors

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on gathering what is sharded twice
        assert max(max(errors) for errors in run_ranks(4, job)) < 1e-15


def test_collectives_and_their_bytes():
    """By hand: 5 units; the blocks are gathered again in backward, the head stays from one to the next."""
    size = 4 * sum(p.numel() for p in gpt().parameters())

    def job(rank: int) -> dict[str, tuple[Counter[str], int, int]]:
        found = {}
        for name in ("ours", "shard", "shard, kept", "hybrid"):
            model = WRAPPERS[name](gpt())
            batches = microbatches(4)[rank]
            for _ in range(2):  # DDP rebuilds its buckets between the two
                loss_of(model, batches[0]).backward()
            model.zero_grad()
            model.timings()
            for defer in ("all", "all_reduce", "none"):
                with Collectives() as seen:
                    for batch, scale in ok.accumulate(model, batches, tokens=counted, defer=defer):
                        (loss_of(model, batch) * scale).backward()
                spans = [span for span in model.timings() if span.bytes is not None]
                reduced = sum(span.bytes for span in spans if not span.name.startswith("all_gather"))
                counts = Counter(span.name.split()[0] for span in spans)
                found[f"{name} {defer}"] = counts, reduced, seen.counts["all_reduce"]
        return found

    gathers = 8 + 7 + 7
    for found in run_ranks(4, job):
        for defer in ("all", "all_reduce", "none"):
            once = 3 if defer == "none" else 1
            assert found[f"ours {defer}"] == ({"all_reduce": once}, once * size, 1), "of the tokens"
            each = 1 if defer == "all" else 3
            for name, gathered in (("shard", gathers), ("shard, kept", 5)):
                counts, sent, others = found[f"{name} {defer}"]
                assert counts == {"all_gather": gathered, "reduce_scatter": 5 * each}, name
                assert size * each <= sent <= 1.2 * size * each, "padded to 4 ranks"
                assert others == 1
            counts, _, reduced = found[f"hybrid {defer}"]
            assert counts["all_gather"], counts["reduce_scatter"] == (gathers, 5 * each)
            assert reduced == 1 + 5 * once


def test_equal_weights_and_every_way_to_use_a_scale():
    def job(rank: int) -> list[float]:
        weights = []
        model = ok.replicate(nn.Linear(1, 1, bias=False))
        for place, scale in ok.accumulate(model, iter(range(4))):
            weights += [float(scale), (3 * scale).item(), (scale * 3.0).item(), scale.tensor().item()]
            loss = model(torch.ones(1, 1)).sum()
            (torch.mul(loss, scale) if place % 2 else scale * loss).backward()
        return [*weights, model.module.weight.grad.item()]

    assert run_ranks(2, job) == [[0.25, 0.75, 0.75, 0.25] * 4 + [1.0]] * 2


def test_nothing_waits_for_the_counts_before_a_scale_is_used():
    """Rank 1 counts only when rank 0 has run its first forward, which would hang if that waited."""

    def job(rank: int) -> float:
        store = dist.distributed_c10d._get_default_store()
        model = ok.replicate(gpt().double())
        ranks = microbatches(2)
        if rank == 1:
            store.wait(["forward is over"])
        for batch, scale in ok.accumulate(model, ranks[rank], tokens=counted):
            loss = loss_of(model, batch)
            assert repr(scale).startswith("Scale(")
            store.set("forward is over", b"")
            (loss * scale).backward()
        return error_of(model, big_batch(ranks))

    assert max(run_ranks(2, job, timeout=20)) < 1e-15


def test_ranks_without_a_token():
    def job(rank: int) -> list[float]:
        model = ok.shard(gpt().double())
        ranks = microbatches(2)
        for _, targets in ranks[1]:
            targets.fill_(-100)
        losses = []
        for batches, truth in ((ranks[rank], big_batch(ranks)), (ranks[1], None)):
            model.zero_grad()
            for batch, scale in ok.accumulate(model, batches, tokens=lambda batch: int(counted(batch))):
                (loss_of(model, batch) * scale).backward()
            losses.append(error_of(model, truth or dict.fromkeys(whole_gradients(model), torch.zeros(()))))
        return losses

    for errors in run_ranks(2, job):
        assert errors[0] < 1e-15
        assert errors[1] == 0.0, "no token anywhere: nothing to learn"


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((3, 3, 2), "microbatches: rank 2 has 2, and the others 3: every rank must have as many"),
        ((1, 2, 1), "microbatches: rank 1 has 2, and the others 1"),
        ((0, 2, 2), "microbatches: rank 0 has 0, and the others 2"),
        ((0, 0, 0), "microbatches is empty"),
    ],
)
def test_different_numbers_of_microbatches_are_refused_on_every_rank(counts: tuple[int, ...], message: str):
    def job(rank: int) -> list[bool]:
        fine = []
        for wrap in (ok.replicate, ok.shard) if min(counts) else (ok.replicate,):
            model, seen, text = wrap(gpt()), 0, ""
            try:
                for batch, scale in ok.accumulate(model, microbatches(3)[rank][: counts[rank]]):
                    seen += 1
                    (loss_of(model, batch) * scale).backward()
            except ValueError as error:
                text = str(error)
            fine.append(text.startswith(message) and seen <= 1)
        return fine

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that gradients are dropped
        assert all(map(all, run_ranks(3, job, timeout=20)))


def test_a_rank_that_cannot_count_holds_nobody_up():
    def job(rank: int) -> str:
        def tokens(batch: Batch) -> Any:
            return counted(batch) if rank else [1]

        model = ok.replicate(gpt())
        batches = ok.accumulate(model, microbatches(2)[rank], tokens=tokens)
        try:
            for batch, scale in batches:
                (loss_of(model, batch) * scale).backward()
        except (TypeError, RuntimeError) as error:
            return str(error)
        return ""

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that gradients are dropped
        texts = run_ranks(2, job, timeout=20)
    assert texts[0].startswith("tokens gives [1] for microbatch 0: give an int")
    assert texts[1] == "accumulate: counting the microbatches raised on rank(s) [0]: see the error there"


def _switches(model: nn.Module) -> list[Any]:
    """Read from torch's state itself, to compare."""
    found: list[Any] = []
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            found.append(module.require_backward_grad_sync)
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            found.append(state._state_ctx.is_last_backward)
            for group in groups_of(module):
                found += [group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward]
                found += [group.is_sharded]
    return found


class _Stop(Exception):
    pass


def test_a_loop_that_is_left_leaves_nothing_behind():
    def leave(model: nn.Module, batches: list[Batch], how: str, defer: str) -> None:
        for place, (batch, scale) in enumerate(ok.accumulate(model, batches, tokens=counted, defer=defer)):
            (loss_of(model, batch) * scale).backward()
            if place == 1 and how == "break":
                break
            if place == 1:
                raise _Stop

    def job(rank: int) -> None:
        ranks = microbatches(4)
        truth = big_batch(ranks)
        for name in ("ours", "shard, kept", "hybrid", "hybrid before torch 2.13"):
            if name not in WRAPPERS and hasattr(FSDPModule, "reset_iter_state"):
                del FSDPModule.reset_iter_state
            model = WRAPPERS[name.split(" before")[0]](gpt().double())
            loss_of(model, ranks[rank][0]).backward()
            before = _switches(model)
            for how, defer in (("break", "all"), ("raise", "all_reduce")):
                with pytest.warns(UserWarning, match="left at microbatch 2 of 3"), suppress(_Stop):
                    leave(model, ranks[rank], how, defer)
                assert _switches(model) == before, (name, how)
                assert all(p.grad is None for p in model.parameters()), (name, how)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(2).div_(2)
                for batch, scale in ok.accumulate(model, ranks[rank], tokens=counted):
                    (loss_of(model, batch) * scale).backward()
                assert error_of(model, truth) < 1e-15, (name, how, defer)
                model.zero_grad()

    run_ranks(4, job)


def test_a_loop_that_never_asks_for_more_keeps_its_gradients():
    """zip ends on its other argument, and then the iterator never hears that the last microbatch is done."""

    def job(rank: int) -> list[float]:
        errors, ranks = [], microbatches(2)
        for wrap in (ok.replicate, ok.shard):
            model = wrap(gpt().double())
            before = _switches(model)
            for _, (batch, scale) in zip(
                range(3), ok.accumulate(model, ranks[rank], tokens=counted), strict=False
            ):
                (loss_of(model, batch) * scale).backward()
            assert _switches(model) == before
            errors.append(error_of(model, big_batch(ranks)))
        return errors

    assert max(max(errors) for errors in run_ranks(2, job)) < 1e-15


@pytest.mark.parametrize("name", ["ours", "shard", "fully_shard"])
def test_a_last_microbatch_without_a_backward_is_an_error(name: str):
    """Some skip a microbatch whose loss is not finite: then nobody would have averaged the others."""
    with one_rank_group():
        (batches,) = microbatches(1)
        for skipped, defer in ((0, "all"), (2, "all"), (2, "all_reduce"), (2, "none")):
            if name == "ours" and defer == "none":
                continue  # DDP has averaged the others: nothing differs between ranks
            model, text = WRAPPERS[name](gpt()), ""
            try:
                for place, (batch, scale) in enumerate(ok.accumulate(model, batches, defer=defer)):
                    loss = loss_of(model, batch) * scale
                    if place != skipped:
                        loss.backward()
            except RuntimeError as error:
                text = str(error)
            assert ("the last microbatch had no backward" in text) == bool(skipped)
            assert all((p.grad is None) == bool(skipped) for p in model.parameters())


def test_a_parameter_that_ddp_waits_for_in_vain_is_an_error_at_once():
    with one_rank_group():
        model = ok.replicate(_Branches())
        steps = ok.accumulate(model, [False])
        both, scale = next(steps)
        (model(torch.ones(1, 4), both).sum() * scale).backward()
        with pytest.raises(RuntimeError, match="did not receive grad for rank 0"):
            next(steps)
        assert all(p.grad is None for p in model.parameters())


def test_an_iterator_that_is_not_used_changes_nothing():
    with one_rank_group():
        model = ok.shard(gpt())
        before = _switches(model)
        unused = ok.accumulate(model, [1, 2])
        assert _switches(model) == before
        unused.close()


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.a(x) + self.b(x) if both else self.a(x)


def test_a_parameter_that_is_used_in_the_last_microbatch_only():
    """pytorch#196996: the others' gradients are fp32 by then, and its own is bf16."""

    def job(rank: int) -> list[Any]:
        found = []
        for order in ((False, True), (True, False)):
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            model = fully_shard(_Branches(), mp_policy=policy)
            for both, scale in ok.accumulate(model, order):
                (model(torch.ones(2, 4), both).float().sum() * scale).backward()
            grads = whole_gradients(model)
            found.append(
                [grads["a.weight"].unique().item(), grads["b.weight"].unique().item(), grads["never.weight"]]
            )
            for _ in range(2):  # and no hook stays
                model(torch.ones(2, 4), True).float().sum().backward()
        return found

    assert run_ranks(2, job) == [[[2.0, 1.0, None]] * 2] * 2


@ZEROS_FOR_UNUSED
def test_a_parameter_that_a_rank_never_uses_beside_others_that_it_does():
    """The zero that stands for its gradient was bf16, and the others' were fp32 by then."""

    def job(rank: int) -> list[float]:
        model = ok.shard(_Branches(), units=[], mp_policy="bf16")
        for both, scale in ok.accumulate(model, (rank == 0, False)):
            (model(torch.ones(2, 4), both).float().sum() * scale).backward()
        grads = whole_gradients(model)
        return [grads[f"{name}.weight"].unique().item() for name in ("a", "b", "never")]

    assert run_ranks(2, job) == [[2.0, 0.5, 0.0]] * 2


def test_memory_stays_flat_over_microbatches():
    """accelerate#2531: what a backward without synchronisation leaves does not grow."""

    def live() -> int:
        tensors = [it for it in gc.get_objects() if type(it) in (torch.Tensor, nn.Parameter)]
        storages = {it.untyped_storage()._cdata: it.untyped_storage().nbytes() for it in tensors}
        return sum(storages.values())

    def job(rank: int) -> dict[str, list[int]]:
        sizes = {}
        gc.freeze()  # what was there before need not be looked at
        for name in ("ours", "shard, kept", "hybrid"):
            for defer in ("all", "all_reduce"):
                model, seen = WRAPPERS[name](gpt()), []
                batches = microbatches(4, 5)[rank]
                for batch, scale in ok.accumulate(model, batches, tokens=counted, defer=defer):
                    (loss_of(model, batch) * scale).backward()
                    gc.collect()
                    seen.append(live())
                sizes[f"{name} {defer}"] = seen[1:-1]
                del model
        return sizes

    for sizes in run_ranks(4, job):
        for name, seen in sizes.items():
            assert len(set(seen)) == 1, (name, seen)


def test_with_a_scaler_and_a_clipping_optimizer():
    """Clipping sees the accumulated gradient: the step is that of the one big batch."""

    def job(rank: int) -> list[float]:
        ranks, errors = microbatches(2), []
        alone = gpt()
        loss_of(alone, tuple(torch.cat(parts) for parts in zip(*sum(ranks, []), strict=True))).backward()
        truth = torch.optim.SGD(alone.parameters(), lr=0.5)
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
        truth.step()
        wanted = dict(alone.named_parameters())
        for wrap in (ok.replicate, ok.shard):
            model = wrap(gpt())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            for batch, scale in ok.accumulate(model, ranks[rank], tokens=counted):
                scaler.scale(loss_of(model, batch) * scale).backward()
            scaler.unscale_(optimizer)
            norm = clip_grad_norm_(model.parameters(), 0.01)
            assert norm > 0.01
            scaler.step(optimizer)
            for name, parameter in model.named_parameters():
                whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
                errors.append((whole - wanted[name.removeprefix("module.")]).abs().max().item())
        return errors

    for errors in run_ranks(2, job):
        assert max(errors) < 2.5e-7  # two steps of float32 between 1 and 2


@pytest.mark.parametrize("on_the_gpu", [False, True])
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_on_a_gpu_the_host_waits_for_nothing_until_it_checks(
    on_the_gpu: bool, seed: int | None, monkeypatch: pytest.MonkeyPatch
):
    """Rank 0 of 2, with 3 and 1 of 10 tokens: every access is ordered, and nobody waits for the device."""

    class Work:
        def __init__(self, stream: Any) -> None:
            self.done = stream.record_event()

        def wait(self) -> None:
            torch.cuda.current_stream().wait_event(self.done)

    def all_reduce(vector: torch.Tensor, group: Any, async_op: bool) -> Work:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        vector.record_stream(stream)  # as NCCL's backend does
        with torch.cuda.stream(stream):
            vector.add_(on_device(torch.tensor([6, 0, 4])))
        return Work(stream)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(weights, "_timeout", lambda group, device: 10.0)
    weights._beside.cache_clear()
    kept, host = [], weights._host  # the allocator of page-locked memory does not reuse it too early
    monkeypatch.setattr(weights, "_host", lambda *args: kept.append(host(*args)) or kept[-1])
    with fake_cuda(seed) as machine:
        tokens = [on_device(torch.tensor(3)), on_device(torch.tensor(1))] if on_the_gpu else [3, 1]
        parts = SimpleNamespace(groups=[object()], divisor=2.0, device=torch.device("cuda", 0))
        roll = SimpleNamespace(naming=lambda what: nullcontext())
        counted = weights.Weights(tokens, parts, roll)
        weights.Weights(tokens, parts, roll)  # of a loop that is left at once
        loss = on_device(torch.tensor(1.0))
        scaled = [loss * weights.Scale(counted, place).tensor() for place in range(2)]
        assert machine.syncs == 0

        heard, arrived, there = [], counted._arrived, counted._said

        def hear(said: list[int]) -> None:
            heard.append((said, arrived.patience))
            memory = machine.memory_of(there)  # which the host has read
            machine.access(machine.threads.name, machine.host, memory, write=False)

        monkeypatch.setattr(weights, "_refuse_uneven", hear)
        counted.check()
        assert heard == [([4, 4], 0)], "two microbatches each, read once the copy had arrived"
        assert [it.raw.item() for it in scaled] == pytest.approx([0.6, 0.2])
        del counted, scaled
    assert machine.faults == []
    weights._beside.cache_clear()


def test_a_model_that_nobody_synchronises_accumulates_within_its_process():
    (batches,) = microbatches(1)
    model = gpt().double()
    for batch, scale in ok.accumulate(model, batches, tokens=counted):
        (loss_of(model, batch) * scale).backward()
    assert error_of(model, big_batch([batches])) < 1e-15
    left = ok.accumulate(model, batches)
    next(left)
    with pytest.warns(UserWarning, match="left at microbatch 1"):
        left.close()
    assert all(p.grad is None for p in model.parameters()), "as with several ranks"


def test_counts_are_on_the_host_whatever_the_default_device():
    with torch.device("meta"):
        scales = [
            float(scale) for _, scale in ok.accumulate(nn.Linear(1, 1, device="cpu"), [3, 1], tokens=int)
        ]
    assert scales == [0.75, 0.25]


BAD: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((3, []), {}, TypeError, "model=int: accumulate takes a torch.nn.Module"),
    ((nn.Linear(1, 1), 3), {}, TypeError, "microbatches=int: give the microbatches"),
    ((nn.Linear(1, 1), "ab"), {}, TypeError, "microbatches=str"),
    ((nn.Linear(1, 1), [1]), {"tokens": 5}, TypeError, "tokens=5: give a function"),
    (
        (nn.Linear(1, 1), [1]),
        {"defer": "some"},
        ValueError,
        "defer='some': give 'all', 'all_reduce' or 'none'",
    ),
    ((nn.Linear(1, 1), []), {}, ValueError, "microbatches is empty"),
    ((nn.Linear(1, 1), [1]), {"tokens": lambda it: 1.5}, TypeError, "tokens gives 1.5 for microbatch 0"),
    ((nn.Linear(1, 1), [1]), {"tokens": lambda it: True}, TypeError, "tokens gives True"),
    ((nn.Linear(1, 1), [1]), {"tokens": lambda it: -1}, ValueError, "tokens gives -1"),
    ((nn.Linear(1, 1), [1]), {"tokens": lambda it: torch.ones(())}, TypeError, "0-d tensor of integers"),
    (
        (nn.Linear(1, 1), [1]),
        {"tokens": lambda it: torch.ones(1).long()},
        TypeError,
        "0-d tensor of integers",
    ),
]


@pytest.mark.parametrize(("args", "options", "kind", "message"), BAD)
def test_bad_arguments(args: tuple[Any, ...], options: dict[str, Any], kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        list(ok.accumulate(*args, **options))


def test_bad_models():
    model = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(model)  # to make one takes a GPU
    with pytest.raises(ValueError, match=r"FullyShardedDataParallel \(FSDP1\)"):
        ok.accumulate(model, [1])


def test_parts_over_different_ranks():
    def job(rank: int) -> None:
        model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        pair = [dist.new_group([0]), dist.new_group([1])][rank]
        model[0] = DistributedDataParallel(model[0])
        model[1] = DistributedDataParallel(model[1], process_group=pair)
        ok.accumulate(model, [1])

    with pytest.raises(RanksFailed, match="averages over different ranks"):
        run_ranks(2, job)
