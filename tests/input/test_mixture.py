"""Mixture against samples drawn one by one, over stops, world sizes, readers and changes of weights."""

import json
import math
import warnings
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from overlapkit.input.loader import DeviceLoader
from overlapkit.input.mixture import Mixture
from overlapkit.input.order import permute
from overlapkit.input.sampler import ElasticSampler
from overlapkit.input.tokens import TokenShards
from overlapkit.input.weights import Plan, uniform
from overlapkit.input.windows import fields
from tests.input.token_sets import all_windows, write_set

LENGTHS = {"web": [70, 30, 45], "code": [20, 9], "few": [7]}
FIRST_TOKEN = {"web": 0, "code": 1000, "few": 2000}
WINDOW = 3
NAMES = list(LENGTHS)
Weights = dict[str, float]
Steps = list[tuple[int, Weights]]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source of two windows goes round hundreds of times in one block of the usual size."""
    monkeypatch.setattr("overlapkit.input.drawing._OWN", 50)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three sets; each token tells which one it is of."""
    root = tmp_path_factory.mktemp("mixture")
    for name, lengths in LENGTHS.items():
        write_set(root / name, lengths, 80, FIRST_TOKEN[name])
    return {name: root / name for name in LENGTHS}


def windows_of(folders: dict[str, Path], name: str) -> list[list[int]]:
    return all_windows(folders[name], WINDOW)


def build(
    folders: dict[str, Path],
    weights: Any,
    rank: int = 0,
    world: int = 1,
    batch_size: int = 2,
    seed: int = 3,
    **options: Any,
) -> Mixture:
    sources = {
        name: TokenShards(folders[name], WINDOW, batch_size, seed=11 + number, rank=rank, world_size=world,
                          **{"drop_last": False, **options})
        for number, name in enumerate(NAMES)
    }  # fmt: skip
    return Mixture(sources, weights, seed=seed)


def truth(folders: dict[str, Path], steps: Steps, epoch: int = 0) -> Iterator[list[int]]:
    """The rows of an epoch, one after the other, of all ranks."""
    windows = {name: windows_of(folders, name) for name in NAMES}
    drawn = dict.fromkeys(NAMES, 0)
    for at in count():
        weights = [weights for start, weights in steps if start <= at][-1]
        left = float(uniform(3, epoch, at, at + 1)[0]) * sum(weights.values())
        for number, name in enumerate(NAMES):  # noqa: B007
            left -= weights[name]
            if weights[name] and left < 0:
                break
        turn, place = divmod(drawn[name], len(windows[name]))
        size = len(windows[name])
        sample = permute(np.array([place]), size, 11 + number, (epoch << 32) + turn)[0]
        drawn[name] += 1
        yield windows[name][sample]


def rows(batches: Iterator[Any], number: int) -> list[list[int]]:
    return [row for batch in islice(batches, number) for row in batch.tolist()]


def dealt(ranks: list[list[list[int]]]) -> list[list[int]]:
    """What all ranks took, in the order of the samples."""
    return [row for step in zip(*ranks, strict=True) for row in step]


EVEN: Weights = {"web": 0.5, "code": 0.3, "few": 0.2}
CODE: Weights = {"web": 0.0, "code": 1.0, "few": 0.0}


@pytest.mark.parametrize("pack", ["windows", "documents"])
def test_batches_are_on_the_host_whatever_the_default_device_is(folders: dict[str, Path], pack: Any) -> None:
    def taken() -> list[Any]:
        shards = TokenShards(folders["web"], WINDOW, 2, pack=pack)
        both = *shards, *islice(build(folders, EVEN, pack=pack), 5)
        return [[field.tolist() for field in fields(batch)] for batch in both]

    with torch.device("meta"):
        found = taken()
    assert found == taken()


WEIGHTS = st.lists(st.sampled_from([0, 1, 2, 0.5, 7]), min_size=3, max_size=3).filter(any)


def named(weights: list[float]) -> Weights:
    return dict(zip(NAMES, weights, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    first=WEIGHTS,
    later=st.lists(st.tuples(st.integers(1, 80), WEIGHTS), max_size=3, unique_by=lambda step: step[0]),
    world=st.integers(1, 4),
    batch_size=st.integers(1, 6),
    batches=st.integers(1, 8),
)
def test_every_rank_s_rows_are_those_drawn_one_by_one(
    folders: dict[str, Path], first: list[float], later: list[Any], world: int, batch_size: int, batches: int
) -> None:
    steps = [(0, named(first)), *((at, named(weights)) for at, weights in sorted(later))]
    weights = steps if later else named(first)
    ranks = [rows(iter(build(folders, weights, rank, world, batch_size)), batches) for rank in range(world)]
    assert dealt(ranks) == list(islice(truth(folders, steps), batches * batch_size * world))


@pytest.mark.filterwarnings("ignore:the state's weights take the place")
@settings(max_examples=30, deadline=None)
@given(
    passes=st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 3), st.integers(1, 9), st.none() | WEIGHTS),
        min_size=1,
        max_size=5,
    ),
)
def test_ranks_come_and_go_and_weights_change(folders: dict[str, Path], passes: list[Any]) -> None:
    """Each life has other ranks and batches; some set weights before their first batch."""
    steps: Steps = [(0, EVEN), (40, named([1, 1, 2]))]
    seen: list[list[int]] = []
    state = None
    for world, batch_size, batches, weights in passes:
        ranks = [
            build(folders, [(0, EVEN), (40, named([1, 1, 2]))], r, world, batch_size) for r in range(world)
        ]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(json.loads(json.dumps(state)))
            if weights is not None:
                rank.set_weights(named(weights))
        if weights is not None:
            steps = [step for step in steps if step[0] < len(seen)] + [(len(seen), named(weights))]
        seen += dealt([rows(iter(rank), batches) for rank in ranks])
        state = ranks[0].state_dict()
        assert all(rank.state_dict() == state for rank in ranks)
        assert state["position"] == len(seen)
    assert seen == list(islice(truth(folders, steps), len(seen)))


def test_four_ranks_then_three_then_eight(folders: dict[str, Path]) -> None:
    state, seen = None, []
    for world, batches in ((4, 5), (3, 4), (8, 2), (1, 9)):
        ranks = [build(folders, EVEN, rank, world) for rank in range(world)]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        seen += dealt([rows(iter(rank), batches) for rank in ranks])
        state = ranks[-1].state_dict()
    assert seen == list(islice(truth(folders, [(0, EVEN)]), len(seen)))
    assert len(seen) == 114


def test_epochs_of_the_sources_are_counted(folders: dict[str, Path]) -> None:
    mixture = build(folders, EVEN, batch_size=1)
    batches = iter(mixture)
    drawn = dict.fromkeys(NAMES, 0)
    sizes = {name: len(windows_of(folders, name)) for name in NAMES}
    assert mixture.epochs == {"web": 0, "code": 0, "few": 0}
    for number in range(200):
        (row,) = next(batches).tolist()
        drawn[next(name for name in NAMES if row in windows_of(folders, name))] += 1
        assert mixture.epochs == {name: drawn[name] // sizes[name] for name in NAMES}
        assert mixture.position == number + 1
    assert min(mixture.epochs.values()) >= 1


def test_each_source_is_gone_through_before_it_repeats(folders: dict[str, Path]) -> None:
    for name in NAMES:
        windows = windows_of(folders, name)
        drawn = [row for row in rows(iter(build(folders, EVEN)), 300) if row in windows]
        for start in range(0, len(drawn) - len(windows) + 1, len(windows)):
            assert sorted(drawn[start : start + len(windows)]) == windows


def test_a_mixture_of_one_is_that_source(folders: dict[str, Path]) -> None:
    """Its epochs, too, are the source's, as long as they divide into batches."""

    def source() -> TokenShards:
        return TokenShards(folders["code"], WINDOW, 3, rank=0, world_size=1)

    plain = source()
    want = [batch.tolist() for _ in range(4) for batch in plain]
    assert len(want) == 12
    assert [batch.tolist() for batch in islice(Mixture({"x": source()}, {"x": 2}), 12)] == want


def test_each_pass_is_another_epoch(folders: dict[str, Path]) -> None:
    mixture = build(folders, EVEN)
    for epoch in (0, 1):
        assert rows(iter(mixture), 9) == list(islice(truth(folders, [(0, EVEN)], epoch), 18))
        assert mixture.epoch == epoch
    mixture.set_epoch(5)
    state = mixture.state_dict()
    assert rows(iter(mixture), 9) == list(islice(truth(folders, [(0, EVEN)], 5), 18))
    mixture.load_state_dict(state)
    mixture.set_epoch(5)
    assert rows(iter(mixture), 2) == list(islice(truth(folders, [(0, EVEN)], 5), 4))
    later = build(folders, EVEN)
    later.load_state_dict(mixture.state_dict())
    later.set_epoch(5)
    assert rows(iter(later), 2) == list(islice(truth(folders, [(0, EVEN)], 5), 4, 8))
    later.set_epoch(6)
    assert later.epochs == {"web": 0, "code": 0, "few": 0}
    with pytest.raises(ValueError, match="epoch=-1"):
        later.set_epoch(-1)
    with pytest.raises(TypeError, match="len"):
        len(mixture)  # type: ignore[arg-type]


def test_an_older_pass_moves_nothing(folders: dict[str, Path]) -> None:
    mixture = build(folders, EVEN)
    old, new = iter(mixture), iter(mixture)
    rows(new, 1)
    state = mixture.state_dict()
    assert rows(old, 3) == list(islice(truth(folders, [(0, EVEN)], 0), 6))
    assert mixture.state_dict() == state
    assert rows(new, 3) == list(islice(truth(folders, [(0, EVEN)], 1), 2, 8))


def test_blocks_do_not_show(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows(iter(build(folders, EVEN, 1, 3)), 40)
    for block, ranks in ((8192, 1 << 18), (1, 1), (2, 100), (9, 12), (30, 7)):
        monkeypatch.setattr("overlapkit.input.drawing._OWN", block)
        monkeypatch.setattr("overlapkit.input.drawing._ALL", ranks)
        assert rows(iter(build(folders, EVEN, 1, 3)), 40) == whole


def test_weights_change_from_the_next_batch_on(folders: dict[str, Path]) -> None:
    mixture = build(folders, EVEN)
    batches = iter(mixture)
    got = rows(batches, 3)
    mixture.set_weights(CODE)
    assert mixture.weights == CODE
    got += rows(batches, 3)
    mixture.set_weights(named([1, 1, 1]), at=17)
    assert mixture.weights == CODE
    got += rows(batches, 6)
    assert mixture.weights == named([1, 1, 1])
    assert got == list(islice(truth(folders, [(0, EVEN), (6, CODE), (17, named([1, 1, 1]))]), 24))


def test_a_change_in_one_pass_holds_in_the_next(folders: dict[str, Path]) -> None:
    mixture = build(folders, [(0, EVEN), (10, named([1, 0, 0]))])
    rows(iter(mixture), 2)
    mixture.set_weights(CODE)
    assert rows(iter(mixture), 9) == list(islice(truth(folders, [(0, CODE)], 1), 18))
    mixture = build(folders, [(0, EVEN), (10, CODE)])
    rows(iter(mixture), 2)
    assert rows(iter(mixture), 9) == list(islice(truth(folders, [(0, CODE)], 1), 18))


def test_several_ranks_must_say_from_where_on(folders: dict[str, Path]) -> None:
    ranks = [build(folders, EVEN, rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.set_weights(named([1, 1, 1]))  # nobody has begun
    passes = [iter(rank) for rank in ranks]
    got = [rows(passes[0], 4), rows(passes[1], 2)]
    with pytest.raises(ValueError, match=r"at=None with 2 ranks, .*ahead of mixture.position \(16 here\)"):
        ranks[0].set_weights(CODE)
    with pytest.raises(ValueError, match="at=15: weights can change from sample 16 "):
        ranks[0].set_weights(CODE, at=15)
    for rank in ranks:
        rank.set_weights(CODE, at=18)
    got[0] += rows(passes[0], 4)
    got[1] += rows(passes[1], 6)
    assert dealt(got) == list(islice(truth(folders, [(0, named([1, 1, 1])), (18, CODE)]), 32))
    for at in (True, 40.0, "40"):
        with pytest.raises(ValueError, match="at="):
            ranks[0].set_weights(CODE, at=at)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(st.tuples(st.integers(1, 6), st.none() | WEIGHTS), min_size=1, max_size=5),
    depth=st.integers(1, 4),
    data=st.data(),
)
def test_a_loop_that_reads_ahead_resumes_exactly_whatever_weights_it_set(
    folders: dict[str, Path], events: list[Any], depth: int, data: st.DataObject
) -> None:
    """A run, and a run that goes on from any of its states: where a change took effect is in the state."""
    mixture = build(folders, EVEN)
    loader = DeviceLoader(mixture, "cpu", depth=depth)
    batches, taken, states = iter(loader), [], [loader.state_dict()]
    changed = [0]
    for number, weights in events:
        for batch in islice(batches, number):
            taken.append(batch.tolist())
            states.append(loader.state_dict())
        if weights is not None:
            mixture.set_weights(named(weights))
            states[-1] = loader.state_dict()
            changed.append(len(taken))
    for batch in islice(batches, 6):
        taken.append(batch.tolist())
        states.append(loader.state_dict())
    loader.close()
    steps = [(at, named(weights)) for _, at, *weights in mixture._plan.state((0, 0))]
    assert [row for batch in taken for row in batch] == list(islice(truth(folders, steps), 2 * len(taken)))
    stop = data.draw(st.integers(changed[-1], len(taken)))  # later changes are part of later states only
    again = DeviceLoader(build(folders, EVEN), "cpu", depth=depth)
    again.load_state_dict(json.loads(json.dumps(states[stop])))
    with warnings.catch_warnings(action="ignore"):  # of weights that are not those of the schedule
        rest = iter(again)
    assert [batch.tolist() for batch in islice(rest, len(taken) - stop)] == taken[stop:]
    again.close()


def test_a_change_after_a_batch_was_read_ahead_is_in_the_state_behind_it(folders: dict[str, Path]) -> None:
    """The case at its plainest: what the reader noted with batch 2 knew nothing of the change."""
    mixture = build(folders, EVEN)
    loader = DeviceLoader(mixture, "cpu", depth=4)
    batches = iter(loader)
    rows(batches, 1)
    while mixture.position < 2 * 4:
        pass  # until four batches were read ahead
    mixture.set_weights(CODE)
    position = mixture.position
    rows(batches, 1)
    state = loader.state_dict()
    assert state["mark"]["position"] == 4
    assert state["mark"]["weights"] == [[0, 0, *EVEN.values()], [0, position, *CODE.values()]]
    loader.close()


def test_a_loader_s_passes_and_epochs(folders: dict[str, Path]) -> None:
    def loop(loader: Any, begin: int, stop: int) -> Iterator[list[list[int]]]:
        for epoch in range(begin, 3):
            loader.set_epoch(epoch)
            for batch in islice(loader, stop):
                yield batch.tolist()

    want = list(loop(build(folders, EVEN), 0, 5))
    first = DeviceLoader(build(folders, EVEN), "cpu", depth=3)
    got = list(islice(loop(first, 0, 5), 7))
    second = DeviceLoader(build(folders, EVEN), "cpu", depth=3)
    second.load_state_dict(first.state_dict())
    first.close()
    second.set_epoch(1)
    got += [batch.tolist() for batch in islice(second, 3)]
    second.close()
    assert got == want[:10]
    assert list(loop(second, 2, 5)) == want[10:]
    second.close()


@pytest.mark.parametrize("pack", ["windows", "documents"])
def test_batches_go_into_the_memory_that_is_offered(folders: dict[str, Path], pack: Any) -> None:
    pool: list[torch.Tensor] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        pool.append(torch.full((math.prod(shape),), 99, dtype=torch.int32).to(dtype).view(shape))
        return pool[-1]

    filled = islice(build(folders, EVEN, batch_size=5, pack=pack).iter_into(empty), 4)
    plain = islice(build(folders, EVEN, batch_size=5, pack=pack), 4)
    for number, (batch, want) in enumerate(zip(filled, plain, strict=True)):
        fields = (batch,) if pack == "windows" else batch
        assert len(pool) == (number + 1) * len(fields)
        assert all(one is made for one, made in zip(fields, pool[-len(fields) :], strict=True))
        assert all(torch.equal(one, other) for one, other in zip(batch, want, strict=True))


def test_documents_of_rows_go_with_their_rows(folders: dict[str, Path]) -> None:
    """A row's documents and positions are those that its source has for it."""
    known = {}
    for name in NAMES:
        source = TokenShards(
            folders[name], WINDOW, 1, rank=0, world_size=1, shuffle=False, drop_last=False, pack="documents"
        )
        for batch in source:
            known[tuple(batch.tokens[0].tolist())] = batch.documents[0].tolist(), batch.positions[0].tolist()
    assert len(known) == sum(len(windows_of(folders, name)) for name in NAMES)
    for batch in islice(build(folders, EVEN, batch_size=7, pack="documents"), 10):
        for tokens, documents, positions in zip(*batch, strict=True):
            assert known[tuple(tokens.tolist())] == (documents.tolist(), positions.tolist())


def source(folders: dict[str, Path], **options: Any) -> TokenShards:
    given = {"window": WINDOW, "batch_size": 2, "rank": 0, "world_size": 2, "drop_last": False, **options}
    return TokenShards(folders["web"], **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 4}, r"sources\['b'\] has window 4, sources\['a'\] has 3"),
        ({"batch_size": 3}, "has batch_size 3"),
        ({"rank": 1}, "has rank 1"),
        ({"world_size": 3}, "has world_size 3"),
        ({"pack": "documents"}, "has pack documents"),
    ],
    ids=str,
)
def test_sources_that_differ(folders: dict[str, Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixture({"a": source(folders), "b": source(folders, **options)}, {"a": 1, "b": 1})


def test_sources_of_two_dtypes(folders: dict[str, Path], tmp_path: Path) -> None:
    write_set(tmp_path / "x", [20], dtype="uint32")
    other = TokenShards(tmp_path / "x", WINDOW, 2, rank=0, world_size=2)
    with pytest.raises(ValueError, match=r"has dtype torch.uint32, sources\['a'\] has torch.uint16"):
        Mixture({"a": source(folders), "b": other}, {"a": 1, "b": 1})


@pytest.mark.parametrize(
    ("sources", "error", "message"),
    [
        ({}, TypeError, "sources={}"),
        ([1], TypeError, r"sources=\[1\]"),
        ({"a": [1, 2]}, TypeError, r"sources\['a'\] is a list: give TokenShards"),
    ],
    ids=str,
)
def test_what_is_no_source(sources: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Mixture(sources, {"a": 1})


def test_a_source_without_a_name_and_a_seed_that_is_none(folders: dict[str, Path]) -> None:
    with pytest.raises(TypeError, match=r"sources\[1\]"):
        Mixture({1: source(folders)}, {1: 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="seed='1'"):
        Mixture({"a": source(folders)}, {"a": 1}, seed="1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights are of 'b'"):
        Mixture({"a": source(folders)}, {"b": 1})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 4}, "state has seed=4"),
        ({"sources": {}}, "state has sources={}"),
        ({"counts": [1, 2, 3]}, r"state has counts=\[1, 2, 3\] at position 8: it is damaged"),
        ({"counts": [9, -2, 1]}, "it is damaged"),
        ({"counts": [4, 4]}, "it is damaged"),
        ({"counts": None}, "it is damaged"),
        ({"counts": [8.0, 0, 0]}, "it is damaged"),
        ({"weights": [[0, 0, 1.0]]}, "state has weights .*: it is damaged"),
        ({"position": -1}, "it is damaged"),
        ({"format": 2}, "state has format=2"),
    ],
    ids=str,
)
def test_a_state_of_something_else_is_refused(
    folders: dict[str, Path], changed: dict[str, Any], message: str
) -> None:
    mixture = build(folders, EVEN)
    rows(iter(mixture), 4)
    state = mixture.state_dict()
    other = build(folders, CODE)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict({**state, **changed})
    assert other.state_dict() == build(folders, CODE).state_dict(), "nothing of it was taken over"


def test_a_state_that_lacks_something_is_refused(folders: dict[str, Path]) -> None:
    mixture = build(folders, EVEN)
    for key in mixture.state_dict():
        with pytest.raises(ValueError, match=f"state lacks {key}"):
            mixture.load_state_dict({k: v for k, v in mixture.state_dict().items() if k != key})
    with pytest.raises(TypeError, match="state is a NoneType"):
        mixture.load_state_dict(None)  # type: ignore[arg-type]


def test_another_sequence_of_the_sources_is_refused(folders: dict[str, Path]) -> None:
    """Counts and weights of a state stand in the sequence of its sources."""
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "drop_last": False}
    web, code = (TokenShards(folders[name], WINDOW, 2, **options) for name in ("web", "code"))
    weights = {"web": 1, "code": 2}
    mixture = Mixture({"web": web, "code": code}, weights)
    rows(iter(mixture), 3)
    state = json.loads(json.dumps(mixture.state_dict()))
    with pytest.raises(ValueError, match="state has sources="):
        Mixture({"code": code, "web": web}, weights).load_state_dict(state)
    again = Mixture({"web": web, "code": code}, {"code": 2, "web": 1})
    again.load_state_dict(state)
    assert again.state_dict() == state


def test_weights_that_a_state_takes_the_place_of_are_told(folders: dict[str, Path]) -> None:
    first = build(folders, [(0, EVEN), (10, CODE)])
    rows(iter(first), 3)
    state = first.state_dict()
    for alike in ([(0, EVEN), (10, CODE)], [(0, CODE), (6, EVEN), (10, CODE)]):
        build(folders, alike).load_state_dict(state)  # from there on the same
    other = build(folders, named([1, 1, 1]))
    with pytest.warns(
        UserWarning,
        match=r"the state's weights take .*web.: 0.5.* that of .*web.: 1.* call set_weights",
    ):
        other.load_state_dict(state)
    other.load_state_dict(state)  # said once
    other.set_weights(named([1, 1, 1]))
    want = islice(truth(folders, [(0, EVEN), (6, named([1, 1, 1]))]), 6, 26)
    assert rows(iter(other), 10) == list(want)


def test_few_batches_are_drawn_after_a_change_and_more_later(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overlapkit.input.drawing._OWN", 8192)
    drawn: list[int] = []
    choose = Plan.choose

    def spy(self: Plan, seed: int, epoch: int, start: int, stop: int) -> np.ndarray:
        drawn.append(stop - start)
        return choose(self, seed, epoch, start, stop)

    monkeypatch.setattr(Plan, "choose", spy)
    mixture = build(folders, EVEN)
    batches = iter(mixture)
    for _ in range(20):
        rows(batches, 1)
        mixture.set_weights(EVEN)
    assert sum(drawn) == 20 * 2
    rows(batches, 5000)
    assert drawn[20:] == [2, 16, 128, 1024, 8192, 8192]


def test_numpy_s_integers_are_integers(folders: dict[str, Path]) -> None:
    mixture = build(folders, EVEN, seed=np.int64(3))  # type: ignore[arg-type]
    mixture.set_weights(CODE, at=np.int64(4))  # type: ignore[arg-type]
    assert rows(iter(mixture), 5) == list(islice(truth(folders, [(0, EVEN), (4, CODE)]), 10))
    json.dumps(mixture.state_dict())


def test_changes_far_ahead_leave_what_is_in_force(folders: dict[str, Path]) -> None:
    mixture = build(folders, EVEN)
    batches = iter(mixture)
    got = rows(batches, 2)
    for at in range(1, 1200):
        mixture.set_weights(named([1, 1, at]), at=1000 + at)
    assert mixture.weights == EVEN
    assert got + rows(batches, 8) == list(islice(truth(folders, [(0, EVEN)]), 20))


def test_another_source_under_the_same_name_is_refused(folders: dict[str, Path]) -> None:
    state = Mixture({"a": source(folders)}, {"a": 1}).state_dict()
    for other in (source(folders, seed=9), source(folders, shuffle=False), source(folders, window=4)):
        with pytest.raises(ValueError, match="state has sources="):
            Mixture({"a": other}, {"a": 1}).load_state_dict(state)
    Mixture({"a": source(folders, batch_size=5, rank=1, world_size=4)}, {"a": 1}).load_state_dict(state)


def test_tokens_and_a_dataset_do_not_go_into_one_batch(folders: dict[str, Path]) -> None:
    sampler = ElasticSampler(range(5), num_replicas=2, rank=0)
    other = DataLoader(range(5), 2, sampler=sampler)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sources\['b'\] has kind samples, sources\['a'\] has tokens"):
        Mixture({"a": source(folders), "b": other}, {"a": 1, "b": 1})
