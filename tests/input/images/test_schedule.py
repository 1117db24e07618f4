"""Batches of all ranks against the order itself: who takes what, how often, and what a position means."""

from itertools import islice

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapkit.input.images.job import Job
from overlapkit.input.images.random_crop import RandomCrop
from overlapkit.input.images.schedule import Schedule
from overlapkit.input.order import Order, permute
from overlapkit.input.targets import IGNORED

CROP = RandomCrop(8, (0.5, 1.0), (1.0, 1.0), 0.5, seed=3)


def schedules(
    size: int, world: int, batch: int, *, shuffle: bool = True, drop_last: bool = True
) -> list[Schedule]:
    labels = np.arange(size) + 1000
    return [
        Schedule(Order(size, rank, world, 3, shuffle, drop_last), labels, CROP, batch)
        for rank in range(world)
    ]


def one_pass(schedule: Schedule, epoch: int, position: int) -> list[Job]:
    return list(islice(schedule.jobs(epoch, position), schedule.batches(position)))


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 100), world=st.integers(1, 6), batch=st.integers(1, 20))
def test_every_image_is_evaluated_once_and_ranks_stay_even(size: int, world: int, batch: int) -> None:
    passes = [one_pass(one, 4, 0) for one in schedules(size, world, batch, shuffle=False, drop_last=False)]
    counts = [[len(job.samples) for job in jobs] for jobs in passes]
    assert all(count == counts[0] for count in counts)
    labels = np.concatenate([job.labels for jobs in passes for job in jobs])
    assert sorted(labels[labels != IGNORED]) == [sample + 1000 for sample in range(size)]
    assert (labels == IGNORED).sum() < world
    assert all(count == batch for count in counts[0][:-1])


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(20, 300),
    lives=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 5)), min_size=1, max_size=4),
    batch=st.integers(1, 9),
    drop_last=st.booleans(),
)
def test_other_worlds_go_on_where_some_batches_ended(
    size: int, lives: list[tuple[int, int]], batch: int, drop_last: bool
) -> None:
    whole = permute(np.arange(size), size, 3, 2).tolist()
    position, seen = 0, []
    for world, wanted in [*lives, (1, size)]:
        ranks = schedules(size, world, batch, drop_last=drop_last)
        batches = min(wanted, ranks[0].batches(position))
        steps = zip(*(one_pass(one, 2, position)[:batches] for one in ranks), strict=True)
        for jobs in steps:
            seen += np.stack([job.samples for job in jobs], axis=1).ravel().tolist()
            for job in jobs:
                assert np.array_equal(job.labels, job.samples + 1000)
                assert np.array_equal(job.draws, CROP.draw(job.samples, 2))
        over = batches == ranks[0].batches(position)
        position = size if over else ranks[0].order.after(position, batches * batch)
    assert seen[:size] == whole[: len(seen)]
    left_out = size - len(seen)
    assert left_out < batch * max(1, *(world for world, _ in lives)) if drop_last else left_out <= 0


def test_epochs_follow_each_other_and_blocks_make_no_difference(monkeypatch):
    one = schedules(50, 1, 7)[0]
    jobs = list(islice(one.jobs(5, 21), 4 + 7 + 7))
    assert [job.place for job in jobs[:5]] == [(5, 21, n) for n in range(4)] + [(6, 0, 0)]
    assert jobs[-1].place == (7, 0, 6)
    order = np.concatenate([job.samples for job in jobs[4:11]])
    assert order.tolist() == permute(np.arange(50), 50, 3, 6)[:49].tolist()
    monkeypatch.setattr("overlapkit.input.images.schedule.BLOCK", 15)
    for job, same in zip(jobs, one.jobs(5, 21), strict=False):
        assert job.place == same.place
        assert np.array_equal(job.samples, same.samples)
        assert np.array_equal(job.labels, same.labels)
