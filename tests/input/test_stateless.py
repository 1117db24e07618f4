"""Sources without a state: read and dropped up to where the loop stood; iterators that begin by reset()."""

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from overlapkit.input import DeviceLoader
from tests.input.sources import Stream, generator, in_order, plain


class Shuffled(IterableDataset[int]):
    """Draws its order from a generator of its own, or in workers from the seed that they were given."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.generator = generator()

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        source = self.generator if worker is None else generator(worker.seed)
        yield from torch.randperm(self.n, generator=source).tolist()


SOURCES: dict[str, Callable[[], Any]] = {
    "iterable loader": lambda: DataLoader(Stream(13), batch_size=2),
    "iterable": lambda: Stream(7),
    "function": lambda: lambda: iter(range(7)),
    "own generator": lambda: DataLoader(Shuffled(13), batch_size=2),
    "2 workers": lambda: DataLoader(Shuffled(7), batch_size=2, num_workers=2),
    "persistent worker": lambda: DataLoader(Stream(13), 2, num_workers=1, persistent_workers=True),
    "loader's generator": lambda: DataLoader(Shuffled(13), 2, num_workers=1, generator=generator()),
}


def epochs(loader: Any, stop: int, done: int = 0) -> list[Any]:
    """Steps `done` to `stop` of three epochs of 7 batches or 8, with a random number drawn in each."""
    steps: list[Any] = []
    while done + len(steps) < stop:
        for batch in loader if isinstance(loader, Iterable) else loader():
            steps.append((plain(batch), torch.rand(1).item()))
            if done + len(steps) == stop:
                break
    return steps


@pytest.mark.parametrize("stops", [(3,), (7,), (8,), (1, 5), (4, 12)], ids=str)
@pytest.mark.parametrize("kind", SOURCES)
def test_the_rest_is_what_it_would_have_been(kind: str, stops: tuple[int, ...]) -> None:
    torch.manual_seed(11)
    want = epochs(SOURCES[kind](), 20)
    torch.manual_seed(11)
    loader = DeviceLoader(SOURCES[kind](), "cpu", depth=3, drop_through=True)
    got = epochs(loader, stops[0])
    for stop in (*stops[1:], 20):
        state, random = loader.state_dict(), torch.get_rng_state()
        torch.manual_seed(99)
        loader = DeviceLoader(SOURCES[kind](), "cpu", depth=2, drop_through=True)
        loader.load_state_dict(state)
        torch.set_rng_state(random)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "drop_through=True: ", UserWarning)
            got += epochs(loader, stop, len(got))
    assert got == want


def test_a_state_saved_before_the_first_batch_has_the_order_that_was_drawn() -> None:
    loader = DeviceLoader(SOURCES["2 workers"](), "cpu")
    torch.manual_seed(4)
    passing = iter(loader)
    state = loader.state_dict()
    want = [plain(batch) for batch in passing]
    other = DeviceLoader(SOURCES["2 workers"](), "cpu")
    other.load_state_dict(state)
    assert [plain(batch) for batch in other] == want


def at(taken: int) -> dict[str, Any]:
    return {"format": 1, "source": "iterable", "taken": taken, "epoch": None, "order": None, "mark": None}


def resumed(source: Any, taken: int, **options: Any) -> DeviceLoader:
    loader = DeviceLoader(source, "cpu", drop_through=True, **options)
    loader.load_state_dict(at(taken))
    return loader


def test_what_is_dropped_is_read_in_the_reader_s_thread_said_and_neither_transformed_nor_counted() -> None:
    read, transformed = [], []

    def source() -> Iterator[int]:
        for k in range(6):
            read.append((k, threading.current_thread().name))
            yield k

    loader = resumed(source, 4, transform=lambda batch: transformed.append(batch) or batch)
    with pytest.warns(
        UserWarning, match="4 batches that were taken before are read again and dropped"
    ) as caught:
        passing = iter(loader)
    assert caught[0].filename == __file__
    assert next(passing) == 4
    assert loader.state_dict()["taken"] == 5
    assert list(passing) == [5]
    assert read == [(k, "overlapkit-input") for k in range(6)]
    assert transformed == [4, 5]
    names = [span.name for span in loader.timings()]
    assert (names.count("drop"), names.count("source")) == (1, 3)


def test_an_opt_in_is_asked_for_and_named() -> None:
    loader = DeviceLoader(Stream(6), "cpu")
    with pytest.raises(ValueError, match="has no state_dict.*drop_through=True"):
        loader.load_state_dict(at(3))


def test_an_opt_in_without_effect_is_told() -> None:
    with pytest.warns(UserWarning, match="drop_through=True has no effect") as caught:
        DeviceLoader(in_order(6, 2), "cpu", drop_through=True)
    assert caught[0].filename == __file__


def test_an_order_of_chance_cannot_be_dropped_through() -> None:
    source = DataLoader(Stream(6), batch_size=2, num_workers=2, in_order=False)
    with pytest.raises(ValueError, match="in_order=True"):
        DeviceLoader(source, "cpu", drop_through=True)


@pytest.mark.filterwarnings("ignore:drop_through=True:UserWarning")
def test_a_source_that_ends_too_early_is_another_one() -> None:
    passing = iter(resumed(Stream(6), 9))
    with pytest.raises(RuntimeError, match="stands after batch 9 .* source ends 3 before"):
        next(passing)


@pytest.mark.filterwarnings("ignore:drop_through=True:UserWarning")
def test_a_pass_is_closed_while_it_drops() -> None:
    def source() -> Iterator[int]:
        while True:
            time.sleep(0.001)
            yield 1

    passing = iter(resumed(source, 10**9))
    time.sleep(0.02)
    passing.close()
    assert list(passing) == []


class Resets:
    """As DALI's iterators: at its end it is reset by `iter` or `reset`, or by itself, and never before."""

    def __init__(self, n: int, auto_reset: bool, sized: bool = True) -> None:
        self.n, self.auto_reset, self.sized = n, auto_reset, sized
        self.epoch = self.at = 0

    def __iter__(self) -> "Resets":
        if self.at:
            self.reset()
        return self

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        if self.at == self.n:
            if self.auto_reset:
                self.reset()
            raise StopIteration
        self.at += 1
        return [{"data": torch.tensor([100 * self.epoch + self.at - 1])}]

    def reset(self) -> None:
        assert self.at == self.n, "DALI ignores it then, and logs that it does"
        self.epoch, self.at = self.epoch + 1, 0

    def __len__(self) -> int:
        return self.n if self.sized else 0  # DALI's own answer where it does not know


def values(batches: Any) -> list[int]:
    return [batch[0]["data"].item() for batch in batches]


@pytest.mark.parametrize("auto_reset", [False, True])
@pytest.mark.parametrize("sized", [False, True])
def test_an_iterator_with_reset_is_read_epoch_by_epoch(auto_reset: bool, sized: bool) -> None:
    loader = DeviceLoader(Resets(4, auto_reset, sized), "cpu", depth=3)
    assert [values(loader) for _ in range(3)] == [[100 * k + i for i in range(4)] for k in range(3)]
    between = loader.state_dict()
    other = DeviceLoader(Resets(4, auto_reset, sized), "cpu")
    other.load_state_dict(between)
    assert values(other) == [0, 1, 2, 3]


def test_a_pass_left_early_is_gone_on_with_and_the_state_knows() -> None:
    loader = DeviceLoader(Resets(9, False), "cpu", depth=1)
    passing = iter(loader)
    first = [next(passing)]
    while loader._feed.source.read < 2:  # type: ignore[attr-defined]
        time.sleep(0.001)
    passing.close()
    with pytest.warns(UserWarning, match="goes on after the 2 batches") as caught:
        passing = iter(loader)
    assert caught[0].filename == __file__
    assert values([*first, next(passing)]) == [0, 2]
    state = loader.state_dict()
    assert state["taken"] == 3
    assert values(passing) == [3, 4, 5, 6, 7, 8]
    assert values(loader) == [100 + k for k in range(9)]
    with pytest.raises(ValueError, match="Resets begins at an epoch's beginning.*drop_through=True"):
        loader.load_state_dict(state)
    other = DeviceLoader(Resets(9, False), "cpu", drop_through=True)
    other.load_state_dict(state)
    with pytest.warns(UserWarning, match="3 batches that were taken"):
        assert values(other) == [3, 4, 5, 6, 7, 8]


def test_all_read_and_not_all_taken_begins_the_next_epoch() -> None:
    loader = DeviceLoader(Resets(3, False), "cpu", depth=2)
    passing = iter(loader)
    next(passing)
    while loader._feed.source.read < 3:  # type: ignore[attr-defined]
        time.sleep(0.001)
    passing.close()
    passing = iter(loader)
    assert values([next(passing)]) == [100]
    assert loader.state_dict()["taken"] == 1
    passing.close()


def test_it_does_not_go_back_within_an_epoch() -> None:
    loader = DeviceLoader(Resets(9, False), "cpu", depth=1, drop_through=True)
    passing = iter(loader)
    next(passing)
    state = loader.state_dict()
    next(passing)
    passing.close()
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="after batch 1 .* does not go back within an epoch"):
        iter(loader)


def test_a_node_is_told_to_be_wrapped() -> None:
    from torchdata.nodes import IterableWrapper

    with pytest.raises(TypeError, match=r"IterableWrapper, a node.*torchdata\.nodes\.Loader\(node\)"):
        DeviceLoader(IterableWrapper(range(3)), "cpu")


@pytest.mark.parametrize("auto_reset", [False, True])
@pytest.mark.parametrize("sized", [False, True])
def test_dali_s_own_iterator(auto_reset: bool, sized: bool, tmp_path: Path) -> None:
    dali = pytest.importorskip("nvidia.dali")
    plugin = pytest.importorskip("nvidia.dali.plugin.pytorch")
    for k in range(8):
        np.save(tmp_path / f"{k}.npy", np.full(3, k))

    def rows(iteration: int) -> Any:
        if iteration == 4:
            raise StopIteration
        return np.repeat([[2 * iteration], [2 * iteration + 1]], 3, axis=1)

    pipe = dali.Pipeline(batch_size=2, num_threads=1, device_id=None, seed=1)
    with pipe:
        if sized:
            pipe.set_outputs(
                dali.fn.readers.numpy(file_root=str(tmp_path), file_filter="*.npy", name="files")
            )
        else:
            pipe.set_outputs(dali.fn.external_source(rows, batch=True))
    name = {"reader_name": "files"} if sized else {}
    source = plugin.DALIGenericIterator([pipe], ["data"], auto_reset=auto_reset, **name)
    loader = DeviceLoader(source, "cpu")
    for _ in range(3):
        got = [batch[0]["data"].tolist() for batch in loader]
        assert got == [[[2 * k] * 3, [2 * k + 1] * 3] for k in range(4)]
