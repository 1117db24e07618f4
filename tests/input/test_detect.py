from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from overlapkit.input import DeviceLoader
from tests.input.sources import Numbers, Stream, in_order


class Unsized:
    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("source", "error", "match"),
    [
        (None, TypeError, "source=None is not iterable"),
        (7, TypeError, "source=7 is not iterable"),
        ("data", TypeError, "source is a str"),
        ({"a": 1}, TypeError, "source is a dict"),
        (torch.zeros(3), TypeError, "source is a Tensor"),
        (iter([1, 2]), TypeError, "used once"),
        ((k for k in range(3)), TypeError, "source is a generator, an iterator that can be used once"),
        (TensorDataset(torch.zeros(3)), TypeError, "TensorDataset is a map-style dataset"),
        ([], ValueError, r"source is empty \(len 0\)"),
        (DataLoader(Numbers(3), batch_size=4, drop_last=True), ValueError, "drop_last"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_source_is_refused_at_once(source: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        DeviceLoader(source, "cpu")


@pytest.mark.parametrize("source", [Unsized(), lambda: iter(()), DataLoader(Stream(0))])
def test_an_empty_source_of_unknown_length_is_an_error_of_the_first_pass(source: Any) -> None:
    loader = DeviceLoader(source, "cpu")
    with pytest.raises(ValueError, match="source is empty: it gave no batch"):
        for _ in loader:
            pass


def test_a_function_that_returns_the_same_iterator_twice_is_found_out() -> None:
    only = iter(range(3))
    loader = DeviceLoader(lambda: only, "cpu")
    assert list(loader) == [0, 1, 2]
    with pytest.raises(ValueError, match="fresh iterator at each call"):
        list(loader)


def test_a_function_that_returns_no_iterable() -> None:
    with pytest.raises(TypeError, match="must return an iterable"):
        iter(DeviceLoader(lambda: 3, "cpu"))


@pytest.mark.parametrize(
    "source",
    [
        [10, 11, 12],
        (10, 11, 12),
        range(10, 13),
        lambda: iter([10, 11, 12]),
        lambda: [10, 11, 12],
        DataLoader(Stream(3), batch_size=None, collate_fn=lambda k: k + 10),
        DataLoader([10, 11, 12], batch_size=None),
    ],
    ids=["list", "tuple", "range", "function", "function of a list", "iterable loader", "loader of a list"],
)
def test_each_kind_is_read_whole_every_time(source: Any) -> None:
    loader = DeviceLoader(source, "cpu")
    for _ in range(2):
        assert list(loader) == [10, 11, 12]


def test_an_iterable_loader_is_not_asked_for_its_length() -> None:
    """Its answer would be held against it: it warns when it gives more."""

    class Modest(Stream):
        def __len__(self) -> int:
            return 2

    assert len(list(DeviceLoader(DataLoader(Modest(6), batch_size=1), "cpu"))) == 6


def test_the_original_loader_is_left_as_it_is() -> None:
    source = in_order(6, 2)
    before = dict(vars(source))
    list(DeviceLoader(source, "cpu"))
    assert vars(source) == before
    assert len(list(source)) == 3


def test_workers_that_the_original_loader_has_are_not_ours() -> None:
    """The script has looked at a batch before it wraps the loader."""
    source = in_order(6, 2, num_workers=1, persistent_workers=True)
    theirs = iter(source)
    assert next(theirs).tolist() == [0, 1]
    loader = DeviceLoader(source, "cpu")
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    assert [batch.tolist() for batch in theirs] == [[2, 3], [4, 5]]
    loader.close()
