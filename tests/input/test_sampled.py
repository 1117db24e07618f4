"""Mixtures of map-style datasets against samples drawn one by one, over stops, ranks and times round."""

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from overlapkit.input import DeviceLoader, ElasticSampler, Mixture, SampleSeed
from overlapkit.input.order import permute
from overlapkit.input.weights import uniform
from tests.input.sources import in_order

SIZES = {"few": 3, "many": 40, "some": 11}
WEIGHTS = {"few": 0.5, "many": 1.5, "some": 1.0}


class Named(Dataset[Any]):
    """Samples that say which they are, with a number drawn for them."""

    def __init__(self, name: str) -> None:
        self.name, self.augment = name, [SampleSeed(17)]

    def __len__(self) -> int:
        return SIZES[self.name]

    def __getitem__(self, index: int) -> Any:
        return {"name": self.name, "index": index, "drawn": self.augment[0].of(index)}


class AtOnce(Named):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError

    def __getitems__(self, indices: list[int]) -> Any:
        return [Named.__getitem__(self, index) for index in indices]


def build(rank: int = 0, world: int = 1, batch_size: int = 2, kind: type[Named] = Named) -> Mixture:
    sources = {}
    for number, name in enumerate(SIZES):
        data = kind(name)
        sampler = ElasticSampler(data, num_replicas=world, rank=rank, seed=11 + number)
        sources[name] = DataLoader(data, batch_size, sampler=sampler, collate_fn=list)
    return Mixture(sources, WEIGHTS, seed=3)


def truth(epoch: int = 0) -> Iterator[Any]:
    """The rows of an epoch of the mixture, one after the other, of all ranks."""
    seed, drawn = SampleSeed(17), dict.fromkeys(SIZES, 0)
    for at in count():
        left = float(uniform(3, epoch, at, at + 1)[0]) * sum(WEIGHTS.values())
        for number, name in enumerate(SIZES):  # noqa: B007
            left -= WEIGHTS[name]
            if left < 0:
                break
        turn, place = divmod(drawn[name], SIZES[name])
        now = (epoch << 32) + turn
        index = int(permute(np.array([place]), SIZES[name], 11 + number, now)[0])
        drawn[name] += 1
        seed.set_epoch(now)
        yield {"name": name, "index": index, "drawn": seed.of(index)}


def dealt(ranks: list[list[Any]]) -> list[Any]:
    """What all ranks took, in the order of the samples."""
    return [row for rows in zip(*([row for batch in one for row in batch] for one in ranks), strict=True)
            for row in rows]  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    lives=st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from([1, 2, 3, 4]), st.integers(1, 4)),
        min_size=1,
        max_size=4,
    ),
    through=st.booleans(),
)
def test_lives_of_any_number_of_ranks_draw_as_one_by_one(
    lives: list[tuple[int, int, int]], through: bool
) -> None:
    got: list[Any] = []
    state: Any = None
    for batches, world, batch_size in lives:
        ranks, states = [], []
        for rank in range(world):
            mixture: Any = build(rank, world, batch_size)
            source = DeviceLoader(mixture, "cpu", depth=2) if through else mixture
            if state is not None:
                source.load_state_dict(state)
            passing = iter(source)
            ranks.append(list(islice(passing, batches)))
            states.append(source.state_dict())
            if through:
                passing.close()
        assert all(one == states[0] for one in states)
        got, state = got + dealt(ranks), states[0]
    assert got == list(islice(truth(), len(got)))


def test_each_pass_is_another_epoch_in_which_all_is_drawn_anew() -> None:
    mixture = build()
    for epoch in range(2):
        assert dealt([list(islice(mixture, 30))]) == list(islice(truth(epoch), 60))
        assert mixture.epochs["few"] >= 1


def test_a_dataset_that_gives_many_at_once_is_asked_for_many() -> None:
    assert list(islice(build(kind=AtOnce), 20)) == list(islice(build(), 20))


def test_batches_are_put_together_by_the_first_loader() -> None:
    def sampled(data: Any) -> Any:
        return DataLoader(data, 3, sampler=ElasticSampler(data, num_replicas=1, rank=0))

    mixture = Mixture({"a": sampled(list(range(5))), "b": sampled([10, 11])}, {"a": 1, "b": 1})
    (batch,) = islice(DeviceLoader(mixture, "cpu"), 1)
    assert batch.dtype is torch.int64
    assert batch.shape == (3,)
    assert set(batch.tolist()) <= {*range(5), 10, 11}


def elastic(n: int = 6, size: Any = 2, **options: Any) -> Any:
    data = options.pop("data", list(range(n)))
    sampler = ElasticSampler(data, num_replicas=options.pop("world", 1), rank=0)
    return DataLoader(data, size, sampler=sampler, **options)


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        (in_order(6, 2), TypeError, r"sources\['b'\] is a DataLoader: .* over an ElasticSampler"),
        (elastic(size=None), TypeError, r"sources\['b'\] is a DataLoader: .*batch_size="),
        (elastic(num_workers=1), ValueError, r"sources\['b'\] has num_workers=1: .*use num_workers=0"),
        (elastic(size=3), ValueError, "has batch_size 3"),
        (elastic(world=2), ValueError, "has world_size 2"),
    ],
    ids=["order", "no batches", "workers", "batch size", "ranks"],
)
def test_a_loader_that_cannot_be_drawn_from_is_named(
    other: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Mixture({"a": elastic(), "b": other}, {"a": 1, "b": 1})


def test_a_dataset_with_generators_of_its_own_is_told() -> None:
    data = Named("few")
    data.augment.append(np.random.default_rng(1))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"sources\['a'\]: its dataset owns random generators") as caught:
        Mixture({"a": elastic(data=data)}, {"a": 1})
    assert caught[0].filename == __file__


def test_a_state_over_another_dataset_is_refused() -> None:
    mixture = Mixture({"a": elastic(6)}, {"a": 1})
    next(iter(mixture))
    with pytest.raises(ValueError, match="sources"):
        Mixture({"a": elastic(7)}, {"a": 1}).load_state_dict(mixture.state_dict())
