"""Any number of lives at any number of ranks, against a list that is dealt like cards."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from overlapkit.input import DeviceLoader, ElasticSampler, TokenShards
from overlapkit.input.order import permute
from overlapkit.lane import Lane
from tests.input.sources import Numbers
from tests.input.token_sets import write_set

SIZE, BATCH, WINDOW, SEED = 61, 3, 4, 9


def sampled(_: Path, rank: int, world: int) -> Any:
    data = Numbers(SIZE)
    sampler = ElasticSampler(data, world, rank, seed=SEED, drop_last=True)
    return DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)


def sampled_by_workers(_: Path, rank: int, world: int) -> Any:
    data = Numbers(SIZE)
    sampler = ElasticSampler(data, world, rank, seed=SEED, drop_last=True)
    return DataLoader(data, BATCH, sampler=sampler, drop_last=True, num_workers=1)


def tokens(folder: Path, rank: int, world: int) -> Any:
    return TokenShards(folder, WINDOW, BATCH, seed=SEED, rank=rank, world_size=world)


def samples_of(batch: Any) -> list[int]:
    """Window k of a set whose tokens count upwards begins with token 4 k."""
    return batch.tolist() if batch.dim() == 1 else (batch[:, 0].int() // WINDOW).tolist()


KINDS: dict[str, tuple[Callable[[Path, int, int], Any], int]] = {
    "sampler": (sampled, 25),
    "sampler, workers": (sampled_by_workers, 2),
    "tokens": (tokens, 25),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("set") / "set", [SIZE * WINDOW + 1])


class Dealer:
    """The truth: one shuffled list an epoch, and how much of it has been dealt.

    An epoch is over when the ranks of the day could take no batch more; what is left then is left out.
    """

    def __init__(self) -> None:
        self.epoch = self.position = 0

    def steps(self, world: int) -> Iterator[list[list[int]]]:
        """Each step's batches, by rank, until the epoch holds no batch for every rank."""
        if SIZE - self.position < world * BATCH:
            self.epoch, self.position = self.epoch + 1, 0
        order = permute(np.arange(SIZE), SIZE, SEED, self.epoch).tolist()
        while SIZE - self.position >= world * BATCH:
            cards = order[self.position : self.position + world * BATCH]
            self.position += world * BATCH
            if SIZE - self.position < world * BATCH:
                self.position = SIZE
            yield [cards[rank::world] for rank in range(world)]


Life = tuple[int, int, int, int]
"""Ranks, steps until it is stopped, the rank whose state survives, batches read ahead."""
lives = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 25), st.integers(0, 3), st.integers(1, 4)),
    min_size=2,
    max_size=5,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delay_s", [0.0, 0.001])
def test_a_run_in_many_lives_is_the_run_in_one(
    kind: str, delay_s: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, examples = KINDS[kind]
    monkeypatch.setattr(Lane, "delay_s", delay_s)

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(lives=lives)
    def run(lives: list[Life]) -> None:
        dealer, saved = Dealer(), None
        for world, stop, survivor, depth in lives:
            loaders = [DeviceLoader(build(folder, rank, world), "cpu", depth=depth) for rank in range(world)]
            for loader in loaders:
                if saved is not None:
                    loader.load_state_dict(saved)
                loader.set_epoch(loader.next_epoch)
            live(loaders, dealer, stop)
            states = [loader.state_dict() for loader in loaders]
            saved = states[survivor % world]
            assert all(state == saved for state in states)
            for loader in loaders:
                loader.close()

    run()


def live(loaders: list[DeviceLoader], dealer: Dealer, stop: int) -> None:
    """Up to `stop` steps of one pass."""
    passes = [iter(loader) for loader in loaders]
    truth = dealer.steps(len(loaders))
    for _ in range(stop):
        expected = next(truth, None)
        got = [next(one, None) for one in passes]
        if expected is None:
            assert got == [None] * len(loaders)
            return
        assert [samples_of(batch) for batch in got] == expected
