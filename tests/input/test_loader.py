from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import overlapkit
from overlapkit.input import DeviceLoader
from tests.input.sources import ByEpoch, Numbers, Stream, in_order, plain


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"depth": 0}, ValueError, "depth=0"),
        ({"depth": True}, ValueError, "depth=True"),
        ({"depth": 1.5}, ValueError, "depth=1.5"),
        ({"pin": "yes"}, ValueError, "pin='yes'"),
        ({"pin": torch.ones(2)}, ValueError, "pin=tensor"),
        ({"transform": 3}, TypeError, "transform=3"),
        ({"uneven": "skip"}, ValueError, "uneven='skip'"),
        ({"uneven": False}, ValueError, "uneven=False"),
        ({"uneven": torch.zeros(2)}, ValueError, "uneven=tensor"),
        ({"reuse_buffers": 2}, ValueError, "reuse_buffers=2"),
        ({"device": "gpu"}, ValueError, "device='gpu'"),
        ({"device": "meta"}, ValueError, "device='meta'"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        DeviceLoader([1], **options)


def test_a_module_is_no_source() -> None:
    with pytest.raises(TypeError, match="source is a Linear"):
        DeviceLoader(torch.nn.Linear(1, 1), "cpu")


def test_a_launched_process_without_a_group_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="WORLD_SIZE=2.*init_process_group"):
        DeviceLoader([1], "cpu")


def test_it_is_the_public_name() -> None:
    assert overlapkit.DeviceLoader is DeviceLoader


def test_pin_without_a_gpu_has_no_effect_and_says_so() -> None:
    with pytest.warns(UserWarning, match="pin=True has no effect"):
        loader = DeviceLoader([1], "cpu", pin=True)
    assert list(loader) == [1]


def test_the_source_s_attributes_are_forwarded() -> None:
    source = in_order(7, 2)
    loader = DeviceLoader(source, "cpu")
    assert len(loader) == 4
    assert loader.dataset is source.dataset
    assert loader.sampler is source.sampler
    assert loader.batch_sampler is source.batch_sampler
    assert loader.batch_size == 2
    assert loader.device == torch.device("cpu")


@pytest.mark.parametrize("name", ["dataset", "sampler", "batch_sampler", "batch_size"])
def test_what_the_source_lacks_is_lacking(name: str) -> None:
    loader = DeviceLoader(lambda: iter([1]), "cpu")
    assert not hasattr(loader, name)
    with pytest.raises(AttributeError, match=f"source=function has no {name}"):
        getattr(loader, name)
    with pytest.raises(TypeError, match="len"):
        len(loader)
    assert list(loader) == [1]  # list() asks for a length first


class EpochStream(Stream):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_set_epoch_reaches_whatever_has_epochs() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(8), num_replicas=1, rank=0)
    batches = ByEpoch(8, 2)
    stream = EpochStream(3)
    DeviceLoader(DataLoader(Numbers(8), sampler=sampler), "cpu").set_epoch(3)
    DeviceLoader(DataLoader(Numbers(8), batch_sampler=batches), "cpu").set_epoch(4)
    DeviceLoader(DataLoader(stream), "cpu").set_epoch(5)
    DeviceLoader([1], "cpu").set_epoch(6)  # a list has none
    assert (sampler.epoch, batches.epoch, stream.epoch) == (3, 4, 5)


@pytest.mark.parametrize("epoch", ["1", 1.0, True, None])
def test_an_epoch_is_an_integer_also_where_none_is_told(epoch: Any) -> None:
    """A state with another one would be written, and refused when it is needed."""
    loader = DeviceLoader([1], "cpu")
    loader.set_epoch(3)
    with pytest.raises(ValueError, match=f"epoch={epoch!r}"):
        loader.set_epoch(epoch)
    assert loader.state_dict()["epoch"] == 3


def test_an_epoch_of_numpy_s_is_one_and_its_state_is_json() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(8), num_replicas=1, rank=0)
    loader = DeviceLoader(DataLoader(Numbers(8), sampler=sampler), "cpu")
    loader.set_epoch(np.int64(3))  # type: ignore[arg-type]
    assert (type(sampler.epoch), sampler.epoch) == (int, 3)
    sampler.set_epoch(np.int64(4))  # type: ignore[arg-type]
    assert type(loader.state_dict()["epoch"]) is int
    assert loader.state_dict()["epoch"] == 4


def test_on_the_cpu_batches_are_handed_over_as_they_are() -> None:
    source = [{"x": torch.zeros(2)}, object()]
    assert all(got is given for got, given in zip(DeviceLoader(source, "cpu"), source, strict=True))


def test_transform_on_the_cpu() -> None:
    loader = DeviceLoader(in_order(5, 2), "cpu", transform=lambda batch: batch * 10)
    assert [plain(batch) for batch in loader] == [[0, 10], [20, 30], [40]]


def test_spans_on_the_cpu() -> None:
    loader = DeviceLoader([1, 2, 3], "cpu", transform=lambda batch: batch)
    list(loader)
    spans = loader.timings()
    counts = {name: sum(span.name == name for span in spans) for name in ("source", "transform", "wait")}
    assert counts == {"source": 4, "transform": 3, "wait": 4}
    assert all(span.lane == "input" and span.exposed == (span.name in ("wait", "watch")) for span in spans)
    assert all(span.end >= span.start and not span.device for span in spans)
    assert loader.timings() == []


def test_close_ends_all_passes_and_the_loader_can_be_used_again() -> None:
    loader = DeviceLoader([1, 2, 3], "cpu")
    passes = [iter(loader), iter(loader)]
    assert [next(one) for one in passes] == [1, 1]
    loader.close()
    assert [list(one) for one in passes] == [[], []]
    assert list(loader) == [1, 2, 3]


def test_the_newest_batch_of_any_pass_is_what_the_state_counts() -> None:
    loader = DeviceLoader([1, 2, 3], "cpu")
    outer, inner = iter(loader), iter(loader)
    next(outer)
    next(outer)
    next(inner)
    assert loader.state_dict()["taken"] == 1
    next(outer)
    assert loader.state_dict()["taken"] == 3
    loader.close()
