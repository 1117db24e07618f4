"""reuse_buffers=True: every batch at the same addresses, with the values it has without, on both devices."""

import contextlib
import gc
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from overlapkit.input import DeviceLoader
from overlapkit.input.fixed import MAX_LAYOUTS
from tests.cuda_fake import FakeCuda, fake_cuda
from tests.input.sources import Numbers

DEVICES = ["cpu", "cuda"]


@contextlib.contextmanager
def machine_of(device: str) -> Iterator[FakeCuda | None]:
    """A CUDA device under the recorder, or none."""
    if device == "cpu":
        yield None
        return
    with fake_cuda() as machine:
        yield machine
        gc.collect()
        torch.cuda.synchronize()
        assert machine.faults == []


class Pair(NamedTuple):
    x: Any
    name: str


TABLE = torch.arange(300.0).view(100, 3)


def batch(k: int) -> dict[str, Any]:
    x = torch.full((2, 3, 4, 4), float(k)).contiguous(memory_format=torch.channels_last)
    rows = TABLE[5 * k : 5 * k + 4]  # at another place of its storage each time
    pair = Pair(torch.arange(k, k + 7), str(k))
    return {"x": x, "pair": pair, "rows": [rows, rows[1:]], "again": x, "k": k}


def tensors(got: dict[str, Any]) -> list[torch.Tensor]:
    return [got["x"], got["pair"].x, *got["rows"], got["again"]]


def on_host(tensor: torch.Tensor) -> Any:
    return (tensor + 0).raw.tolist() if tensor.is_cuda else tensor.tolist()


def look(got: dict[str, Any]) -> Any:
    return [on_host(tensor) for tensor in tensors(got)], got["k"], got["pair"].name


def addresses(got: dict[str, Any]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors(got)]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_addresses_stay_and_values_are_those_of_fresh_memory(device: str, depth: int) -> None:
    with machine_of(device):
        loader = DeviceLoader([batch(k) for k in range(12)], device, depth=depth, reuse_buffers=True)
        seen = set()
        for stop in (12, 3, 12):
            for k, got in zip(range(stop), loader, strict=False):
                assert look(got) == look(batch(k))
                seen.add(tuple(addresses(got)))
        assert len(seen) == 1
        assert len(set(seen.pop()[:-1])) == 4
        del got


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_graph_captured_reads_the_latest_batch(device: str) -> None:
    with machine_of(device):
        loader = DeviceLoader([batch(k) for k in range(12)], device, reuse_buffers=True)
        captured = next(iter(loader))
        for k, _ in enumerate(loader):
            assert [on_host(tensor) for tensor in tensors(captured)] == look(batch(k))[0]
        del captured, _


@pytest.mark.parametrize("device", DEVICES)
def test_types_strides_identity_and_shared_memory_survive(device: str) -> None:
    with machine_of(device):
        (got,) = DeviceLoader([batch(2)], device, reuse_buffers=True)
        assert type(got["pair"]) is Pair
        assert got["x"] is got["again"]
        assert got["x"].is_contiguous(memory_format=torch.channels_last)
        got["rows"][0][1, 0] = -1
        assert on_host(got["rows"][1])[0][0] == -1
        assert TABLE[11, 0] == 33
        del got


@pytest.mark.parametrize("device", DEVICES)
def test_each_layout_has_its_memory_and_one_too_many_is_an_error(device: str) -> None:
    def of(*sizes: int) -> list[torch.Tensor]:
        return [torch.full((size,), size) for size in sizes]

    with machine_of(device):
        shapes = list(range(MAX_LAYOUTS)) * 2
        loader = DeviceLoader(of(*shapes), device, reuse_buffers=True)
        places: dict[int, set[int]] = {size: set() for size in shapes}
        for size, got in zip(shapes, loader, strict=True):
            assert on_host(got) == [size] * size
            places[size].add(got.data_ptr())
        assert all(len(place) == 1 for place in places.values())
        assert len(set.union(*places.values())) == MAX_LAYOUTS
        del got
        passing = iter(DeviceLoader(of(*range(30)), device, reuse_buffers=True))
        with pytest.raises(RuntimeError, match=r"shapes \[\(16,\)\].*than the 16 before.*pad batches"):
            deque(passing, maxlen=0)
        assert list(passing) == []


class Moving:
    def to(self, device: Any, non_blocking: bool = False) -> "Moving":
        return self

    def pin_memory(self) -> "Moving":
        return self


@pytest.mark.parametrize(
    ("leaf", "match"),
    [
        (torch.zeros(2, requires_grad=True), "requires grad"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (Moving(), "Moving that moves itself"),
        (torch.nn.Parameter(torch.zeros(1), requires_grad=False), "torch.nn.parameter.Parameter"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_address_to_keep_is_an_error(leaf: Any, match: str) -> None:
    with pytest.raises(TypeError, match=f"reuse_buffers=True: a batch holds a .*{match}.*plain tensors"):
        list(DeviceLoader([[torch.ones(1), leaf]], "cpu", reuse_buffers=True))


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_the_transform_s_output_that_has_fixed_addresses(device: str) -> None:
    def transform(got: dict[str, Any]) -> Any:
        return {"sum": got["x"] + got["k"], "rows": got["rows"][0]}

    with machine_of(device):
        loader = DeviceLoader([batch(k) for k in range(9)], device, reuse_buffers=True, transform=transform)
        places = set()
        for k, got in enumerate(loader):
            assert on_host(got["sum"]) == (batch(k)["x"] + k).tolist()
            assert on_host(got["rows"]) == batch(k)["rows"][0].tolist()
            places.add((got["sum"].data_ptr(), got["rows"].data_ptr()))
        assert len(places) == 1
        del got


@pytest.mark.parametrize("device", DEVICES)
def test_batches_without_tensors_pass(device: str) -> None:
    with machine_of(device):
        assert list(DeviceLoader(["a", None, {"b": 1}], device, reuse_buffers=True)) == ["a", None, {"b": 1}]


def test_from_worker_processes() -> None:
    source = DataLoader(Numbers(12), batch_size=3, num_workers=2)
    loader = DeviceLoader(source, "cpu", reuse_buffers=True)
    got = [(batch.tolist(), batch.data_ptr()) for _ in range(2) for batch in loader]
    assert [values for values, _ in got] == [[k, k + 1, k + 2] for k in (0, 3, 6, 9)] * 2
    assert len({address for _, address in got}) == 1


def test_a_backward_pass_that_comes_too_late_is_an_error() -> None:
    weight = torch.ones(3, requires_grad=True)
    passing = iter(DeviceLoader([torch.ones(3), torch.ones(3)], "cpu", reuse_buffers=True))
    loss = (weight * next(passing)).sum()
    next(passing)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    passing.close()


def test_memory_made_in_inference_mode_serves_training_too() -> None:
    loader = DeviceLoader([torch.full((2,), float(k)) for k in range(3)], "cpu", reuse_buffers=True)
    with torch.inference_mode():
        assert [got.tolist() for got in loader] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]
    weight = torch.ones(2, requires_grad=True)
    for got in loader:
        (got * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]


def test_one_pass_at_a_time() -> None:
    loader = DeviceLoader([1, 2, 3], "cpu", reuse_buffers=True)
    first, second = iter(loader), iter(loader)
    with pytest.raises(RuntimeError, match="and with reuse_buffers"):
        next(first)
    assert list(second) == [1, 2, 3]


@pytest.mark.parametrize("device", DEVICES)
def test_the_copy_is_published_as_exposed_and_one_does(device: str) -> None:
    with machine_of(device):
        source = [[torch.ones(3), torch.ones(130)] for _ in range(4)]
        loader = DeviceLoader(source, device, reuse_buffers=True)
        for _ in loader:
            pass
        spans = [span for _ in range(9) for span in loader.timings() if span.name == "reuse"]
        nbytes = 12 + 520 if device == "cpu" else 512 + 520  # they arrive on a GPU in one range of bytes
        assert [(span.lane, span.bytes, span.exposed) for span in spans] == [("transfer", nbytes, True)] * 4


def test_device_memory_is_one_block_a_layout_beside_what_is_under_way() -> None:
    with machine_of("cuda") as machine:
        assert machine is not None
        loader = DeviceLoader([torch.ones(4 + k % 2) for k in range(12)], "cuda", reuse_buffers=True)
        for _ in loader:
            pass
        del _
        gc.collect()
        assert sum(memory.home != "host" for memory in machine.memories.values()) == 2
        del loader
        gc.collect()
        assert sum(memory.home != "host" for memory in machine.memories.values()) == 0


def switching(machine: FakeCuda) -> None:
    """Each batch is asked for, and used, on another stream than the one before."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    passing = iter(DeviceLoader([batch(k) for k in range(9)], "cuda", reuse_buffers=True))
    for k in range(9):
        with torch.cuda.stream(streams[k % 3]):
            got = next(passing)
            assert look(got) == look(batch(k))
            del got
    passing.close()


def test_a_loop_that_changes_streams() -> None:
    with machine_of("cuda") as machine:
        assert machine is not None
        switching(machine)


@pytest.mark.parametrize("wait", [True, False])
def test_use_on_another_stream_is_right_where_the_loop_s_stream_waits_for_it(wait: bool) -> None:
    with fake_cuda() as machine:
        side = torch.cuda.Stream()
        for got in DeviceLoader([torch.ones(4)] * 5, "cuda", reuse_buffers=True):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                got + 1
            if wait:
                torch.cuda.current_stream().wait_stream(side)
        assert (machine.faults == []) is wait


@pytest.mark.gpu
def test_gpu_a_captured_graph_is_replayed_over_every_batch() -> None:
    source = [{"x": torch.full((1 << 18,), float(k)), "k": k} for k in range(30)]
    loader = DeviceLoader(source, "cuda", depth=3, reuse_buffers=True)
    graph, total, sums = torch.cuda.CUDAGraph(), None, []
    weight = torch.randn(1024, 1024, device="cuda")
    for got in loader:
        for _ in range(8):  # the loop's stream is late
            weight = torch.tanh(weight @ weight)
        if total is None:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                total = got["x"].double().sum()
        graph.replay()
        sums.append(total.clone())
    assert [one.item() for one in sums] == [float(k << 18) for k in range(30)]


@pytest.mark.gpu
def test_gpu_the_loop_may_change_streams() -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    passing = iter(DeviceLoader([torch.full((1 << 20,), float(k)) for k in range(30)], reuse_buffers=True))
    sums = []
    for k in range(30):
        with torch.cuda.stream(streams[k % 2]):
            got = next(passing)
            torch.cuda._sleep(1_000_000)
            sums.append(got.double().sum())
    torch.cuda.synchronize()
    assert [one.item() for one in sums] == [float(k << 20) for k in range(30)]
    passing.close()
