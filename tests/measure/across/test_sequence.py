"""The first collective in which ranks differ: on made-up sequences, and on what gloo was really given."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from overlapkit.measure.across.sequence import Issues, find_mismatch, read_issues
from tests.ranks import run_ranks

A, B, C = "all_reduce (4,) Float", "all_gather (4,) Float", "all_reduce (4,) Double"


def issued(texts, first=0, group=""):
    kinds = sorted(set(texts))
    return Issues(tuple(kinds), {group: (first, np.array([kinds.index(text) for text in texts], dtype=int))})


@pytest.mark.parametrize(
    ("sequences", "where", "ranks", "mine", "others"),
    [
        ([[A, B, A]] * 3, None, None, None, None),
        ([[A, B, A], [A, B]], None, None, None, None),  # not there yet
        ([[A, B, A], [A, A, B], [A, B, A]], "collective 1", (1,), A, B),
        ([[A, B], [A, B], [C, B]], "collective 0", (2,), C, A),
        ([[A, B], [A, C]], "collective 1", (1,), C, B),  # one of two: the higher rank
        ([[A, A, B], [A, B, B], [A, C, B], [A, A, B]], "collective 1", (1,), B, A),
    ],
)
def test_the_first_difference_is_named_with_both_sides(sequences, where, ranks, mine, others):
    found = find_mismatch({rank: issued(texts) for rank, texts in enumerate(sequences)})
    if where is None:
        assert found is None
    else:
        assert (found.where, found.ranks, found.issued, found.others) == (where, ranks, mine, others)
        assert f"issued {mine}, the others {others}" in str(found)


def test_only_what_all_still_hold_is_compared():
    early, late = issued([C, A, B, A], first=5), issued([A, B, A, B], first=6)  # a ring has forgotten 5
    assert find_mismatch({0: early, 1: late}) is None
    assert find_mismatch({0: early, 1: issued([A, A], first=6)}).where == "collective 7"


def test_groups_are_compared_on_their_own_members():
    left, right = issued([A, B], group="1"), issued([B, A], group="2")
    assert find_mismatch({0: left, 1: left, 2: right, 3: right}) is None
    odd = find_mismatch({0: left, 1: left, 2: right, 3: issued([B, B], group="2")})
    assert (odd.group, odd.ranks) == ("2", (3,))


def on_gloo(rank):
    x = torch.ones(4)
    half = dist.new_group([0, 1])
    dist.all_reduce(x)
    dist.all_reduce(x.to(torch.int32) if rank == 1 else x)  # as many bytes: nothing fails
    dist.all_reduce(x, group=half)
    outputs = [torch.empty(3) for _ in range(2)]
    dist.all_gather(outputs, torch.ones(3))
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    return read_issues()


def one_group_after_another(rank):
    for _ in range(9):
        dist.barrier()
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.all_gather([torch.empty(3) for _ in range(2)], torch.ones(3))
    return read_issues()


def test_what_a_group_of_the_same_name_did_before_is_not_mixed_in():
    seen = run_ranks(2, one_group_after_another)[0]
    if isinstance(seen, str):
        pytest.skip(seen)
    number = seen.last("")
    assert number < 9
    assert seen.text("", number).startswith("all_gather")


def test_gloos_own_record_shows_another_dtype_of_as_many_bytes():
    seen = run_ranks(2, on_gloo)
    if isinstance(seen[0], str):
        pytest.skip(seen[0])
    found = find_mismatch(dict(enumerate(seen)))
    assert (found.ranks, found.issued, found.others) == ((1,), "all_reduce (4,) Int", "all_reduce (4,) Float")
    assert len(seen[0].groups) == 2
    again = Issues.from_dict(seen[0].to_dict())
    number = again.last("")
    assert again.text("", number).startswith("all_gather")  # send and recv are nobody else's
    assert again.latest(1).text("", number) == again.text("", number)
    assert again.latest(1).text("", number - 1) == "nothing"
