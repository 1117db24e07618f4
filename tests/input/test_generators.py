"""Generators that a dataset owns: drawn from in the reader's thread, and bitwise again after a resume."""

import json
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from overlapkit.input import DeviceLoader, ElasticSampler
from overlapkit.input.generators import Generators
from tests.input.sources import stateful

N = 22
MAKES: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(5),
    "random": lambda: random.Random(5),
    "numpy": lambda: np.random.default_rng(5),
    "numpy, another kind": lambda: np.random.Generator(np.random.MT19937(5)),
    "numpy's old one": lambda: np.random.RandomState(5),
}


def number(generator: Any) -> float:
    """A draw, which leaves all of them with something kept for the next one."""
    if isinstance(generator, torch.Generator):
        return torch.randn((), generator=generator).item()
    if isinstance(generator, random.Random):
        return generator.gauss(0, 1)
    return float(generator.normal())


class Noise:
    """A transform that owns a generator."""

    def __init__(self, generator: Any) -> None:
        self.held = [generator]

    def __call__(self, index: int) -> tuple[int, float]:
        return index, number(self.held[0])


class Noisy(Dataset[Any]):
    def __init__(self, generator: Any, n: int = N) -> None:
        self.n, self.transform = n, Noise(generator)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.transform(index)


def loader(kind: str, *, elastic: bool = False, workers: int = 0, data: Any = None) -> DeviceLoader:
    data = Noisy(MAKES[kind]()) if data is None else data
    how: dict[str, Any] = {"shuffle": True, "generator": torch.Generator().manual_seed(1)}
    if elastic:
        how = {"sampler": ElasticSampler(data, num_replicas=1, rank=0, seed=3)}
    return DeviceLoader(DataLoader(data, 2, num_workers=workers, **how), "cpu", depth=3)


def rows(batches: Any) -> list[Any]:
    return [batch[0].tolist() + batch[1].tolist() for batch in batches]


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("elastic", [False, True], ids=["shuffled", "elastic"])
@pytest.mark.parametrize("stops", [[0], [3], [11], [5, 7]], ids=str)
def test_a_resumed_run_draws_as_an_unbroken_one(kind: str, elastic: bool, stops: list[int]) -> None:
    whole = loader(kind, elastic=elastic)
    want = rows(whole) + rows(whole)
    got: list[Any] = []
    state = None
    for stop in stops:
        part = loader(kind, elastic=elastic)
        if state is not None:
            part.load_state_dict(state)
        passing = iter(part)
        got += rows(batch for _, batch in zip(range(stop - len(got)), passing, strict=False))
        state = part.state_dict()
        state["drawn"] = json.loads(json.dumps(state["drawn"], default=torch.Tensor.tolist))
        passing.close()
    last = loader(kind, elastic=elastic)
    last.load_state_dict(state)
    got += rows(last)
    got += [] if len(got) == len(want) else rows(last)
    assert got == want


@pytest.mark.parametrize("kind", MAKES)
def test_an_early_break_leaves_them_behind_the_last_batch_taken(kind: str) -> None:
    one, other = loader(kind), loader(kind)
    for stop in (3, 1, 6):
        for taken, _ in enumerate(one, 1):
            if taken == stop:
                break
    for stop in (3, 1, 6):
        rows(batch for _, batch in zip(range(stop), other, strict=False))
        _, drawn = other.state_dict()["drawn"]
    (generator,) = one.dataset.transform.held
    fresh = Generators([MAKES[kind]()])
    fresh.restore(drawn)
    assert number(generator) == number(fresh._generators[0])


def test_they_are_found_wherever_a_dataset_keeps_them() -> None:
    deep = ConcatDataset([Subset(Noisy(MAKES["numpy"](), 7), [0, 2, 5]), Noisy(MAKES["random"](), 5)])
    generator, drawn = MAKES["torch"](), MAKES["torch"]()

    def collate(samples: list[Any]) -> Any:
        return [torch.tensor(column) for column in zip(*samples, strict=True)] + [number(drawn)]

    first = DeviceLoader(DataLoader(deep, 2, shuffle=True, generator=generator, collate_fn=collate), "cpu")
    next(iter(first))
    who, states = first.state_dict()["drawn"]
    assert who == [0, 1]
    assert len(states) == 3
    assert len(first.state_dict()["order"]["generators"]) == 1


def test_those_of_everyone_and_of_the_sampler_are_not_the_dataset_s() -> None:
    shared = torch.Generator()
    data = Noisy(shared)
    data.everyone = [torch.default_generator, random._inst, np.random.mtrand._rand]  # type: ignore[attr-defined]
    data.system = random.SystemRandom()  # type: ignore[attr-defined]
    made = DeviceLoader(DataLoader(data, 2, shuffle=True, generator=shared), "cpu")
    assert made.state_dict()["drawn"] is None


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12
def test_a_resume_that_cannot_go_on_as_it_was_is_told() -> None:
    one = loader("numpy")
    next(iter(one))
    with_workers = loader("numpy", workers=1)
    with_workers.load_state_dict(one.state_dict())
    with pytest.warns(UserWarning, match=r"owns 1 random generator.*each worker has.*SampleSeed") as caught:
        passing = iter(with_workers)
    assert [one.filename for one in caught if one.category is UserWarning][:1] == [__file__]
    next(passing)
    state = with_workers.state_dict()
    passing.close()
    again = loader("numpy")
    again.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"owns 1 random generator"):
        list(again)


def test_another_number_of_ranks_does_not_draw_alike_on_all_of_them() -> None:
    """Every rank gets rank 0's state then: generators begin as each rank seeded them, and that is told."""

    def build(rank: int, world: int) -> DeviceLoader:
        data = Noisy(np.random.default_rng([5, rank]))
        sampler: Any = ElasticSampler(data, num_replicas=world, rank=rank, seed=3)
        return DeviceLoader(DataLoader(data, 2, sampler=sampler), "cpu")

    one = build(0, 2)
    next(iter(one))
    drawn = []
    for rank in range(3):
        again = build(rank, 3)
        again.load_state_dict(one.state_dict())
        with pytest.warns(UserWarning, match=r"at batch 4: it has those of rank 0 of 2\. What"):
            passing = iter(again)
        drawn.append(next(passing)[1].tolist())
        passing.close()
        truth = np.random.default_rng([5, rank])
        assert drawn[-1] == [number(truth), number(truth)]


def test_a_source_with_a_state_that_lacks_them_is_told_when_it_is_resumed() -> None:
    """torchdata notes the dataset's state where it has one: then it is the dataset's to hold them."""

    class Remembering(Noisy):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    def resumed(kind: type[Noisy]) -> DeviceLoader:
        one, again = (DeviceLoader(stateful(kind(MAKES["numpy"]()), 2), "cpu") for _ in range(2))
        next(iter(one))
        again.load_state_dict(one.state_dict())
        return again

    next(iter(resumed(Remembering)))
    again = resumed(Noisy)
    with pytest.warns(UserWarning, match=r"owns 1 random generator.*dataset with state_dict\(\)") as caught:
        iter(again)
    assert caught[0].filename == __file__


def test_without_generators_nothing_is_told() -> None:
    def stream() -> Iterator[int]:
        yield from range(3)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for source in (DataLoader(list(range(6)), 2, num_workers=1), [1, 2, 3], stream):
            one = DeviceLoader(source, "cpu")
            next(iter(one))
            assert not one.state_dict()["drawn"]


@pytest.mark.parametrize("kind", MAKES)
def test_another_kind_of_generator_is_refused(kind: str) -> None:
    saved = Generators([MAKES[kind]()]).save()
    alike = {"numpy, another kind", "numpy's old one"}  # both are a Mersenne twister of numpy's
    for other in MAKES.keys() - (alike if kind in alike else {kind}):
        with pytest.raises(RuntimeError, match=r"source has 1 random generator\(s\), or others"):
            Generators([MAKES[other]()]).restore(saved)


def test_a_damaged_state_is_refused() -> None:
    one = loader("numpy")
    next(iter(one))
    for drawn in ([], [[0, 1]], [0, 1], "ab", {"a": []}):
        with pytest.raises(ValueError, match="state has drawn=.*: it is damaged"):
            one.load_state_dict({**one.state_dict(), "drawn": drawn})
    who, (numpy,) = one.state_dict()["drawn"]
    state = {**one.state_dict(), "drawn": [who, [numpy, numpy]]}
    one.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"2 generator state\(s\), source has 1"):
        iter(one)
