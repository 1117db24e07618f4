"""Stopping and going on anywhere is as if nothing had happened: against a loop without a DeviceLoader."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, Sampler

from overlapkit.input import DeviceLoader
from overlapkit.lane import Lane
from tests.input.sources import (
    MAP_STYLE,
    RESUMABLE,
    Numbers,
    StatefulStream,
    Stream,
    generator,
    in_order,
    node,
    own_generator,
    plain,
    shuffled,
    stateful_loader,
)

EPOCHS = 3


def set_epoch(source: Any, epoch: int) -> None:
    for holder in (source, getattr(source, "sampler", None), getattr(source, "batch_sampler", None)):
        if hasattr(holder, "set_epoch"):
            holder.set_epoch(epoch)
            return


def truth(source: Any) -> list[list[Any]]:
    """A training loop over the bare source: each epoch's batches, with a random number drawn in each step."""
    torch.manual_seed(11)
    epochs = []
    for epoch in range(EPOCHS):
        set_epoch(source, epoch)
        epochs.append([(plain(batch), torch.rand(1).item()) for batch in source])
    return epochs


class Run:
    """The same loop over a DeviceLoader, one process's life: it stops after `stop` steps or at the end."""

    def __init__(self, source: Any, depth: int) -> None:
        self.loader = DeviceLoader(source, "cpu", depth=depth)

    def steps(self, begin: int, stop: int | None) -> Iterator[tuple[int, Any]]:
        done = 0
        for epoch in range(begin, EPOCHS):
            self.loader.set_epoch(epoch)
            for batch in self.loader:
                yield epoch, (plain(batch), torch.rand(1).item())
                done += 1
                if done == stop:
                    return

    def save(self) -> Any:
        return self.loader.state_dict(), torch.get_rng_state()

    def load(self, saved: Any) -> None:
        self.loader.load_state_dict(saved[0])
        torch.set_rng_state(saved[1])


def resumed_run(build: Callable[[], Any], depth: int, lives: list[int]) -> list[list[Any]]:
    """Train through all epochs in several lives, each over a fresh source and with foreign random numbers."""
    epochs: list[list[Any]] = [[] for _ in range(EPOCHS)]
    per_epoch = len(list(build()))
    saved, done = None, 0
    for life, stop in enumerate([*lives, None]):
        torch.manual_seed(100 + life if saved is not None else 11)
        run = Run(build(), depth)
        if saved is not None:
            run.load(saved)
        for epoch, step in run.steps(done // per_epoch, stop):
            epochs[epoch].append(step)
            done += 1
        saved = run.save()
    return epochs


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(RESUMABLE)),
    n=st.integers(4, 23),
    size=st.integers(1, 5),
    depth=st.integers(1, 5),
    lives=st.lists(st.integers(1, 20), max_size=4),
)
def test_any_stops_give_the_uninterrupted_order(
    kind: str, n: int, size: int, depth: int, lives: list[int]
) -> None:
    size = min(size, n)
    build = lambda: RESUMABLE[kind](n, size)  # noqa: E731
    assert resumed_run(build, depth, lives) == truth(build())


@pytest.mark.parametrize("kind", sorted(RESUMABLE))
@pytest.mark.parametrize("lives", [[3], [1, 1], [6, 6], [2, 4, 1]], ids=str)
def test_stops_within_an_epoch_twice_and_at_its_end(kind: str, lives: list[int]) -> None:
    build = lambda: RESUMABLE[kind](12, 2)  # noqa: E731
    assert resumed_run(build, 2, lives) == truth(build())


@pytest.mark.parametrize(
    "kind", ["shuffled", "own generator", "distributed", "elastic", "stateful loader", "stateful stream"]
)
@pytest.mark.parametrize(
    "options", [{"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}], ids=str
)
def test_with_worker_processes(kind: str, options: dict[str, Any]) -> None:
    build = lambda: RESUMABLE[kind](16, 2, **options)  # type: ignore[call-arg]  # noqa: E731
    epochs = resumed_run(build, 2, [3, 7])
    assert [[batch for batch, _ in epoch] for epoch in epochs] == [
        [batch for batch, _ in epoch] for epoch in truth(build())
    ]


PERSISTENT = {"num_workers": 1, "persistent_workers": True}


@pytest.mark.parametrize("epochs", [0, 1, 2])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in sorted(RESUMABLE)),
        ("shuffled", PERSISTENT),
        ("own generator", PERSISTENT),
        ("own generator", {"num_workers": 1}),
    ],
    ids=str,
)
def test_saved_between_epochs(kind: str, options: dict[str, Any], epochs: int) -> None:
    """The loop has seen the end of an epoch and begun no other, or has begun none."""
    build = lambda: RESUMABLE[kind](12, 2, **options)  # type: ignore[call-arg]  # noqa: E731
    want = truth(build())
    torch.manual_seed(11)
    first = Run(build(), 2)
    for epoch in range(epochs):
        first.loader.set_epoch(epoch)
        assert [(plain(batch), torch.rand(1).item()) for batch in first.loader] == want[epoch]
    saved = first.save()
    torch.manual_seed(99)
    second = Run(build(), 2)
    second.load(saved)
    rest: list[list[Any]] = [[], [], []]
    for epoch, step in second.steps(epochs, None):
        rest[epoch].append(step)
    if not epochs and kind.startswith("stateful"):  # torchdata draws a seed when it is asked for a state
        rest, want = ([[batch for batch, _ in epoch] for epoch in run] for run in (rest, want))
    assert rest[epochs:] == want[epochs:]


@pytest.mark.parametrize("kind", sorted(RESUMABLE))
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_state_at_an_epoch_s_end_starts_the_next_though_no_epoch_is_set(kind: str, epochs: int) -> None:
    torch.manual_seed(11)
    first, second = (DeviceLoader(RESUMABLE[kind](12, 2), "cpu") for _ in range(2))
    lengths = {len(list(first)) for _ in range(epochs)}
    state, generator = first.state_dict(), torch.get_rng_state()
    want = [[plain(batch) for batch in first] for _ in range(2)]
    assert set(map(len, want)) == lengths
    torch.manual_seed(99)
    second.load_state_dict(state)
    torch.set_rng_state(generator)
    assert [[plain(batch) for batch in second] for _ in range(2)] == want


def test_a_loader_of_nodes() -> None:
    def order(lives: list[int]) -> list[Any]:
        taken: list[Any] = []
        saved = None
        for stop in [*lives, 10 - sum(lives)]:
            loader = DeviceLoader(node(11, 2), "cpu", depth=3)
            if saved is not None:
                loader.load_state_dict(saved)
            while stop:
                for batch in loader:
                    taken.append(plain(batch))
                    stop -= 1
                    if not stop:
                        break
            saved = loader.state_dict()
        return taken

    bare = node(11, 2)
    assert order([]) == [plain(batch) for _ in range(2) for batch in bare]
    assert order([2]) == order([4]) == order([5]) == order([4, 4]) == order([])


def test_skipped_samples_are_never_loaded() -> None:
    source = shuffled(20, 2)
    loader = DeviceLoader(source, "cpu", depth=1)
    torch.manual_seed(0)
    taken = [plain(batch) for _, batch in zip(range(7), loader, strict=False)]
    state = loader.state_dict()
    fresh = shuffled(20, 2)
    loader = DeviceLoader(fresh, "cpu", depth=1)
    loader.load_state_dict(state)
    rest = [plain(batch) for batch in loader]
    assert isinstance(fresh.dataset, Numbers)
    assert fresh.dataset.loaded == [index for batch in rest for index in batch]
    assert sorted(index for batch in taken + rest for index in batch) == list(range(20))


def test_state_counts_what_was_taken_not_what_was_read_ahead() -> None:
    loader = DeviceLoader(in_order(20, 2), "cpu", depth=5)
    iterator = iter(loader)
    assert loader.state_dict()["taken"] == 0
    for count in (1, 2, 3):
        next(iterator)
        assert loader.state_dict()["taken"] == count
    iterator.close()
    assert loader.state_dict()["taken"] == 3


def test_state_of_a_stateful_source_is_that_of_the_batch_handed_over() -> None:
    """The reader is batches ahead of the consumer when the state is asked for."""
    bare = stateful_loader(20, 2)
    torch.manual_seed(1)
    want = []
    for _ in zip(range(4), bare, strict=False):
        want.append(bare.state_dict())
    loader = DeviceLoader(stateful_loader(20, 2), "cpu", depth=4)
    torch.manual_seed(1)
    got = [loader.state_dict()["mark"] for _ in zip(range(4), loader, strict=False)]
    assert [s["_num_yielded"] for s in got] == [s["_num_yielded"] for s in want] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "wrap",
    [lambda at: at, lambda at: {"at": at}, lambda at: [{"at": at, "n": 1}], lambda at: (at,)],
    ids=["bare", "dict", "list", "tuple"],
)
def test_a_source_may_go_on_changing_the_state_that_it_gave_out(wrap: Callable[[Any], Any]) -> None:
    class Source:
        def __init__(self) -> None:
            self.at = [0, torch.zeros(1)]
            self.state = {"name": "x", "where": wrap(self.at)}

        def __iter__(self) -> Iterator[int]:
            for _ in range(5):
                self.at[0] += 1
                self.at[1].add_(1)
                yield self.at[0]

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    loader = DeviceLoader(Source(), "cpu", depth=4)
    states = [loader.state_dict()["mark"] for _ in loader]
    assert states == [{"name": "x", "where": wrap([k, torch.full((1,), float(k))])} for k in range(1, 6)]


def test_a_source_may_go_on_changing_the_state_that_it_was_given() -> None:
    class Source:
        state: dict[str, list[int]] = {"at": [0]}

        def __iter__(self) -> Iterator[int]:
            while self.state["at"][0] < 5:
                self.state["at"][0] += 1
                yield self.state["at"][0]

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    loader = DeviceLoader(Source(), "cpu")
    passing = iter(loader)
    assert [next(passing), next(passing)] == [1, 2]
    state = loader.state_dict()
    for _ in range(2):
        loader.load_state_dict(state)
        assert list(loader) == [3, 4, 5]


def test_state_before_anything_was_taken() -> None:
    torch.manual_seed(3)
    loader = DeviceLoader(own_generator(10, 2), "cpu")
    state = loader.state_dict()
    want = [plain(batch) for batch in loader]
    other = DeviceLoader(own_generator(10, 2), "cpu")
    list(other)
    other.load_state_dict(state)
    assert [plain(batch) for batch in other] == want


@pytest.mark.parametrize("kind", sorted(RESUMABLE))
@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_state_after_a_pass_has_begun_and_before_its_first_batch(kind: str, epochs: int) -> None:
    """It is the beginning of this pass, in this order, and of no other."""
    torch.manual_seed(3)
    loader = DeviceLoader(RESUMABLE[kind](12, 2), "cpu")
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        list(loader)
    loader.set_epoch(epochs)
    passing = iter(loader)
    state = loader.state_dict()
    assert loader.next_epoch == epochs
    want = [plain(batch) for batch in passing]
    torch.manual_seed(99)
    other = DeviceLoader(RESUMABLE[kind](12, 2), "cpu")
    other.load_state_dict(state)
    assert other.next_epoch == epochs
    other.set_epoch(epochs)
    assert [plain(batch) for batch in other] == want


def test_a_loaded_state_is_handed_on_until_a_batch_is_taken() -> None:
    first = DeviceLoader(shuffled(10, 2), "cpu")
    next(iter(first))
    state = first.state_dict()
    second = DeviceLoader(shuffled(10, 2), "cpu")
    second.load_state_dict(state)
    assert second.state_dict()["taken"] == 1
    iter(second)
    assert second.state_dict() is not None
    assert second.state_dict()["mark"] == state["mark"]


def test_only_the_next_pass_is_resumed() -> None:
    loader = DeviceLoader(in_order(10, 2), "cpu")
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert len(list(loader)) == 4
    assert len(list(loader)) == 5


@pytest.mark.parametrize("kind", sorted(MAP_STYLE))
def test_state_is_json_and_uint8_tensors(kind: str) -> None:
    loader = DeviceLoader(MAP_STYLE[kind](12, 2), "cpu")
    next(iter(loader))

    def number(value: Any) -> Any:
        assert isinstance(value, torch.Tensor)
        assert value.dtype is torch.uint8
        return value.tolist()

    state = json.loads(json.dumps(loader.state_dict(), default=number))
    loader.load_state_dict(state)  # lists do as well as tensors
    assert len(list(loader)) == len(list(MAP_STYLE[kind](12, 2))) - 1


def test_resuming_leaves_the_global_generator_alone() -> None:
    loader = DeviceLoader(shuffled(10, 2), "cpu")
    next(iter(loader))
    other = DeviceLoader(shuffled(10, 2), "cpu")
    other.load_state_dict(loader.state_dict())
    before = torch.get_rng_state()
    list(other)
    assert torch.equal(before, torch.get_rng_state())


def test_a_set_epoch_that_goes_unmentioned_is_resumed_too() -> None:
    def build() -> DeviceLoader:
        return DeviceLoader(MAP_STYLE["distributed"](12, 2), "cpu")

    loader = build()
    loader.set_epoch(5)
    batches = [plain(batch) for batch in loader]
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    iterator.close()
    other = build()
    other.load_state_dict(state)
    assert [plain(batch) for batch in other] == batches[1:]


@pytest.mark.parametrize("build", [in_order, shuffled, MAP_STYLE["distributed"]])
def test_an_epoch_that_is_set_only_after_loading_is_the_state_s_own(build: Callable[..., Any]) -> None:
    torch.manual_seed(3)
    bare = [plain(batch) for batch in build(12, 2)]
    torch.manual_seed(3)
    first, second = DeviceLoader(build(12, 2), "cpu"), DeviceLoader(build(12, 2), "cpu")
    begun = [plain(next(iter(first)))]
    second.load_state_dict(first.state_dict())
    second.set_epoch(0)
    assert begun + [plain(batch) for batch in second] == bare


def test_another_epoch_than_the_state_s_starts_at_its_beginning_with_a_warning() -> None:
    loader = DeviceLoader(MAP_STYLE["distributed"](12, 2), "cpu")
    loader.set_epoch(1)
    next(iter(loader))
    other = DeviceLoader(MAP_STYLE["distributed"](12, 2), "cpu")
    other.load_state_dict(loader.state_dict())
    other.set_epoch(2)
    with pytest.warns(UserWarning, match="stands after batch 1 of epoch 1, but epoch 2") as caught:
        got = [plain(batch) for batch in other]
    assert caught[0].filename == __file__
    loader.set_epoch(2)
    assert got == [plain(batch) for batch in loader]


@pytest.mark.parametrize(
    "changed",
    [
        lambda: in_order(12, 3),
        lambda: in_order(11, 2, sampler=list(range(11))[::-1]),
        lambda: MAP_STYLE["by epoch"](4, 2),
    ],
    ids=["batch size", "order", "fewer samples, unsized"],
)
def test_another_order_than_the_one_that_was_left_is_refused(changed: Callable[[], Any]) -> None:
    loader = DeviceLoader(in_order(12, 2), "cpu")
    for _ in zip(range(3), loader, strict=False):
        pass
    other = DeviceLoader(changed(), "cpu")
    other.load_state_dict(loader.state_dict())
    for _ in range(2):  # what was loaded is not forgotten by an iter() that failed
        with pytest.raises(RuntimeError, match="state stands after batch 3"):
            iter(other)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (lambda: in_order(4, 2), "taken 3 batches, source has 2"),
        (lambda: own_generator(12, 2), "holds 0 generator state"),
    ],
    ids=["fewer samples", "a generator"],
)
def test_a_source_that_cannot_be_the_same_is_refused_when_the_state_is_loaded(
    changed: Callable[[], Any], match: str
) -> None:
    loader = DeviceLoader(in_order(12, 2), "cpu")
    for _ in zip(range(3), loader, strict=False):
        pass
    with pytest.raises(ValueError, match=match):
        DeviceLoader(changed(), "cpu").load_state_dict(loader.state_dict())


DAMAGED: list[tuple[str, Any]] = [
    *(("taken", value) for value in ("three", None, 1.5, True, -1)),
    *(("epoch", value) for value in ("0", 0.0)),
    ("again", 1),
    *(("drawn", value) for value in (5, "ab", [1, []])),
    *(("order", value) for value in (3, [], {}, {"generators": None, "torch": None})),
    *(("order", {"generators": [[1, 2, 3]], "torch": torch}) for torch in ([0] * 5056, None, "text")),
    ("order", {"generators": []}),
]
DAMAGED_MAP = [("taken", 7), ("order", None), ("mark", "text"), ("mark", [1])]


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        *(("map", *what) for what in DAMAGED + DAMAGED_MAP),
        *(("iterable", *what) for what in DAMAGED),
        ("stateful", "mark", None),
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_a_damaged_state_is_refused_when_it_is_loaded(kind: str, key: str, value: Any) -> None:
    sources = {"map": own_generator(12, 2), "iterable": Stream(6), "stateful": StatefulStream(6)}
    source = sources[kind]
    loader = DeviceLoader(source, "cpu", drop_through=kind == "iterable")
    next(iter(loader))
    state = loader.state_dict()
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=rf"state (has {key}|has taken|holds).*(damaged|source)"):
        loader.load_state_dict({**state, key: value})


@pytest.mark.parametrize(
    "index",
    [list, np.array, torch.tensor, lambda batch: [(k, np.float64(0.5)) for k in batch]],
    ids=["lists", "arrays", "tensors", "numbers with a scale"],
)
def test_a_sampler_that_draws_elsewhere_is_found_out(index: Callable[[list[int]], Any]) -> None:
    import random

    class Elsewhere:
        def __iter__(self) -> Iterator[Any]:
            order = random.sample(range(50), 50)
            return (index(order[at : at + 2]) for at in range(0, 50, 2))

        def __len__(self) -> int:
            return 25

    class Whatever(Dataset[int]):
        def __getitem__(self, index: Any) -> int:
            return 0

    def build() -> DataLoader[int]:
        return DataLoader(Whatever(), batch_sampler=Elsewhere())

    loader = DeviceLoader(build(), "cpu")
    next(iter(loader))
    other = DeviceLoader(build(), "cpu")
    other.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="has other samples there"):
        iter(other)


def test_a_sampler_may_change_the_arrays_that_it_gave() -> None:
    class Reusing:
        def __iter__(self) -> Iterator[np.ndarray]:
            index = np.zeros(2, dtype=int)
            for at in range(0, 12, 2):
                index[:] = at, at + 1
                yield index

    loader = DeviceLoader(DataLoader(Numbers(12), batch_sampler=Reusing()), "cpu")  # type: ignore[arg-type]
    assert plain(next(iter(loader))) == [0, 1]
    loader.load_state_dict(loader.state_dict())
    assert [plain(batch) for batch in loader] == [[at, at + 1] for at in range(2, 12, 2)]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (DataLoader(Stream(6), batch_size=2), "IterableDataset"),
        (Stream(6), "no state_dict"),
        (lambda: iter(range(6)), "no state_dict"),
        (in_order(6, 2, num_workers=1, in_order=False), "in_order=False"),
    ],
    ids=["iterable dataset", "iterable", "function", "out of order"],
)
def test_a_source_without_a_state_is_taken_up_between_epochs_only(source: Any, why: str) -> None:
    loader = DeviceLoader(source, "cpu")
    whole = sorted(map(str, (plain(batch) for batch in loader)))
    between = loader.state_dict()
    next(iter(loader))
    with pytest.raises(ValueError, match=why):
        DeviceLoader(source, "cpu").load_state_dict(loader.state_dict())
    other = DeviceLoader(source, "cpu")
    other.load_state_dict(between)
    assert sorted(map(str, (plain(batch) for batch in other))) == whole


@pytest.mark.parametrize(
    ("state", "error", "match"),
    [
        (3, TypeError, "state is a int"),
        ({}, ValueError, "format None"),
        ({"format": 99}, ValueError, "format 99"),
        ({"format": 1, "source": "map"}, ValueError, "'map', this one is 'list'"),
        (
            {"format": 1, "source": "list", "taken": 9, "epoch": None, "order": None, "mark": None},
            ValueError,
            "9 b",
        ),
        (
            {"format": 1, "source": "list", "taken": -1, "epoch": None, "order": None, "mark": None},
            ValueError,
            "-1",
        ),
        ({"format": 1, "source": "list", "taken": 1}, ValueError, "lacks epoch, mark, order"),
    ],
)
def test_a_state_of_something_else_is_refused(state: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        DeviceLoader([1, 2], "cpu").load_state_dict(state)


def test_an_early_break_leaves_a_shared_generator_where_it_always_does() -> None:
    """How far the reader came ahead is chance; the next epoch's order must not depend on it."""

    def next_epoch(far: bool) -> list[Any]:
        source = MAP_STYLE["with replacement"](300, 4)
        loader = DeviceLoader(source, "cpu", depth=9)
        passing = iter(loader)
        next(passing)
        if far:
            deadline = time.monotonic() + 10
            while len(source.dataset.loaded) < 40 and time.monotonic() < deadline:  # type: ignore[attr-defined]
                time.sleep(0.001)
        passing.close()
        return [plain(batch) for batch in loader]

    with pytest.MonkeyPatch.context() as patch:
        far = next_epoch(far=True)
        patch.setattr(Lane, "delay_s", 0.01)
        assert next_epoch(far=False) == far


def test_a_device_loader_of_a_device_loader() -> None:
    torch.manual_seed(2)
    want = [plain(batch) for batch in in_order(12, 2)]
    loader = DeviceLoader(DeviceLoader(in_order(12, 2), "cpu", depth=3), "cpu", depth=2)
    taken = [plain(batch) for _, batch in zip(range(2), loader, strict=False)]
    other = DeviceLoader(DeviceLoader(in_order(12, 2), "cpu", depth=3), "cpu", depth=2)
    other.load_state_dict(loader.state_dict())
    assert taken + [plain(batch) for batch in other] == want
    assert generator().initial_seed() == 5


def test_leaving_the_rest_of_an_epoch_waits_for_the_reader_that_has_begun_it() -> None:
    class Slow(Sampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            for index in range(20):
                time.sleep(0.0003)
                yield 100 * self.epoch + index

        def __len__(self) -> int:
            return 20

    class Reads(Dataset):
        def __getitem__(self, index: int) -> int:
            time.sleep(0.001)
            return index

    def make() -> DeviceLoader:
        return DeviceLoader(DataLoader(Reads(), 2, sampler=Slow()), "cpu", depth=2)

    first = make()
    passing = iter(first)
    next(passing)
    state = first.state_dict()
    passing.close()
    for _ in range(10):
        loader = make()
        loader.load_state_dict(state)
        loader.set_epoch(1)
        with pytest.warns(UserWarning, match="epoch 1 was set"):
            taken = [index for batch in loader for index in batch.tolist()]
        assert taken == list(range(100, 120))


class Epochs:
    """A source with a state and epochs of its own: batch k of epoch e is 10 * e + k."""

    def __init__(self, n: int) -> None:
        self.n, self.epoch, self.at, self.told = n, 0, 0, True

    def __iter__(self) -> Iterator[int]:
        if not self.told:
            self.epoch, self.at = self.epoch + 1, 0
        self.told = False
        return self._rest()

    def _rest(self) -> Iterator[int]:
        while self.at < self.n:
            self.at += 1
            yield 10 * self.epoch + self.at - 1

    def set_epoch(self, epoch: int) -> None:
        if not (self.told and epoch == self.epoch):
            self.epoch, self.at = epoch, 0
        self.told = True

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at, self.told = state["epoch"], state["at"], True


@pytest.mark.parametrize("lives", [[3], [1, 1], [4], [5], [8, 2], [4, 4]], ids=str)
def test_a_source_with_epochs_of_its_own_has_the_last_word_on_them(lives: list[int]) -> None:
    assert resumed_run(lambda: Epochs(4), 2, lives) == truth(Epochs(4))


def test_an_epoch_set_after_the_state_was_loaded_is_begun_whole() -> None:
    loader = DeviceLoader(Epochs(4), "cpu")
    next(iter(loader))
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.set_epoch(7)
    assert list(loader) == [70, 71, 72, 73]


class Later(Epochs):
    """A source whose state is worked out when it is asked for: it has what was noted until then."""

    notes = 0

    def state_later(self) -> Callable[[], dict[str, int]]:
        noted = self.state_dict()
        return lambda: {**noted, "notes": self.notes}


def test_what_a_source_was_told_after_a_batch_was_read_ahead_is_in_the_state_behind_it() -> None:
    source = Later(9)
    loader = DeviceLoader(source, "cpu", depth=4)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    source.notes = 5
    assert loader.state_dict()["mark"] == {"epoch": 0, "at": 2, "notes": 5}
    loader.close()
