"""Wrapping hands over every batch in order, and a resumed loader goes on with the batch that follows."""

from pathlib import Path

import pytest
import torch

import input_overhead
import overlapkit as ok
from input_overhead import Queued, Resume, batch_seconds, loaders

CPU = torch.device("cpu")
KINDS = ["a list", "ElasticSampler", "TokenShards", "a shuffled DataLoader"]


def test_a_thread_and_a_queue_keep_the_order() -> None:
    assert list(Queued(range(100), 2)) == list(range(100))
    assert list(Queued([], 2)) == []


def test_a_pass_that_is_too_short_is_an_error() -> None:
    assert batch_seconds(range(5), 5) > 0
    with pytest.raises(RuntimeError, match="4 batches came of 5"):
        batch_seconds(range(4), 5)


def test_wrapping_reports_every_variant() -> None:
    names = [figure.name for figure in input_overhead.wrapping(50, 1, CPU)]
    assert names == [
        f"wrapping a list, {name}"
        for name in (
            "no loader",
            "ours, depth 2",
            "ours, depth 16",
            "thread and queue of 2",
            "thread and queue of 16",
        )
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_goes_on_where_it_stood(kind: str, tmp_path: Path) -> None:
    built = loaders(tmp_path, 22, CPU)
    assert list(built) == KINDS
    build = built[kind]
    resume = Resume(build, 20)
    assert resume() > 0
    whole = [torch.as_tensor(batch).flatten()[0].item() for batch in build()]
    assert len(whole) == 22
    if kind != "a shuffled DataLoader":  # that one draws another order each time
        assert torch.as_tensor(resume.expected).flatten()[0] == whole[20]
    assert sorted(whole) == sorted(range(22) if kind != "TokenShards" else range(0, 22 * 8, 8))


def test_a_loader_that_goes_on_elsewhere_is_an_error() -> None:
    resume = Resume(lambda: ok.DeviceLoader(list(range(10)), CPU), 5)
    resume.expected = 7
    with pytest.raises(RuntimeError, match="resumed at 5, not at 7"):
        resume()
