"""Batches on their way to a GPU: under the recorder, where no order may be wrong, and on a real one."""

import gc
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from overlapkit.input import DeviceLoader
from overlapkit.input.transfer import Mover
from overlapkit.span import SpanLog
from tests.cuda_fake import FakeCuda, fake_cuda


@pytest.fixture
def machine() -> Iterator[FakeCuda]:
    with fake_cuda() as made:
        yield made
        gc.collect()
        assert made.faults == []


class Pair(NamedTuple):
    x: Any
    y: Any


def batch(k: int) -> dict[str, Any]:
    x = torch.arange(6.0).view(2, 3) + 10 * k
    return {"x": x, "row": x[1], "pair": Pair(torch.tensor(k), ["id", k]), "n": np.full(2, k), "none": None}


def on_host(tensor: torch.Tensor) -> Any:
    """Its values, read on the current stream as a kernel would."""
    return (tensor + 0).raw.tolist() if tensor.is_cuda else tensor.tolist()


def look(got: dict[str, Any]) -> tuple[Any, ...]:
    return on_host(got["x"]), on_host(got["row"]), on_host(got["pair"].x), got["pair"].y


def batches(n: int = 12) -> list[Any]:
    return [batch(k) for k in range(n)]


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_every_value_arrives(machine: FakeCuda, depth: int, pin: bool) -> None:
    loader = DeviceLoader(batches(), "cuda", depth=depth, pin=pin)
    for _ in range(2):
        assert [look(got) for got in loader] == [look(batch(k)) for k in range(12)]


def test_batches_stay_right_after_the_next_ones_were_read(machine: FakeCuda) -> None:
    """Neither the host's buffers nor the device's memory are used again for a batch that is still held."""
    held = list(DeviceLoader(batches(), "cuda", depth=1))
    assert [look(got) for got in held] == [look(batch(k)) for k in range(12)]


def test_one_allocation_and_one_copy_a_batch(machine: FakeCuda) -> None:
    for got in DeviceLoader(batches(5), "cuda"):
        assert got["pair"].x.untyped_storage().data_ptr() == got["x"].untyped_storage().data_ptr()
        assert got["x"].untyped_storage().nbytes() == 1024
    assert machine.copies == [(1024, True)] * 5


def test_types_identity_and_shared_memory_survive(machine: FakeCuda) -> None:
    source = [batch(0)]
    source[0]["again"] = source[0]["x"]
    (got,) = DeviceLoader(source, "cuda")
    assert type(got) is dict
    assert type(got["pair"]) is Pair
    assert got["again"] is got["x"]
    assert got["n"] is source[0]["n"]
    got["x"][1, 0] = -1
    assert on_host(got["row"])[0] == -1
    assert source[0]["row"][0] == 3


def test_streams_and_host_memory_are_made_once(machine: FakeCuda) -> None:
    loader = DeviceLoader(batches(), "cuda", depth=2)
    list(loader)
    made = len(machine.streams)
    (mover,) = loader._feed._idle
    assert mover.nbytes == 3 * 4096
    for _ in range(5):
        for _ in zip(range(3), loader, strict=False):
            pass
    assert len(machine.streams) == made
    assert loader._feed._idle == [mover]


def test_a_resume_at_an_epoch_s_end_makes_no_second_ring(machine: FakeCuda) -> None:
    loader = DeviceLoader(batches(3), "cuda")
    list(loader)
    (mover,) = loader._feed._idle
    loader.load_state_dict(loader.state_dict())
    assert len(list(loader)) == 3
    assert loader._feed._idle == [mover]


def test_a_source_that_cannot_begin_costs_no_ring(machine: FakeCuda) -> None:
    source = iter([[1], [2]])
    loader = DeviceLoader(lambda: next(source), "cuda")
    list(loader)
    (mover,) = loader._feed._idle
    list(loader)
    with pytest.raises(StopIteration):
        iter(loader)
    assert loader._feed._idle == [mover]


def test_two_passes_at_once_have_a_ring_each(machine: FakeCuda) -> None:
    loader = DeviceLoader(batches(), "cuda")
    got = [(look(a), look(b)) for a, b in zip(loader, loader, strict=True)]
    assert got == [(look(batch(k)), look(batch(k))) for k in range(12)]


def test_what_was_read_ahead_may_be_dropped_under_way(machine: FakeCuda) -> None:
    loader = DeviceLoader(batches(), "cuda", depth=4)
    iterator = iter(loader)
    next(iterator)
    while len(machine.copies) < 5:  # the reader has come to the end of what it may read ahead
        pass
    iterator.close()
    del iterator
    gc.collect()  # a fault here if nothing orders the copies before what they write is freed


def test_a_host_buffer_is_waited_for_only_when_it_is_filled_again(machine: FakeCuda) -> None:
    mover = Mover(torch.device("cuda", 0), 2, True, None, SpanLog())
    arrivals = []
    for k in range(7):
        assert machine.syncs == max(0, k - 2)
        arrivals.append(mover.send(batch(k), machine.default))  # type: ignore[arg-type]
    assert [look(arrival.receive()) for arrival in arrivals] == [look(batch(k)) for k in range(7)]


def test_the_transform_sees_the_copied_batch_on_the_side_stream(machine: FakeCuda) -> None:
    seen = []

    def transform(got: dict[str, Any]) -> Any:
        seen.append(machine.stream)
        return got["x"] * 2

    loader = DeviceLoader(batches(6), "cuda", transform=transform)
    assert [on_host(got) for got in loader] == [(batch(k)["x"] * 2).tolist() for k in range(6)]
    assert len(set(seen)) == 1
    assert seen[0] is not machine.default


def test_an_error_of_the_transform_comes_with_its_batch(machine: FakeCuda) -> None:
    def transform(got: dict[str, Any]) -> Any:
        if got["pair"].y[1] == 2:
            raise ZeroDivisionError("third")
        return got

    iterator = iter(DeviceLoader(batches(), "cuda", depth=3, transform=transform))
    next(iterator)
    next(iterator)
    with pytest.raises(ZeroDivisionError, match="third") as caught:
        next(iterator)
    assert "transform" in [entry.name for entry in caught.traceback]
    assert list(iterator) == []


def test_a_batch_that_cannot_be_moved_gives_its_buffer_back(machine: FakeCuda) -> None:
    class Broken(dict):  # type: ignore[type-arg]
        def __copy__(self) -> Any:
            raise OSError("no copy")

    source = [Broken(x=torch.zeros(2))]
    loader = DeviceLoader(source, "cuda", depth=1)
    for _ in range(4):  # more often than there are buffers
        with pytest.raises(TypeError, match="Broken"):
            list(loader)


class Moving:
    """Moves itself, as torch_geometric's Data does."""

    def __init__(self, where: str = "cpu") -> None:
        self.where = where

    def pin_memory(self) -> "Moving":
        return Moving("pinned")

    def to(self, device: Any, non_blocking: bool = False) -> "Moving":
        return Moving(f"{self.where} to {device}, non_blocking={non_blocking}")


class MovingPlainly(Moving):
    def pin_memory(self) -> "MovingPlainly":
        return self

    def to(self, device: Any) -> Moving:  # type: ignore[override]
        return Moving(f"{self.where} to {device}")


@pytest.mark.parametrize(("pin", "where"), [(True, "pinned"), (False, "cpu")])
def test_objects_that_move_themselves_do(machine: FakeCuda, pin: bool, where: str) -> None:
    (got,) = DeviceLoader([[Moving(), MovingPlainly(where), torch.ones(1)]], "cuda", pin=pin)
    assert got[0].where == f"{where} to cuda:0, non_blocking=True"
    assert got[1].where == f"{where} to cuda:0"


def test_batches_without_tensors_need_no_copy(machine: FakeCuda) -> None:
    assert list(DeviceLoader(["a", None, [], {"b": 1}], "cuda")) == ["a", None, [], {"b": 1}]
    assert machine.copies == []


def test_batches_of_growing_and_empty_size(machine: FakeCuda) -> None:
    source = [torch.arange(n) for n in (0, 1, 5000, 3, 0, 9000)]
    loader = DeviceLoader(source, "cuda", depth=1)
    for got, want in zip(loader, source, strict=True):
        assert on_host(got) == want.tolist()
    (mover,) = loader._feed._idle
    assert mover.nbytes <= 2 * 4096 * 18


def test_spans_of_both_lanes(machine: FakeCuda) -> None:
    loader = DeviceLoader(batches(3), "cuda", transform=lambda got: got)
    list(loader)
    spans = [span for _ in range(9) for span in loader.timings()]  # events answer late
    names = [(span.lane, span.name, span.exposed, span.bytes) for span in spans]
    for name, count, exposed, nbytes in [
        ("pack", 3, False, 32),
        ("copy", 3, False, 1024),
        ("transform", 3, False, None),
        ("wait", 3, True, None),
    ]:
        assert names.count(("transfer", name, exposed, nbytes)) == count
    assert names.count(("input", "wait", True, None)) == 4  # the end is waited for too
    assert names.count(("input", "source", False, None)) == 4
    assert {span.name for span in spans if span.device} == {"copy", "transform", "wait"}
    assert loader.timings() == []


@pytest.mark.gpu
@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_gpu_values_under_load(pin: bool, depth: int) -> None:
    """Long kernels hold the consumer's stream back while later batches are copied."""
    loader = DeviceLoader([torch.full((1 << 20,), float(k)) for k in range(40)], "cuda", depth=depth, pin=pin)
    weight = torch.randn(2048, 2048, device="cuda")
    sums = []
    for got in loader:
        assert got.device.type == "cuda"
        for _ in range(4):
            weight = torch.tanh(weight @ weight)
        sums.append((got.double().sum(), got.min(), got.max()))
        del got
    for k, (total, low, high) in enumerate(sums):
        assert (total.item(), low.item(), high.item()) == (k * (1 << 20), k, k)


@pytest.mark.gpu
def test_gpu_transform_outputs_are_not_reused_too_early() -> None:
    loader = DeviceLoader(
        [torch.full((1 << 20,), float(k)) for k in range(40)], "cuda", transform=lambda got: got * 2
    )
    weight = torch.randn(2048, 2048, device="cuda")
    sums = []
    for got in loader:
        weight = torch.tanh(weight @ weight)
        sums.append(got.double().sum())
        del got
    assert [total.item() for total in sums] == [2 * k * (1 << 20) for k in range(40)]


@pytest.mark.gpu
def test_gpu_kinds_of_tensors() -> None:
    source = {
        "sparse": torch.eye(4).to_sparse(),
        "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "conj": torch.tensor([1 + 1j]).conj(),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "empty": torch.empty(0, 2),
    }
    (got,) = DeviceLoader([source], "cuda")
    for name, tensor in got.items():
        assert tensor.device.type == "cuda"
        assert torch.equal(tensor.cpu().to_dense(), source[name].to_dense())
    assert got["channels last"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
def test_gpu_copy_spans_have_bytes_and_lengths() -> None:
    loader = DeviceLoader([torch.zeros(1 << 22) for _ in range(4)], "cuda")
    list(loader)
    torch.cuda.synchronize()
    copies = [span for span in loader.timings() if span.name == "copy"]
    assert [span.bytes for span in copies] == [1 << 24] * 4
    assert all(span.end > span.start for span in copies)
