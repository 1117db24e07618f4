"""Ranks with different numbers of batches: each mode, with lengths known and unknown, stopped anywhere."""

import random
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from overlapkit.input import DeviceLoader, ElasticSampler, Mixture, TokenShards
from overlapkit.input.agreement import Agreed
from overlapkit.input.uneven import Counted
from overlapkit.lane import Lane
from overlapkit.quorum import RankFailed, await_keys
from tests.input.sources import Numbers, StatefulStream, in_order, plain, shuffled
from tests.input.token_sets import write_set
from tests.ranks import run_ranks

Step = tuple[Any, bool]
"""A batch, and whether it is a filler."""


class CountedStream(StatefulStream):
    """A source with a state that knows how many batches the pass that has begun still has."""

    @property
    def batches_left(self) -> int:
        return self.n - self.live["at"]


def generated(n: int) -> Callable[[], Iterator[int]]:
    return lambda: iter(range(n))


class Unsized(Sampler[int]):
    """A sampler without a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


KNOWN: dict[str, Callable[[int], Any]] = {
    "list": lambda n: list(range(n)),
    "loader": lambda n: in_order(n, 1),
    "shuffled": lambda n: shuffled(n, 1),
    "stream that counts": CountedStream,
}
UNKNOWN: dict[str, Callable[[int], Any]] = {
    "function": generated,
    "stream": StatefulStream,
    "sampler without a length": lambda n: DataLoader(Numbers(n), batch_size=1, sampler=Unsized(n)),
}
SOURCES = {**KNOWN, **UNKNOWN}
SIZES = [4, 7, 5]
"""Batches of each rank."""


def steps(loader: DeviceLoader) -> Iterator[Step]:
    """A pass, as a training loop sees it."""
    for batch in loader:
        yield plain(batch), loader.filler


def together(loader: DeviceLoader) -> Iterator[Step]:
    """The same with a collective in each step, which hangs where ranks make unequally many."""
    for step in steps(loader):
        dist.all_reduce(torch.zeros(()))
        yield step


def flat(passed: list[Step]) -> list[Any]:
    return [batch for batch, _ in passed]


@pytest.mark.parametrize("kind", sorted(SOURCES))
def test_equal_ranks_are_as_if_alone(kind: str) -> None:
    def run(rank: int) -> Any:
        torch.manual_seed(1)
        want = [[plain(batch) for batch in _fresh(SOURCES[kind](5))] for _ in range(2)]
        for mode in ("error", "drop", "join", None):
            torch.manual_seed(1)
            loader = DeviceLoader(SOURCES[kind](5), "cpu", uneven=mode)  # type: ignore[arg-type]
            for epoch in want:
                assert list(together(loader)) == [(batch, False) for batch in epoch]

    run_ranks(2, run)


def _fresh(source: Any) -> Any:
    return source() if callable(source) else source


@pytest.mark.parametrize("kind", sorted(KNOWN))
def test_uneven_ranks_are_refused_before_any_batch_where_lengths_are_known(kind: str) -> None:
    def run(rank: int) -> None:
        loader = DeviceLoader(KNOWN[kind](SIZES[rank]), "cpu")
        for _ in range(2):
            message = r"4 on rank\(s\) 0; 7 on rank\(s\) 1; 5 on rank\(s\) 2: give each.*uneven='drop'"
            with pytest.raises(ValueError, match=message):
                next(iter(loader))
        assert threading.enumerate() == [threading.main_thread()]

    run_ranks(3, run)


@pytest.mark.parametrize("kind", sorted(UNKNOWN))
def test_uneven_ranks_are_refused_at_the_same_batch_where_lengths_are_not_known(kind: str) -> None:
    def run(rank: int) -> None:
        loader = DeviceLoader(UNKNOWN[kind](SIZES[rank]), "cpu")
        for _ in range(2):
            passing = together(loader)
            assert len([next(passing) for _ in range(4)]) == 4
            with pytest.raises(ValueError, match=r"rank\(s\) 0 ended after 4 batches of this pass, others"):
                next(passing)

    run_ranks(3, run)


@pytest.mark.parametrize("kind", sorted(SOURCES))
def test_drop_ends_all_ranks_with_the_shortest_and_says_so_once(kind: str) -> None:
    def run(rank: int) -> int:
        loader = DeviceLoader(SOURCES[kind](SIZES[rank]), "cpu", uneven="drop")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                passed = list(together(loader))
                assert len(passed) == 4
                assert not any(filler for _, filler in passed)
        assert [str(word.message)[:13] for word in said] == (["uneven='drop'"] if rank else [])
        assert all(word.filename == __file__ for word in said)
        return len({str(batch) for batch in flat(passed)})

    assert run_ranks(3, run) == [4, 4, 4]


@pytest.mark.parametrize("kind", sorted(SOURCES))
def test_join_hands_the_last_batch_over_again_until_the_longest_is_done(kind: str) -> None:
    def run(rank: int) -> None:
        size = SIZES[rank]
        loader = DeviceLoader(SOURCES[kind](size), "cpu", uneven="join")
        for _ in range(2):
            passed = list(together(loader))
            assert [filler for _, filler in passed] == [False] * size + [True] * (7 - size)
            assert passed[size:] == [(passed[size - 1][0], True)] * (7 - size)
            assert sorted(flat(passed[:size]), key=str) == sorted(
                (plain(batch) for batch in _fresh(SOURCES[kind](size))), key=str
            )
            assert not loader.filler

    run_ranks(3, run)


def test_a_loop_that_takes_its_batch_apart_finds_the_filler_whole() -> None:
    def run(rank: int) -> list[int]:
        loader = DeviceLoader(
            [{"x": torch.tensor([rank]), "at": at} for at in range(1 + rank)], "cpu", uneven="join"
        )
        return [int(batch.pop("x")) for batch in loader]

    assert run_ranks(2, run) == [[0, 0], [1, 1]]


RESUMED = {kind: SOURCES[kind] for kind in SOURCES if kind != "function"}


@pytest.mark.parametrize("mode", ["drop", "join"])
@pytest.mark.parametrize("kind", sorted(RESUMED))
@pytest.mark.filterwarnings("ignore:uneven='drop'")
def test_stopped_anywhere_it_goes_on_as_if_nothing_had_happened(kind: str, mode: Any) -> None:
    """Two epochs, in two lives and in three; the last batch may be taken, or the epoch's end seen."""

    def build(rank: int) -> DeviceLoader:
        return DeviceLoader(RESUMED[kind](SIZES[rank]), "cpu", uneven=mode)

    def epochs(loader: DeviceLoader) -> Iterator[Step]:
        for epoch in range(loader.next_epoch, 2):
            loader.set_epoch(epoch)
            yield from steps(loader)

    def endless(loader: DeviceLoader) -> Iterator[Step]:
        while True:
            yield from steps(loader)

    def run(rank: int) -> None:
        for way in (epochs, endless) if kind in ("list", "loader", "shuffled") else (endless,):
            torch.manual_seed(1)
            total = 2 * {"drop": 4, "join": 7}[mode]
            want = list(islice(way(build(rank)), total))
            for stops in [[stop] for stop in range(1, total)] + [[2, 3], [5, 1], [3, 1], [6, 1], [4, 4]]:
                torch.manual_seed(1)
                got: list[Step] = []
                state: Any = None
                for stop in [*stops, total - sum(stops)]:
                    loader = build(rank)
                    if state is not None:
                        loader.load_state_dict(state)
                    passing = way(loader)
                    got += islice(passing, stop)
                    state, numbers = loader.state_dict(), torch.get_rng_state()
                    passing.close()
                    torch.manual_seed(99)
                    torch.set_rng_state(numbers)
                assert got == want, (way.__name__, stops)

    run_ranks(3, run, timeout=110)


def test_a_state_that_was_loaded_is_the_state_until_the_first_batch_is_taken() -> None:
    """Also where the loop stands among fillers, which come from a batch that is read again."""

    def run(rank: int) -> list[bool]:
        loader = DeviceLoader(list(range(SIZES[rank])), "cpu", uneven="join")
        list(islice(loader, 6))
        state = loader.state_dict()
        loader.load_state_dict(state)
        passing = iter(loader)
        assert loader.state_dict() == state
        assert plain(next(passing)) == [3, 6, 4][rank]
        return [state["again"], loader.filler]

    assert run_ranks(3, run) == [[True, True], [False, False], [True, True]]


def test_a_pass_of_known_length_costs_its_begin_and_nothing_a_batch() -> None:
    class Store:
        def __init__(self, store: Any) -> None:
            self.store, self.calls = store, 0

        def __getattr__(self, name: str) -> Any:
            self.calls += 1
            return getattr(self.store, name)

    def run(rank: int) -> tuple[int, int, str]:
        data = Numbers(400)
        loaders = [DataLoader(data, 1, sampler=ElasticSampler(n)) for n in (20, 400)]
        calls = []
        for source in loaders:
            loader = DeviceLoader(source, "cpu")
            assert loader._feed.ranks is not None
            loader._feed.ranks.quorum.store = store = Store(loader._feed.ranks.quorum.store)
            dist.barrier()  # so that nobody waits, and asks again, for others to begin
            passing = iter(loader)
            next(passing)
            begin = store.calls
            list(passing)
            calls.append(store.calls - begin)
            plan = type(passing._ahead.plan)
        return calls[0], calls[1], plan.__name__

    assert run_ranks(2, run) == [(0, 0, Counted.__name__)] * 2


def test_sources_of_ours_know_how_many_batches_they_have(tmp_path: Path) -> None:
    write_set(tmp_path, [200])

    def build(name: str) -> Any:
        tokens = TokenShards(tmp_path, 4, 3)
        if name == "mixture":
            return Mixture({"only": tokens}, {"only": 1.0})
        sampler = ElasticSampler(40)
        return tokens if name == "tokens" else DataLoader(Numbers(40), 3, sampler=sampler)

    def run(rank: int) -> None:
        for name, batches in [("tokens", 8), ("mixture", 0), ("sampler", 7)]:
            loader, other = DeviceLoader(build(name), "cpu"), DeviceLoader(build(name), "cpu")
            passing = iter(loader)
            for _ in range(3):
                next(passing)
            other.load_state_dict(loader.state_dict())
            resumed = iter(other)
            next(resumed)
            assert isinstance(passing._ahead.plan, Counted)
            assert isinstance(resumed._ahead.plan, Counted)
            if batches:
                assert (passing._ahead.plan._left, resumed._ahead.plan._left) == (batches, batches - 3)
                assert (len(list(passing)), len(list(resumed))) == (batches - 3, batches - 4)
            loader.close()
            other.close()

    run_ranks(2, run)


def test_one_process_and_independent_ranks_exchange_nothing() -> None:
    assert DeviceLoader([1], "cpu")._feed.ranks is None

    def run(rank: int) -> list[Any]:
        dist.barrier()  # a rank that is done while others still connect breaks their connections
        alone = DeviceLoader(generated(3 + rank), "cpu", uneven=None)
        return [list(alone) for _ in range(1 + rank)]

    assert run_ranks(2, run) == [[[0, 1, 2]], [[0, 1, 2, 3]] * 2]


def test_a_loader_that_one_rank_alone_iterates() -> None:
    def run(rank: int) -> str:
        loader = DeviceLoader([1, 2] if rank == 0 else generated(2), "cpu")
        message = ""
        if rank == 1:
            assert loader._feed.ranks is not None
            assert loader._feed.ranks.quorum.timeout == 30  # half of the group's
            loader._feed.ranks.quorum.timeout = 0.5
            with pytest.raises(RankFailed) as caught:
                next(iter(loader))
            message = str(caught.value)
        dist.barrier()
        if rank == 0:
            assert list(DeviceLoader([1, 2], "cpu", uneven=None)) == [1, 2]
        return message

    message = run_ranks(2, run)[1]
    assert "a pass did not begin on all ranks: rank 0 gave no verdict within 0.5 s" in message
    assert "needs uneven=None" in message


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_rank_that_leaves_a_pass_is_named(gone: int) -> None:
    def run(rank: int) -> str:
        loader = DeviceLoader(generated(50), "cpu")
        assert loader._feed.ranks is not None
        passing = iter(loader)
        taken = [next(passing)]
        loader._feed.ranks.quorum.timeout = 4.0  # only now: the ranks do not start at the same time
        taken += [next(passing) for _ in range(2)]
        if rank == gone:
            passing.close()
            return ""
        with pytest.raises(RankFailed, match=rf"rank\(s\) {gone} did not come to batch \d+ .* 4 s") as caught:
            taken += list(passing)
        return str(caught.value)

    messages = run_ranks(3, run)
    assert sum("uneven=None" in message for message in messages) == 2


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_at_the_first_batch_reaches_all_ranks(culprit: int, known: bool) -> None:
    def run(rank: int) -> None:
        def transform(batch: Any) -> Any:
            if rank == culprit:
                raise LookupError("sample 0")
            return batch

        loader = DeviceLoader([1, 2] if known else generated(2), "cpu", transform=transform)
        for _ in range(2):
            error, match = (LookupError, "sample 0") if rank == culprit else (RankFailed, f"{culprit}: Look")
            with pytest.raises(error, match=match):
                next(iter(loader))

    run_ranks(2, run)


@pytest.mark.parametrize("kind", ["function", "loader"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_of_iter_reaches_all_ranks(culprit: int, kind: str) -> None:
    """Also where what begins is the epoch behind the one that a state stands at the end of."""

    class Breaks(Unsized):
        whole = 0

        def __iter__(self) -> Iterator[int]:
            self.whole -= 1
            if self.whole < 0:
                raise LookupError("no order")
            return super().__iter__()

    def run(rank: int) -> None:
        breaks = Breaks(3)
        source = DataLoader(Numbers(3), 1, sampler=breaks) if kind == "loader" else lambda: iter(breaks)
        loader = DeviceLoader(source, "cpu")
        error, match = (LookupError, "no order") if rank == culprit else (RankFailed, f"{culprit}: Look")
        breaks.whole = 9 if rank != culprit else 0
        for _ in range(2):
            with pytest.raises(error, match=match):
                next(iter(loader))
        if kind == "loader":
            breaks.whole = 9
            passing = iter(loader)
            at_the_end = [next(passing) for _ in range(3)] and loader.state_dict()
            passing.close()
            loader.load_state_dict(at_the_end)
            breaks.whole = 9 if rank != culprit else 1
            with pytest.raises(error, match=match):
                next(iter(loader))
        breaks.whole = 9
        assert flat(list(together(loader))) == ([[0], [1], [2]] if kind == "loader" else [0, 1, 2])

    run_ranks(2, run)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("at", [0, 3])
def test_an_error_at_a_hand_over_reaches_all_ranks(culprit: int, at: int) -> None:
    """The batch was agreed on, and then could not be put at its address."""

    def run(rank: int) -> None:
        def source() -> Iterator[torch.Tensor]:
            for k in range(9):
                yield torch.full((2,), float(k), requires_grad=rank == culprit and k == at)

        loader = DeviceLoader(source, "cpu", reuse_buffers=True, depth=3)
        error, match = (TypeError, "requires grad") if rank == culprit else (RankFailed, f"{culprit}: Type")
        for _ in range(2):
            with pytest.raises(error, match=match):
                list(loader)

    run_ranks(3, run)


def test_a_loader_that_one_rank_alone_makes_and_nobody_iterates() -> None:
    def run(rank: int) -> list[Any]:
        extra = [DeviceLoader([7], "cpu") for _ in range(rank)]
        loaders = [DeviceLoader(generated(3), "cpu"), DeviceLoader([4, 5], "cpu")]
        got = [flat(list(together(loader))) for loader in loaders]
        del extra
        return got

    assert run_ranks(2, run) == [[[0, 1, 2], [4, 5]]] * 2


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_amid_a_pass_of_unknown_length_reaches_all_ranks(culprit: int) -> None:
    def run(rank: int) -> None:
        def source() -> Iterator[int]:
            yield from range(4)
            if rank == culprit:
                raise LookupError("sample 4")
            yield from range(4, 9)

        loader = DeviceLoader(source, "cpu")
        for _ in range(2):
            passing = together(loader)
            assert flat(list(islice(passing, 4))) == [0, 1, 2, 3]
            error, match = (LookupError, "sample 4") if rank == culprit else (RankFailed, f"{culprit}: Look")
            with pytest.raises(error, match=match):
                next(passing)

    run_ranks(3, run)


@pytest.mark.parametrize(
    ("mode", "messages"),
    [
        ("error", [r"rank\(s\) 0 ended after 0", r"rank\(s\) 0 ended after 0"]),
        ("drop", ["source is empty", "nothing can be handed over: another rank ended after 0"]),
        ("join", ["no batch that it could hand over again", "rank 0: ValueError.* no batch"]),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_a_rank_without_any_batch(mode: Any, messages: list[str], known: bool) -> None:
    class Shrinks(list[int]):
        """It becomes empty when it has been found to be none."""

    def run(rank: int) -> str:
        source = Shrinks([1, 2])
        loader = DeviceLoader(source if known else lambda: iter(source), "cpu", uneven=mode)
        if rank == 0:
            source.clear()
        with pytest.raises((ValueError, RankFailed)) as caught:
            next(iter(loader))
        return str(caught.value)

    for said, wanted in zip(run_ranks(2, run), messages, strict=True):
        assert re.search(r"0 on rank\(s\) 0; 2 on rank\(s\) 1" if known else wanted, said)


def test_breaks_begin_afresh_and_leave_neither_threads_nor_keys() -> None:
    def run(rank: int) -> list[int]:
        store = dist.distributed_c10d._get_default_store()
        loader = DeviceLoader(generated(9), "cpu", depth=3)
        keys = []
        for turn in range(8):
            assert flat(list(islice(together(loader), 1 + turn % 4))) == list(range(1 + turn % 4))
            loader.close()
            assert threading.enumerate() == [threading.main_thread()]
            assert flat(list(together(loader))) == list(range(9))
            dist.barrier()
            keys.append(store.num_keys())
            dist.barrier()
        return keys

    for keys in run_ranks(2, run):
        assert max(keys[4:]) <= max(keys[:4])


def test_closing_does_not_wait_for_other_ranks() -> None:
    """Rank 1's source goes on only when rank 0, which waits for it, has closed its pass."""

    def run(rank: int) -> None:
        store = dist.distributed_c10d._get_default_store()

        def source() -> Iterator[int]:
            yield 0
            if rank == 1:
                came.append(await_keys(store, ["closed"], 8))
            yield 1

        came: list[bool] = []
        passing = iter(DeviceLoader(source, "cpu"))
        next(passing)
        if rank == 0:
            time.sleep(0.2)  # the lane waits for rank 1
            passing.close()
            assert threading.enumerate() == [threading.main_thread()]
            store.set("closed", "")
        passing.close()
        assert came == [True] * rank

    run_ranks(2, run)


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_does_not_wait_for_other_ranks(culprit: int) -> None:
    """The other rank's batch comes only when the error has been raised."""

    def run(rank: int) -> None:
        store = dist.distributed_c10d._get_default_store()

        def source() -> Iterator[int]:
            for n in range(9):
                if n == at and rank == culprit:
                    raise LookupError
                if n == at:
                    assert await_keys(store, [f"raised {at}"], 10)
                yield n

        for at in (0, 4):
            with pytest.raises(LookupError if rank == culprit else RankFailed):
                list(DeviceLoader(source, "cpu"))
            if rank == culprit:
                store.set(f"raised {at}", "")

    run_ranks(2, run)


def test_batches_are_agreed_on_as_far_ahead_as_they_are_read() -> None:
    def run(rank: int) -> int:
        passing = iter(DeviceLoader(generated(20), "cpu", depth=4))
        next(passing)
        plan = passing._ahead.plan
        assert isinstance(plan, Agreed)
        deadline = time.monotonic() + 20
        while plan._index < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        dist.barrier()
        return plan._index

    assert run_ranks(2, run) == [5, 5]


@pytest.mark.parametrize("mode", ["drop", "join"])
@pytest.mark.filterwarnings("ignore:uneven='drop'")
def test_ranks_of_any_speed(mode: Any) -> None:
    def run(rank: int) -> list[Any]:
        chance = random.Random(rank)

        def source() -> Iterator[int]:
            for n in range(SIZES[rank]):
                time.sleep(chance.random() * 0.02)
                yield n

        Lane.delay_s = 0.002 * rank
        loader = DeviceLoader(source, "cpu", uneven=mode, depth=1 + rank)
        return [list(together(loader)) for _ in range(3)]

    for size, passes in zip(SIZES, run_ranks(3, run), strict=True):
        length = {"drop": 4, "join": 7}[mode]
        assert passes == [[(min(n, size - 1), n >= size) for n in range(length)]] * 3


def test_a_length_that_is_not_kept_is_an_error() -> None:
    class Liar(Unsized):
        def __len__(self) -> int:
            return 4

    def run(rank: int) -> None:
        for size, match in [(3, "source gave 3 batches where its len"), (5, "more than 4")]:
            loader = DeviceLoader(DataLoader(Numbers(9), batch_size=1, sampler=Liar(size)), "cpu")
            with pytest.raises(ValueError, match=match):
                list(loader)

    run_ranks(2, run)


def test_ranks_with_other_modes_are_told() -> None:
    def run(rank: int) -> None:
        loader = DeviceLoader([1], "cpu", uneven="drop" if rank else "join")
        with pytest.raises(ValueError, match=r"uneven is join on rank\(s\) 0; drop on rank\(s\) 1"):
            list(loader)

    run_ranks(2, run)


def test_an_elastic_state_is_every_rank_s_whatever_the_mode() -> None:
    def run(rank: int) -> list[Any]:
        states = []
        for mode in ("error", "drop", "join"):
            loader = DeviceLoader(DataLoader(Numbers(40), 3, sampler=ElasticSampler(40)), "cpu", uneven=mode)  # type: ignore[arg-type]
            list(islice(loader, 4))
            states.append(loader.state_dict())
        return states

    one, other = run_ranks(2, run)
    assert one == other
    assert [state["taken"] for state in one] == [24, 24, 24]
