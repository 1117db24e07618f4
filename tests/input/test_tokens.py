"""TokenShards against windows cut one by one, over stops, world sizes and shapes."""

import copy
import json
import math
import pickle
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapkit.input import windows as windows_module
from overlapkit.input.loader import DeviceLoader
from overlapkit.input.order import permute
from overlapkit.input.tokens import TokenShards
from tests.input.token_sets import all_windows, load_set, write_set


def taken(source: Any, batches: int | None = None) -> Iterator[list[list[int]]]:
    """The rows of each of a pass's first batches."""
    iterator = iter(source)
    while batches is None or batches > 0:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch.tolist()
        batches = None if batches is None else batches - 1


def in_epoch(windows: list[list[int]], epoch: int, seed: int, shuffle: bool) -> list[list[int]]:
    places = np.arange(len(windows))
    order = permute(places, len(windows), seed, epoch) if shuffle else places
    return [windows[sample] for sample in order]


SET = [30, 7, 0, 41, 1, 1, 60, 9, 33]
"""Lengths of documents; in shards of 50 tokens this makes sizes 37, 43, 60 and 42."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("tokens") / "set", SET, 50)


def test_the_windows_of_a_set_in_its_own_order(folder: Path) -> None:
    assert [len(shard["tokens"]) for shard in load_set(folder)] == [37, 43, 60, 42]
    shards = TokenShards(folder, 6, 4, rank=0, world_size=1, shuffle=False)
    rows = [row for batch in taken(shards) for row in batch]
    windows = all_windows(folder, 6)
    assert len(windows) == 6 + 7 + 9 + 6
    assert rows == windows
    targets = [token for row in rows for token in row[1:]]
    assert len(set(targets)) == len(targets), "each token is a target once"
    assert len(targets) >= sum(SET) - 4 * 6, "a shard leaves out its first and fewer than T more"


@pytest.mark.parametrize("bits", [0, 1, 2, 3, 16])
def test_a_window_is_found_in_whatever_stretch_its_shard_begins(
    tmp_path: Path, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of some windows, of one, and of none between them."""
    monkeypatch.setattr(windows_module, "_STRETCH_BITS", bits)
    for number, length in enumerate([3, 8, 1, 2, 3, 40, 2, 2, 9, 1]):
        folder = write_set(tmp_path / str(number), [length], first=100 * number)
        (file,) = folder.iterdir()
        file.rename(tmp_path / f"{number}.safetensors")
        folder.rmdir()
    windows = all_windows(tmp_path, 2)
    shards = TokenShards(tmp_path, 2, 3, rank=0, world_size=1, shuffle=False, drop_last=False)
    assert [row for batch in taken(shards) for row in batch] == windows
    assert len(windows) == 1 + 3 + 1 + 19 + 4


@settings(max_examples=80, deadline=None)
@given(
    window=st.integers(1, 45),
    batch_size=st.integers(1, 9),
    world=st.integers(1, 5),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_epochs_of_all_ranks(
    folder: Path, window: int, batch_size: int, world: int, seed: int, shuffle: bool, drop_last: bool
) -> None:
    windows = all_windows(folder, window)

    def build(rank: int) -> TokenShards:
        return TokenShards(
            folder, window, batch_size, seed=seed, rank=rank, world_size=world, shuffle=shuffle,
            drop_last=drop_last,
        )  # fmt: skip

    if drop_last and len(windows) < batch_size * world:
        with pytest.raises(ValueError, match=f"holds {len(windows)} windows? of window={window}"):
            build(0)
        return
    ranks = [build(rank) for rank in range(world)]
    share = len(windows) // world if drop_last else math.ceil(len(windows) / world)
    for epoch in range(2):
        order = in_epoch(windows, epoch, seed, shuffle)
        dealt = [
            [order[place % len(order)] for place in range(r, share * world, world)] for r in range(world)
        ]
        for rank, want in zip(ranks, dealt, strict=True):
            batches = [want[at : at + batch_size] for at in range(0, share, batch_size)]
            if drop_last and len(batches[-1]) < batch_size:
                batches.pop()
            assert list(taken(rank)) == batches
            assert len(rank) == len(batches)
            assert rank.epoch == epoch


@settings(max_examples=100, deadline=None)
@given(
    passes=st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 3), st.integers(0, 12)), min_size=1, max_size=4
    ),
    drop_last=st.booleans(),
)
def test_ranks_come_and_go_and_no_window_is_lost_or_repeated(
    folder: Path, passes: list[tuple[int, int, int]], drop_last: bool
) -> None:
    """Each pass has another number of ranks and another batch size, and stops after some batches."""
    window = 3
    order = in_epoch(all_windows(folder, window), 0, 5, True)
    state, seen = None, []
    for world, batch_size, batches in [*passes, (1, 1, 1000)]:
        ranks = [
            TokenShards(folder, window, batch_size, seed=5, rank=rank, world_size=world, drop_last=drop_last)
            for rank in range(world)
        ]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(json.loads(json.dumps(state)))
        rows = []
        for rank in ranks:
            got = [row for batch in taken(rank, batches) for row in batch]
            rows.append(got if batches and rank.epoch == 0 else [])
        if not rows[0]:
            continue  # it took nothing, or had nothing left of this epoch and went on to the next
        state = ranks[0].state_dict()
        assert all(rank.state_dict() == state for rank in ranks)
        seen += [row for step in zip(*rows, strict=True) for row in step]
        if state["position"] == len(order):  # its last batch: what makes none for every rank is left out
            break
    assert seen[: len(order)] == order[: len(seen)]
    rest = len(order) - len(seen)
    assert 0 <= rest < world * batch_size if drop_last else -8 < rest <= 0


def test_four_ranks_then_three_then_eight(folder: Path) -> None:
    windows = all_windows(folder, 2)
    state, seen = None, []
    for world, batches in ((4, 3), (3, 3), (8, 1), (1, None)):
        ranks = [
            TokenShards(folder, 2, 2 if world > 1 else 1, rank=r, world_size=world) for r in range(world)
        ]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        rows = [[row for batch in taken(rank, batches) for row in batch] for rank in ranks]
        seen += [row for step in zip(*rows, strict=True) for row in step]
        state = ranks[-1].state_dict()
    assert seen == in_epoch(windows, 0, 0, True)


@pytest.mark.parametrize("batches", [1, 5, 13, 14])
def test_a_state_describes_what_was_yielded(folder: Path, batches: int) -> None:
    def build() -> TokenShards:
        return TokenShards(folder, 6, 2, rank=0, world_size=1)

    first = build()
    whole = [*taken(first), *taken(first)]
    assert len(first) == 14
    second = build()
    begun = list(taken(second, batches))
    third = build()
    third.load_state_dict(second.state_dict())
    assert begun + list(taken(third)) == whole[: 14 if batches < 14 else 28]
    fourth = build()
    fourth.load_state_dict(second.state_dict())
    fourth.set_epoch(1)
    assert list(taken(fourth)) == whole[14:]


def test_an_epoch_is_over_where_no_batch_is_left(folder: Path) -> None:
    """28 windows: after 9 batches of 3, and after 8 for two ranks, who would need 6 more windows."""

    def build(world: int = 1, batch_size: int = 3) -> TokenShards:
        return TokenShards(folder, 6, batch_size, rank=0, world_size=world)

    first = build()
    whole = list(taken(first))
    assert len(whole) == 9
    end = first.state_dict()
    following = list(taken(first))
    for batch_size in (3, 1):
        again = build(batch_size=batch_size)
        assert again.is_over(end)
        again.load_state_dict(end)
        rows = [row for batch in taken(again) for row in batch]
        assert rows[:27] == [row for batch in following for row in batch]
    near = build()
    list(taken(near, 8))
    for world, over in ((1, False), (2, True)):
        other = build(world)
        assert other.is_over(near.state_dict()) is over
        other.load_state_dict(near.state_dict())
        assert len(list(taken(other))) == (4 if over else 1)
        assert other.epoch == over
        other.load_state_dict(near.state_dict())
        other.set_epoch(0)
        assert len(list(taken(other))) == (4 if over else 1)
        assert other.epoch == 0


def test_an_older_pass_moves_nothing(folder: Path) -> None:
    shards = TokenShards(folder, 6, 2, rank=0, world_size=1)
    old, new = iter(shards), iter(shards)
    next(new)
    state = shards.state_dict()
    next(old)
    next(old)
    assert shards.state_dict() == state
    assert (state["epoch"], state["position"]) == (1, 2)
    shards.set_epoch(7)
    next(new)
    assert (shards.epoch, shards.state_dict()["position"]) == (7, 0)


def test_batches_go_straight_into_the_memory_that_is_offered(folder: Path) -> None:
    pool: list[torch.Tensor] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        pool.append(torch.full((math.prod(shape),), 999, dtype=torch.int64).to(dtype).view(shape))
        return pool[-1]

    shards = TokenShards(folder, 6, 5, rank=0, world_size=1, drop_last=False)
    for number, batch in enumerate(shards.iter_into(empty)):
        assert len(pool) == number + 1
        assert batch is pool[-1]
    assert [tuple(made.shape) for made in pool] == [(5, 7)] * 5 + [(3, 7)]
    plain = TokenShards(folder, 6, 5, rank=0, world_size=1, drop_last=False)
    assert [made.tolist() for made in pool] == list(taken(plain))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_stay_as_they_are_stored(tmp_path: Path, dtype: Any) -> None:
    write_set(tmp_path / "x", [20], dtype=dtype)
    (batch,) = TokenShards(tmp_path / "x", 3, 6, rank=0, world_size=1)
    assert batch.dtype == getattr(torch, dtype)
    assert sorted(batch.tolist()) == all_windows(tmp_path / "x", 3)


def test_tokens_of_every_value(tmp_path: Path) -> None:
    from overlapkit.input.shard_writer import write_token_shards

    top = np.array([0, 2**31 - 1, 2**31, 2**32 - 1], dtype=np.uint32)
    write_token_shards([top], tmp_path / "x", dtype="uint32")
    (batch,) = TokenShards(tmp_path / "x", 3, 1, rank=0, world_size=1)
    assert batch.tolist() == [top.tolist()]


def test_blocks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path / "x", [500])
    whole = list(taken(TokenShards(tmp_path / "x", 1, 7, rank=1, world_size=2, drop_last=False)))
    for block in (1, 7, 8, 50):
        monkeypatch.setattr("overlapkit.input.tokens._BLOCK", block)
        shards = TokenShards(tmp_path / "x", 1, 7, rank=1, world_size=2, drop_last=False)
        assert list(taken(shards)) == whole


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window": 5}, "state has window=5, this source has 6"),
        ({"shards": "0" * 32}, "state has shards='0000"),
        ({"dtype": "uint32"}, "state has dtype='uint32', this source has 'uint16'"),
        ({"seed": 3}, "state has seed=3"),
        ({"size": 27}, "state has size=27"),
        ({"position": 29}, "position 29: it is damaged"),
    ],
)
def test_a_state_of_something_else_is_refused(folder: Path, changed: dict[str, Any], message: str) -> None:
    shards = TokenShards(folder, 6, 2, rank=0, world_size=1)
    with pytest.raises(ValueError, match=message):
        shards.load_state_dict({**shards.state_dict(), **changed})


def test_a_state_of_a_longer_set_is_refused(tmp_path: Path) -> None:
    """As many windows, in shards of other lengths."""
    states = [
        TokenShards(write_set(tmp_path / name, lengths, 1), 3, 1, rank=0, world_size=1)
        for name, lengths in (("a", [7, 10]), ("b", [10, 7]), ("c", [8, 10]))
    ]
    for other in states[1:]:
        assert other.windows.count == states[0].windows.count
        with pytest.raises(ValueError, match="state has shards="):
            other.load_state_dict(states[0].state_dict())


def test_numpy_s_integers_are_integers(folder: Path) -> None:
    six, two, seed, rank, world = (np.int64(value) for value in (6, 2, 3, 1, 2))
    options: dict[str, Any] = {"seed": seed, "rank": rank, "world_size": world}
    one = TokenShards(folder, six, two, **options)  # type: ignore[arg-type]
    plain = TokenShards(folder, 6, 2, seed=3, rank=1, world_size=2)
    assert list(taken(one)) == list(taken(plain))
    assert json.dumps(one.state_dict()) == json.dumps(plain.state_dict())


def test_a_state_of_another_dtype_is_refused(tmp_path: Path) -> None:
    states = [
        TokenShards(write_set(tmp_path / dtype, [20], dtype=dtype), 3, 2, rank=0, world_size=1)
        for dtype in ("uint16", "uint32")
    ]
    with pytest.raises(ValueError, match="state has dtype='uint16', this source has 'uint32'"):
        states[1].load_state_dict(states[0].state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window=0"),
        ({"window": 2.0}, "window=2.0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"batch_size": 2**29}, r"a batch has fewer than 2\*\*29 tokens"),
        ({"seed": "1"}, "seed='1'"),
        ({"rank": 0}, "rank=0, world_size=None: give both"),
        ({"world_size": 2}, "rank=None, world_size=2"),
        ({"rank": 2, "world_size": 2}, "rank=2, world_size=2"),
        ({"rank": -1, "world_size": 2}, "rank=-1"),
        ({"shuffle": 1}, "shuffle=1"),
        ({"drop_last": None}, "drop_last=None"),
        ({"pack": "rows"}, "pack='rows'"),
        ({"window": 60}, "holds 0 windows of window=60"),
        ({"window": 60, "drop_last": False}, "holds 0 windows of window=60"),
        ({"batch_size": 15, "rank": 0, "world_size": 2}, "no batch of batch_size=15 for each of 2 ranks"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenShards(**{"directory": folder, "window": 6, "batch_size": 2, **options})


def test_the_rank_is_the_process_group_s(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="WORLD_SIZE=2 is set but there is no process group"):
        TokenShards(folder, 6, 2)
    monkeypatch.setattr("overlapkit.input.checks.rank_and_world", lambda: (1, 2))
    shards = TokenShards(folder, 6, 2)
    assert (shards.order.rank, shards.order.world) == (1, 2)


def test_nothing_stays_mapped_or_open(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "x", SET, 50)
    for _ in range(3):
        shards = TokenShards(folder, 6, 2, rank=0, world_size=1)
        rest = iter(shards)
        batch = next(rest)
        want = batch.tolist()
        del shards, rest
        assert str(folder) not in Path("/proc/self/maps").read_text()
        assert batch.tolist() == want, "batches are copies"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_mapped_memory_is_not_copied(folder: Path, copied: Any) -> None:
    """It has gaps that nothing may read."""
    shards = TokenShards(folder, 6, 2, rank=0, world_size=1)
    with pytest.raises(TypeError, match="cannot be copied or pickled: .*Open the directory again"):
        copied(shards.windows)
    if copied is not copy.copy:
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(shards)


def test_batches_that_were_gathered_together_are_apart(folder: Path) -> None:
    shards = TokenShards(folder, 6, 2, rank=0, world_size=1)
    first, second = islice(shards, 2)
    want = second.tolist()
    first.zero_()
    assert second.tolist() == want


EPOCHS = 3


def loop(loader: Any, begin: int, stop: int | None) -> Iterator[tuple[int, Any]]:
    """A training loop that sets the epoch, and stops after some steps."""
    done = 0
    for epoch in range(begin, EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch.tolist()
            done += 1
            if done == stop:
                return


@settings(max_examples=60, deadline=None)
@given(
    lives=st.lists(st.integers(1, 20), max_size=4),
    depth=st.integers(1, 4),
    batch_size=st.integers(1, 6),
    drop_last=st.booleans(),
)
def test_under_a_device_loader_any_stops_give_the_uninterrupted_order(
    folder: Path, lives: list[int], depth: int, batch_size: int, drop_last: bool
) -> None:
    def build() -> TokenShards:
        return TokenShards(folder, 8, batch_size, rank=0, world_size=1, drop_last=drop_last)

    want = list(loop(build(), 0, None))
    per_epoch, got, state = len(build()), [], None
    for stop in [*lives, None]:
        loader = DeviceLoader(build(), "cpu", depth=depth)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        got += loop(loader, len(got) // per_epoch, stop)
        state = loader.state_dict()
        loader.close()
    assert got == want


@pytest.mark.parametrize("stop", [0, 1, 3, 5, 10])
def test_under_a_device_loader_without_setting_epochs(folder: Path, stop: int) -> None:
    def build() -> TokenShards:
        return TokenShards(folder, 8, 4, rank=0, world_size=1)

    def rows(loader: Any) -> Iterator[Any]:
        for _ in range(EPOCHS):
            for batch in loader:
                yield batch.tolist()

    assert len(build()) == 5
    want = list(rows(build()))
    first = DeviceLoader(build(), "cpu", depth=3)
    got = list(islice(rows(first), stop))
    second = DeviceLoader(build(), "cpu", depth=3)
    second.load_state_dict(first.state_dict())
    first.close()
    got += rows(second)
    assert got[: len(want)] == want


def test_between_the_epochs_of_a_device_loader(folder: Path) -> None:
    def build() -> DeviceLoader:
        return DeviceLoader(TokenShards(folder, 8, 4, rank=0, world_size=1), "cpu", depth=2)

    want = list(loop(build(), 0, None))
    first = build()
    got = []
    for epoch in range(2):
        first.set_epoch(epoch)
        got += [(epoch, batch.tolist()) for batch in first]
    second = build()
    second.load_state_dict(first.state_dict())
    assert got + list(loop(second, 2, None)) == want


def test_a_device_loader_broken_off_begins_the_next_epoch_whole(folder: Path) -> None:
    loader = DeviceLoader(TokenShards(folder, 8, 4, rank=0, world_size=1), "cpu", depth=3)
    plain = TokenShards(folder, 8, 4, rank=0, world_size=1)
    for _ in range(3):
        want = list(taken(plain))
        assert [batch.tolist() for batch in islice(loader, 2)] == want[:2]
    loader.close()
