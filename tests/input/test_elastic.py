"""A DeviceLoader over an ElasticSampler, taken up at other worlds, against a model of the order."""

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from overlapkit.input import DeviceLoader, ElasticSampler
from overlapkit.input.order import permute
from overlapkit.lane import Lane
from tests.input.sources import Numbers, in_order, plain

EPOCHS = 3
Life = tuple[int, int, int]
"""World size, batch size, and steps until the next life."""


def build(
    size: int, world: int = 1, rank: int = 0, batch_size: int = 2, *, tail: bool = False, **options: Any
) -> DeviceLoader:
    sampler = ElasticSampler(size, world, rank, drop_last=tail)
    return DeviceLoader(DataLoader(Numbers(size), batch_size, sampler=sampler, **options), "cpu", depth=3)


def steps(loader: DeviceLoader) -> Iterator[tuple[int, Any]]:
    """A training loop's batches, with their epoch."""
    for epoch in range(loader.next_epoch, EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            yield epoch, plain(batch)


def model(size: int, lives: list[Life], drop_last: bool, tail: bool) -> list[tuple[int, list[list[int]]]]:
    """Each step's epoch and batches by rank, worked out from one list of the samples of each epoch."""
    out: list[tuple[int, list[list[int]]]] = []
    epoch = position = 0
    for world, batch_size, stop in lives:

        def share_of(rest: int, world: int = world) -> int:
            return rest // world if tail else -(-rest // world)

        least = batch_size if drop_last else 1
        for _ in range(stop):
            here = (epoch, position) if share_of(size - position) >= least else (epoch + 1, 0)
            if here[0] == EPOCHS:
                break  # this life takes nothing: another one may still find a batch
            epoch, position = here
            order = permute(np.arange(size), size, 0, epoch).tolist()
            share = share_of(size - position)
            taken = min(share, batch_size)
            ring = order[position:] + order * world  # beyond the end: those that are repeated
            out.append((epoch, [ring[rank : taken * world : world] for rank in range(world)]))
            position = min(size, position + taken * world) if share - taken >= least else size
    return out


def lived(size: int, lives: list[Life], drop_last: bool, tail: bool) -> list[tuple[int, list[list[int]]]]:
    out: list[tuple[int, list[list[int]]]] = []
    state: Any = None
    for world, batch_size, stop in lives:
        loaders = [
            build(size, world, rank, batch_size, tail=tail, drop_last=drop_last) for rank in range(world)
        ]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        taken = [list(islice(steps(loader), stop)) for loader in loaders]
        for step in zip(*taken, strict=True):
            epochs = {epoch for epoch, _ in step}
            assert len(epochs) == 1
            out.append((epochs.pop(), [batch for _, batch in step]))
        states = [loader.state_dict() for loader in loaders]
        assert states.count(states[0]) == world
        state = json.loads(json.dumps(states[-1]))
    return out


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(24, 90),
    lives=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 12)), max_size=4),
    drop_last=st.booleans(),
    tail=st.booleans(),
)
def test_any_lives_give_the_model_s_order(size: int, lives: list[Life], drop_last: bool, tail: bool) -> None:
    lives = [*lives, (2, 3, 1000)]
    assert lived(size, lives, drop_last, tail) == model(size, lives, drop_last, tail)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "lives", [[(4, 2, 5), (3, 2, 7), (8, 1, 1000)], [(2, 4, 6), (2, 4, 6), (1, 3, 1000)]], ids=str
)
def test_4_then_3_then_8_ranks_and_twice_in_one_epoch(lives: list[Life], drop_last: bool) -> None:
    taken = lived(100, lives, drop_last, False)
    assert taken == model(100, lives, drop_last, False)
    if not drop_last:
        for epoch in range(EPOCHS):
            batches = [b for e, ranks in taken if e == epoch for b in zip(*ranks, strict=True)]
            order = permute(np.arange(100), 100, 0, epoch).tolist()
            assert [sample for step in batches for sample in step][:100] == order


@pytest.mark.parametrize("saved_with", [0, 2])
@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}], ids=str
)
def test_any_number_of_workers_takes_it_up(saved_with: int, options: dict[str, Any]) -> None:
    first = build(40, num_workers=saved_with)
    begun = list(islice(steps(first), 23))
    second = build(40, **options)
    second.load_state_dict(first.state_dict())
    assert begun + list(steps(second)) == list(steps(build(40)))


@pytest.mark.parametrize("form", ["no batches", "own batch sampler", "last batch left out"])
def test_the_forms_of_a_loader(form: str) -> None:
    def make(size: int) -> DeviceLoader:
        sampler = ElasticSampler(size, 2, 1)
        if form == "no batches":
            loader = DataLoader(Numbers(size), batch_size=None, sampler=sampler)
        else:
            batches = BatchSampler(sampler, 4, drop_last=form == "last batch left out")
            loader = DataLoader(Numbers(size), batch_sampler=batches)
        return DeviceLoader(loader, "cpu")

    bare = list(steps(make(50)))
    assert len(bare) == EPOCHS * {"no batches": 25, "own batch sampler": 7, "last batch left out": 6}[form]
    for stop in (1, 6, 7, 13, len(bare)):
        first, second = make(50), make(50)
        begun = list(islice(steps(first), stop))
        second.load_state_dict(first.state_dict())
        assert begun + list(steps(second)) == bare


def test_nothing_that_was_taken_is_loaded_again() -> None:
    first, second = build(1000, batch_size=10), build(1000, batch_size=10)
    list(islice(steps(first), 97))
    second.load_state_dict(first.state_dict())
    rest = list(second)
    assert second.dataset.loaded == [sample for batch in rest for sample in plain(batch)]
    assert len(rest) == 3


def test_the_state_counts_what_was_taken_and_so_does_the_sampler_s() -> None:
    loader = build(40, 2, 0)
    passing = iter(loader)
    for count in range(1, 11):
        next(passing)
        assert loader.state_dict()["taken"] == loader.sampler.state_dict()["position"] == 4 * count
    assert loader.next_epoch == 1
    passing.close()


def test_without_set_epoch_each_pass_is_the_same_epoch_as_if_nothing_had_happened() -> None:
    bare = [plain(batch) for _ in range(2) for batch in build(20)]
    for stop in (3, 10, 13):
        first, second = build(20), build(20)
        begun = list(islice((plain(batch) for _ in range(2) for batch in first), stop))
        second.load_state_dict(first.state_dict())
        rest = [plain(batch) for _ in range(1 if stop >= 10 else 2) for batch in second]
        assert begun + rest == bare


@pytest.mark.parametrize("before", [False, True])
def test_set_epoch_before_or_after_loading(before: bool) -> None:
    first, second = build(20), build(20)
    first.set_epoch(1)
    begun = [plain(batch) for batch in islice(first, 4)]
    if before:
        second.set_epoch(1)
    second.load_state_dict(first.state_dict())
    if not before:
        second.set_epoch(1)
    assert second.next_epoch == 1
    bare = [batch for epoch, batch in steps(build(20)) if epoch == 1]
    assert begun + [plain(batch) for batch in second] == bare


def test_another_epoch_than_the_state_s_starts_at_its_beginning_with_a_warning() -> None:
    first, second = build(20), build(20)
    first.set_epoch(1)
    next(iter(first))
    second.load_state_dict(first.state_dict())
    second.set_epoch(2)
    with pytest.warns(UserWarning, match="stands after sample 2 of epoch 1, but epoch 2 was set") as caught:
        got = [plain(batch) for batch in second]
    assert caught[0].filename == __file__
    assert got == [batch for epoch, batch in steps(build(20)) if epoch == 2]
    assert len(second.dataset.loaded) == 20


def test_breaks_and_a_second_loading_in_one_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lane, "delay_s", 0.001)
    bare = [plain(batch) for batch in build(40)]
    loader = build(40)
    for stop in (3, 1, 9):
        begun = [plain(batch) for batch in islice(loader, stop)]
        assert begun == bare[:stop]  # a break, and the epoch anew
    loader.load_state_dict(loader.state_dict())
    assert [plain(batch) for batch in islice(loader, 4)] == bare[9:13]
    loader.load_state_dict(loader.state_dict())
    assert [plain(batch) for batch in loader] == bare[13:]
    assert [plain(batch) for batch in loader] == bare


def test_a_sampler_that_was_given_a_state_begins_there() -> None:
    bare = [plain(batch) for batch in build(40)]
    loader = build(40)
    loader.sampler.load_state_dict({**loader.sampler.state_dict(), "position": 10})
    assert loader.state_dict()["taken"] == 10
    assert [plain(batch) for batch in loader] == bare[5:]
    assert [plain(batch) for batch in loader] == bare


def test_a_sampler_that_was_given_less_than_a_batch_begins_anew() -> None:
    loader = build(40, batch_size=3, drop_last=True)
    loader.sampler.load_state_dict({**loader.sampler.state_dict(), "position": 38})
    assert [plain(batch) for batch in loader] == [plain(batch) for batch in build(40, batch_size=3)][:13]


def test_a_tail_that_was_left_out_stays_left_out_with_smaller_batches() -> None:
    first, second = build(20, batch_size=8, drop_last=True), build(20, batch_size=2)
    assert len(list(first)) == 2
    second.load_state_dict(first.state_dict())
    assert second.next_epoch == 1
    assert len(list(second)) == 10


def test_samples_that_ranks_left_out_stay_left_out_at_fewer_ranks() -> None:
    """Four ranks take 8 of 11 samples; one rank alone could take the other three."""
    first, second = build(11, world=4, tail=True), build(11)
    assert len(list(first)) == 1
    second.load_state_dict(first.state_dict())
    assert second.next_epoch == 1
    assert len(list(second)) == 6


def test_a_loop_s_random_numbers_are_those_of_an_uninterrupted_run() -> None:
    def drawn(stop: int) -> list[float]:
        torch.manual_seed(1)
        first, second = build(20), build(20)
        numbers = [torch.rand(1).item() for _ in islice(first, stop)]
        saved = torch.get_rng_state()
        torch.manual_seed(2)
        second.load_state_dict(first.state_dict())
        torch.set_rng_state(saved)
        return numbers + [torch.rand(1).item() for _ in second]

    assert drawn(1) == drawn(4) == drawn(9)


def test_a_length_is_that_of_a_whole_epoch_on_every_rank() -> None:
    loaders = [build(21, 4, rank) for rank in range(4)]
    state = {**loaders[0].state_dict(), "taken": 8}
    for loader in loaders:
        loader.load_state_dict(state)
        assert len(loader) == 3
        assert len(list(loader)) == 2


def test_a_batch_sampler_of_another_kind_is_skipped_through() -> None:
    class Reversed(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            return reversed(list(super().__iter__()))

    def make() -> DeviceLoader:
        batches = Reversed(ElasticSampler(20), 2, drop_last=False)
        return DeviceLoader(DataLoader(Numbers(20), batch_sampler=batches), "cpu")

    first, second = make(), make()
    begun = list(islice(steps(first), 13))
    assert first.state_dict()["source"] == "map"
    second.load_state_dict(first.state_dict())
    assert begun + list(steps(second)) == list(steps(make()))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"order": {"size": 40, "seed": 1, "shuffle": True}}, "state has seed=1, this source has 0"),
        ({"order": {"size": 41, "seed": 0, "shuffle": True}}, "state has size=41, this source has 40"),
        ({"order": {"size": 40, "seed": 0, "shuffle": False}}, "state has shuffle=False"),
        ({"order": None}, "state lacks seed, shuffle, size"),
        ({"taken": 41}, "position 41: it is damaged"),
        ({"taken": -1}, "-1"),
        ({"epoch": -1}, "epoch -1"),
        ({"source": "map"}, "'map', this one is 'elastic'"),
    ],
    ids=str,
)
def test_a_state_of_something_else_is_refused(changed: dict[str, Any], message: str) -> None:
    loader = build(40)
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**loader.state_dict(), **changed})
    with pytest.raises(ValueError, match="'elastic', this one is 'map'"):
        DeviceLoader(in_order(40, 2), "cpu").load_state_dict(loader.state_dict())


def test_the_next_epoch_of_other_sources() -> None:
    loader = DeviceLoader(in_order(6, 2), "cpu")
    assert loader.next_epoch == 0
    loader.set_epoch(4)
    next(iter(loader))
    assert loader.next_epoch == 4
    list(loader)
    state = loader.state_dict()
    assert loader.next_epoch == 5
    other = DeviceLoader(in_order(6, 2), "cpu")
    other.load_state_dict(state)
    assert other.next_epoch == 5
    other.set_epoch(5)
    assert other.next_epoch == 5
    assert len(list(other)) == 3


def sampled(kind: Any) -> tuple[DataLoader[Any], Any]:
    """A DataLoader and what knows its epoch."""
    sampler = kind(Numbers(12), 1, 0)
    return DataLoader(Numbers(12), 2, sampler=sampler), sampler


@pytest.mark.parametrize("kind", [ElasticSampler, DistributedSampler])
@pytest.mark.parametrize("taken", [0, 6])
def test_an_epoch_that_is_set_between_iter_and_the_first_batch_counts(kind: Any, taken: int) -> None:
    """As in a DataLoader, which draws its order with the first batch; Lightning's loop does it so."""
    plainly, sampler = sampled(kind)
    batches = iter(plainly)
    sampler.set_epoch(1)
    truth = list(map(plain, batches))
    loader = DeviceLoader(sampled(kind)[0], "cpu")
    list(zip(range(taken), loader, strict=False))
    state = loader.state_dict()
    loader = DeviceLoader(sampled(kind)[0], "cpu")
    loader.load_state_dict(state)
    batches = iter(loader)
    loader.sampler.set_epoch(1)
    assert list(map(plain, batches)) == truth
    assert loader.state_dict()["epoch"] == 1
