"""What is drawn for a sample depends on (seed, epoch, index), and on nothing else."""

import copy
import functools
import pickle
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    StackDataset,
    Subset,
)

from overlapkit.input import DeviceLoader, SampleSeed, SeededDataset
from tests.input.sources import Augmented, Careless, Numbers

N = 12


def careless(n: int = N) -> SeededDataset:
    return SeededDataset(Careless(n), 17)


def samples(batches: Any) -> list[tuple[float, ...]]:
    """Each sample of some batches of columns, as a row."""
    return [row for batch in batches for row in zip(*(column.tolist() for column in batch), strict=True)]


def truth(dataset: Any, epoch: int) -> dict[int, tuple[float, ...]]:
    """By index, what is drawn in the main thread, in no order that a loader would use."""
    for holder in (dataset, getattr(dataset, "seed", None)):
        if isinstance(holder, SampleSeed):
            holder.set_epoch(epoch)
    return {index: dataset[index] for index in reversed(range(len(dataset)))}


MAKES: dict[str, Callable[[], Any]] = {"own generator": lambda: Augmented(N), "global generators": careless}
WORKERS: dict[str, dict[str, Any]] = {
    "reader's thread": {},
    "2 workers": {"num_workers": 2},
    "persistent worker": {"num_workers": 1, "persistent_workers": True},
    "spawned worker": {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"},
}
CASES = [(m, w) for m in MAKES for w in WORKERS if (m, w) != ("global generators", "reader's thread")]


@pytest.mark.parametrize(("make", "workers"), CASES)
def test_the_same_by_every_way_of_loading_in_each_epoch(make: str, workers: str) -> None:
    want = [truth(MAKES[make](), epoch) for epoch in range(3)]
    assert len({row[1] for epoch in want for row in epoch.values()}) == 3 * N
    loader = DeviceLoader(DataLoader(MAKES[make](), 3, shuffle=True, **WORKERS[workers]), "cpu")
    for epoch in (0, 1, 2, 0):
        loader.set_epoch(epoch)
        rows = samples(loader)
        assert len(rows) == N
        assert all(row == pytest.approx(want[epoch][row[0]], abs=0) for row in rows)
    loader.close()


@pytest.mark.parametrize(("make", "workers"), [case for case in CASES if case[1] != "spawned worker"])
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_resumed_run_augments_as_an_unbroken_one(make: str, workers: str, stop: int) -> None:
    def build() -> DeviceLoader:
        return DeviceLoader(DataLoader(MAKES[make](), 3, shuffle=True, **WORKERS[workers]), "cpu")

    torch.manual_seed(3)
    whole = build()
    whole.set_epoch(5)
    want = samples(whole)
    torch.manual_seed(3)
    first = build()
    first.set_epoch(5)
    got = samples(batch for _, batch in zip(range(stop), first, strict=False))
    state = first.state_dict()
    first.close()
    torch.manual_seed(4)
    second = build()
    second.load_state_dict(state)
    if stop < 4:
        got += samples(second)
    assert got == want
    for loader in (whole, second):
        loader.close()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_another_number_of_ranks_augments_the_same(world: int) -> None:
    want = truth(Augmented(N), 4)
    rows = []
    for rank in range(world):
        data = Augmented(N)
        sampler: Any = DistributedSampler(data, num_replicas=world, rank=rank)
        loader = DeviceLoader(DataLoader(data, 2, sampler=sampler), "cpu")
        loader.set_epoch(4)
        rows += samples(loader)
    assert {row[0]: row for row in rows} == want


def test_a_subset_passes_the_epoch_on() -> None:
    data = Augmented(N)
    loader = DeviceLoader(DataLoader(Subset(data, [3, 5])), "cpu")
    loader.set_epoch(2)
    assert data.seed.epoch == 2
    assert loader.state_dict()["epoch"] == 2
    assert samples(loader) == [truth(Augmented(N), 2)[k] for k in (3, 5)]


def test_in_the_main_thread_the_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    data = careless()
    assert len({data[index] for index in range(N)}) == N
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_in_the_reader_s_thread_global_generators_are_not_touched() -> None:
    passing = iter(DeviceLoader(DataLoader(careless()), "cpu"))
    before = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(RuntimeError, match=r"num_workers=1 or more, or draw from .*SampleSeed"):
        next(passing)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))])
def test_copies_reach_their_workers_too(copied: Callable[[Any], Any]) -> None:
    data = copied(Augmented(N))
    loader = DeviceLoader(DataLoader(data, 4, num_workers=1, persistent_workers=True), "cpu")
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert samples(loader) == list(truth(Augmented(N), epoch).values())[::-1]
    loader.close()


def test_an_index_is_a_number_however_it_is_written_or_a_name() -> None:
    seed = SampleSeed(3)
    assert seed.of(7) == seed.of(np.int64(7)) == seed.of(torch.tensor(7))
    assert seed.of((7, 1)) == seed.of((np.int64(7), np.int32(1)))
    assert len({seed.of(index) for index in (7, -7, "a", "b", (7, 1))}) == 5
    assert 0 <= seed.of(7) < 2**64
    assert SampleSeed(3).of(7) == seed.of(7) != SampleSeed(4).of(7)


def test_it_is_on_the_host_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        seed = SampleSeed(3)
        seed.set_epoch(2)
        assert seed.epoch == 2
        assert seed.generator(7).initial_seed() == seed.of(7)


@pytest.mark.parametrize("bad", [1.5, True, None, "1"])
def test_bad_arguments_are_named(bad: Any) -> None:
    with pytest.raises(ValueError, match=f"seed={bad!r}"):
        SampleSeed(bad)
    with pytest.raises(ValueError, match=f"epoch={bad!r}"):
        SampleSeed(1).set_epoch(bad)


def test_another_thread_is_refused() -> None:
    errors: list[Exception] = []

    def ask() -> None:
        try:
            careless()[0]
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(errors) == 1


class Holding(Dataset[Any]):
    """A dataset that reaches its seed by way of `make(seed)`."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


class Slotted:
    __slots__ = ("seed", "unset")

    def __init__(self, seed: Any) -> None:
        self.seed = seed


class Shy(SimpleNamespace):
    """Whose properties are not for us to ask."""

    @property
    def epoch(self) -> Any:
        raise AssertionError

    @property
    def other(self) -> Any:
        raise AssertionError


WRAPS: dict[str, Callable[[SampleSeed], Any]] = {
    "attribute": Holding,
    "transforms": lambda seed: Holding([SimpleNamespace(steps={"flip": (None, SimpleNamespace(seed=seed))})]),
    "slots": lambda seed: Holding(Slotted(seed)),
    "partial": lambda seed: Holding(functools.partial(seed.of)),
    "closure": lambda seed: Holding(lambda index: seed.of(index)),
    "module": lambda seed: Holding(torch.nn.Sequential(module_with(seed))),
    "subset": lambda seed: Subset(Subset(Holding(seed), [0, 1]), [1]),
    "concatenated": lambda seed: ConcatDataset([Numbers(2), Subset(Holding(seed), [0])]),
    "stacked": lambda seed: StackDataset(a=Holding(seed), b=Numbers(2)),
    "many": lambda seed: ConcatDataset([*(Numbers(1) for _ in range(1000)), Holding(seed)]),
    "beside many": lambda seed: ConcatDataset([Holding([("a", k) for k in range(9999)]), Holding(seed)]),
    "circle": lambda seed: in_a_circle(Holding(seed)),
    "shy": lambda seed: Holding(Shy(seed=seed)),
    "iterable": lambda seed: ChainDataset([Streamed(seed)]),
}


class Streamed(IterableDataset[int]):
    def __init__(self, seed: SampleSeed) -> None:
        self.seed = seed

    def __iter__(self) -> Any:
        return iter([0, 1])


def module_with(seed: SampleSeed) -> torch.nn.Module:
    module = torch.nn.Identity()
    module.seed = seed  # type: ignore[assignment]
    return module


def in_a_circle(data: Any) -> Any:
    data.again = [data]
    return data


@pytest.mark.parametrize("how", WRAPS)
def test_the_epoch_reaches_a_seed_wherever_a_dataset_keeps_it(how: str) -> None:
    seed = SampleSeed(3)
    loader = DeviceLoader(DataLoader(WRAPS[how](seed)), "cpu")
    loader.set_epoch(4)
    assert seed.epoch == 4
    assert loader.state_dict()["epoch"] == 4


def test_the_epoch_reaches_all_that_have_one() -> None:
    class Told:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    told = [Told(), Told(), Told()]
    inner = Holding(told[0])
    inner.set_epoch = told[1].set_epoch  # type: ignore[attr-defined]  # forwarded, as wrappers do
    data = ConcatDataset([Subset(inner, [0])])
    loader = DeviceLoader(DataLoader(data, collate_fn=functools.partial(lambda _, samples: samples, told[2])))
    loader.set_epoch(7)
    assert [one.epoch for one in told] == [7, 7, 7]
