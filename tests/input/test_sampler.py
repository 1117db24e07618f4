"""ElasticSampler against brute force over permute, against DistributedSampler, and in torchdata's loader."""

import copy
import json
import math
import pickle
import warnings
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

import overlapkit
from overlapkit.input import ElasticSampler
from overlapkit.input.order import BLOCK, permute
from tests.input.sources import Numbers, plain
from tests.ranks import run_ranks

SIZE = 103


def whole(epoch: int, size: int = SIZE, seed: int = 0) -> list[int]:
    """The uninterrupted order of an epoch."""
    return permute(np.arange(size), size, seed, epoch).tolist()


def ranks(world: int, size: int = SIZE, **options: Any) -> list[ElasticSampler]:
    return [ElasticSampler(size, world, rank, **options) for rank in range(world)]


def dealt(samplers: list[ElasticSampler], count: int | None = None) -> list[int]:
    """What all ranks take of a pass, in the order of the epoch."""
    shares = [list(islice(iter(sampler), count)) for sampler in samplers]
    return [sample for step in zip(*shares, strict=True) for sample in step]


def test_it_is_the_public_name_and_what_trainers_take_for_a_distributed_sampler() -> None:
    assert overlapkit.ElasticSampler is ElasticSampler
    assert isinstance(ElasticSampler(3), DistributedSampler)


@pytest.mark.parametrize("world", [1, 2, 5, 8, 103, 200])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_as_distributed_sampler_but_for_the_shuffle(world: int, drop_last: bool, shuffle: bool) -> None:
    if drop_last and world > SIZE:
        pytest.skip("DistributedSampler has no samples, and fails")
    for rank in range(world):
        ours = ElasticSampler(Numbers(SIZE), world, rank, shuffle, 7, drop_last)
        torchs: DistributedSampler[int] = DistributedSampler(
            Numbers(SIZE), world, rank, shuffle, 7, drop_last
        )
        for epoch in (0, 3):
            ours.set_epoch(epoch)
            torchs.set_epoch(epoch)
            taken, theirs = list(ours), list(torchs)
            assert len(ours) == len(torchs) == len(taken) == len(theirs)
            if not shuffle:
                assert taken == theirs
        for name in ("num_replicas", "rank", "num_samples", "total_size", "epoch", "seed", "shuffle"):
            assert getattr(ours, name) == getattr(torchs, name)
    order = whole(3, seed=7) if shuffle else list(range(SIZE))
    samplers = ranks(world, shuffle=shuffle, seed=7, drop_last=drop_last)
    for sampler in samplers:
        sampler.set_epoch(3)
    share = SIZE // world if drop_last else math.ceil(SIZE / world)
    repeated = order * math.ceil(share * world / SIZE)
    assert dealt(samplers) == repeated[: share * world]


def test_a_pass_is_the_same_again_until_another_epoch_is_set() -> None:
    sampler = ElasticSampler(SIZE)
    assert list(sampler) == list(sampler) == whole(0)
    sampler.set_epoch(1)
    assert list(sampler) == list(sampler) == whole(1)


def test_the_union_over_4_then_3_then_8_ranks_is_the_uninterrupted_order() -> None:
    size = 4 * 11 + 3 * 7 + 8 * 9
    taken, state = [], ElasticSampler(size, seed=5).state_dict() | {"epoch": 2}
    for world, count in [(4, 11), (3, 7), (8, None)]:
        samplers = ranks(world, size, seed=5)
        for sampler in samplers:
            sampler.load_state_dict(state)
        taken += dealt(samplers, count)
        states = [sampler.state_dict() for sampler in samplers]
        assert states.count(states[0]) == world
        state = states[0]
    assert taken == whole(2, size, 5)


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 300),
    lives=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=4),
    last_world=st.integers(1, 9),
    drop_last=st.booleans(),
)
def test_any_worlds_repeat_and_lose_nothing(
    size: int, lives: list[tuple[int, int]], last_world: int, drop_last: bool
) -> None:
    taken: list[int] = []
    state = None
    for world, count in [*lives, (last_world, None)]:
        samplers = ranks(world, size, drop_last=drop_last)
        if state is not None:
            if state["position"] == size:
                break
            for sampler in samplers:
                sampler.load_state_dict(state)
        if len(taken) + world > size and drop_last:
            break  # the tail that is left out
        taken += dealt(samplers, count)
        state = samplers[-1].state_dict()
    assert taken[:size] == whole(0, size)[: len(taken)]
    assert len(taken) < size + max(world for world, _ in [*lives, (last_world, 0)])


@pytest.mark.parametrize("taken", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 77])
def test_the_state_counts_each_sample_given(taken: int) -> None:
    size = 2 * BLOCK + 77
    sampler = ElasticSampler(3 * size, 3, 1)
    passing = iter(sampler)
    first = list(islice(passing, taken))
    state = sampler.state_dict()
    assert state["position"] == 3 * taken
    other = ElasticSampler(3 * size, 3, 1)
    other.load_state_dict(state)
    rest = list(passing)
    assert list(other) == (rest or first)  # a state at the end begins anew


def test_nothing_happens_before_the_first_sample_is_asked_for() -> None:
    """A DataLoader with workers makes an iterator that it never asks; torchdata makes two."""
    sampler = ElasticSampler(SIZE)
    state = {**sampler.state_dict(), "position": 100}
    sampler.load_state_dict(state)
    iter(sampler), iter(sampler)
    assert sampler.state_dict() == state
    assert list(sampler) == whole(0)[100:]
    assert list(sampler) == whole(0)


def test_setting_the_state_s_epoch_keeps_its_position_and_another_does_not() -> None:
    for epoch, start in [(2, 100), (3, 0)]:
        sampler = ElasticSampler(SIZE)
        sampler.load_state_dict({**sampler.state_dict(), "epoch": 2, "position": 100})
        assert sampler.epoch == 2
        sampler.set_epoch(epoch)
        assert list(sampler) == whole(epoch)[start:]


@pytest.mark.parametrize("order", ["load, set", "set, load"])
@pytest.mark.parametrize(
    ("position", "epoch", "begins"),
    [(100, 2, (2, 100)), (103, 2, (2, 103)), (103, 3, (3, 0)), (103, None, (2, 0)), (100, None, (2, 100))],
)
def test_where_a_state_and_set_epoch_begin(
    order: str, position: int, epoch: int | None, begins: tuple[int, int]
) -> None:
    sampler = ElasticSampler(SIZE)
    for step in order.split(", "):
        if step == "load":
            sampler.load_state_dict({**sampler.state_dict(), "epoch": 2, "position": position})
        elif epoch is not None:
            sampler.set_epoch(epoch)
    assert list(sampler) == whole(begins[0])[begins[1] :]
    assert list(sampler) == whole(begins[0])


def test_a_pass_that_goes_on_after_set_epoch_moves_nothing() -> None:
    sampler = ElasticSampler(SIZE)
    passing = iter(sampler)
    next(passing)
    sampler.set_epoch(4)
    next(passing)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (4, 0)


def test_no_list_of_the_samples_is_ever_made() -> None:
    sampler = ElasticSampler(10**15, 8, 3)
    state = {**sampler.state_dict(), "position": 7 * 10**14}
    sampler.load_state_dict(state)
    first = list(islice(iter(sampler), 3))
    assert first == permute(7 * 10**14 + 3 + 8 * np.arange(3), 10**15, 0, 0).tolist()


def test_rank_and_world_are_those_of_the_process_group() -> None:
    def run(rank: int) -> Any:
        dist.barrier()  # a rank that is done while others still connect breaks their connections
        sampler = ElasticSampler(SIZE)
        return sampler.rank, sampler.num_replicas, list(sampler)

    results = run_ranks(2, run)
    assert [result[:2] for result in results] == [(0, 2), (1, 2)]
    assert [result[2] for result in results] == [list(sampler) for sampler in ranks(2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_data_loader(workers: int) -> None:
    sampler = ElasticSampler(20, 2, 1)
    loader = DataLoader(Numbers(20), 3, sampler=sampler, num_workers=workers)
    for epoch in (0, 5):
        sampler.set_epoch(epoch)
        assert [sample for batch in loader for sample in plain(batch)] == whole(epoch, 20)[1::2]
    assert len(loader) == 4


def stateful(workers: int = 0, batch_size: int | None = 3) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler = ElasticSampler(20, 2, 1, drop_last=True)
    with warnings.catch_warnings():  # it calls torch.set_vital, which newer versions of torch deprecate
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        return StatefulDataLoader(Numbers(20), batch_size, sampler=sampler, num_workers=workers)


def flat(batches: Iterable[Any]) -> list[int]:
    return [sample for batch in batches for sample in torch.as_tensor(batch).reshape(-1).tolist()]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("batch_size", "taken"), [(3, 1), (3, 3), (3, 4), (None, 1), (None, 10)])
def test_stateful_data_loader_keeps_its_state(workers: int, batch_size: int | None, taken: int) -> None:
    first, second = stateful(workers, batch_size), stateful(workers, batch_size)
    first.sampler.set_epoch(1)
    passing = iter(first)
    begun = flat(islice(passing, taken))
    state = copy.deepcopy(first.state_dict())
    second.load_state_dict(state)
    for epoch, rest in [(1, whole(1, 20)[1::2][len(begun) :]), (2, whole(2, 20)[1::2])]:
        second.sampler.set_epoch(epoch)
        assert flat(second) == rest


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_data_loader_that_has_seen_its_end(workers: int) -> None:
    for set_epoch in (True, False):
        first, second = stateful(workers), stateful(workers)
        first.sampler.set_epoch(1)
        list(first)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for epoch in (2, 3) if set_epoch else (1, 1):
            if set_epoch:
                second.sampler.set_epoch(epoch)
            assert flat(second) == whole(epoch, 20)[1::2]


def test_a_state_goes_through_pickle_and_a_copy_of_the_sampler() -> None:
    sampler = ElasticSampler(SIZE)
    assert pickle.loads(pickle.dumps(sampler.state_dict())) == sampler.state_dict()
    next(iter(sampler))
    assert list(pickle.loads(pickle.dumps(sampler))) == whole(0)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((0,), ValueError, "dataset=0"),
        ((Numbers(0),), ValueError, "dataset=0"),
        ((True,), ValueError, "dataset=True"),
        ((iter([1]),), TypeError, "dataset is a list_iterator: give what has a length, or the number"),
        ((9, 0, 0), ValueError, "num_replicas=0"),
        ((9, 2, 2), ValueError, "rank=2: with num_replicas=2 it is 0 to 1"),
        ((9, 2, -1), ValueError, "rank=-1"),
        ((9, True, 0), ValueError, "num_replicas=True"),
        ((9, 2, 1.0), ValueError, "rank=1.0"),
        ((9, 2, 0, "no"), ValueError, "shuffle='no'"),
        ((9, 2, 0, True, 1.5), ValueError, "seed=1.5"),
        ((9, 2, 0, True, 0, "no"), ValueError, "drop_last='no'"),
    ],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_bad_arguments_are_named(arguments: tuple[Any, ...], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ElasticSampler(*arguments)


def test_numpy_s_integers_are_integers() -> None:
    sampler = ElasticSampler(np.int64(9), np.int32(2), np.int32(1), seed=np.int64(3))  # type: ignore[arg-type]
    sampler.set_epoch(np.int64(4))  # type: ignore[arg-type]
    state = sampler.state_dict()
    assert json.loads(json.dumps(state)) == state
    plain = ElasticSampler(9, 2, 1, seed=3)
    plain.set_epoch(4)
    assert (list(sampler), state["epoch"]) == (list(plain), 4)


def test_a_launched_process_without_a_group_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="WORLD_SIZE=2.*init_process_group"):
        ElasticSampler(9)
    assert len(ElasticSampler(9, 3, 1)) == 3
