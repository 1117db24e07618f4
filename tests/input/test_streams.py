"""DeviceLoader's scheduling on a GPU, under the recorder: no value and no order may be wrong."""

import gc
import time
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import overlapkit as ok
from overlapkit.input.transfer import Mover, _parts
from overlapkit.lane import Lane, Ticket
from overlapkit.pinned import PinnedBuffer
from overlapkit.span import SpanLog
from tests.cuda_fake import FakeCuda, fake_cuda


def batches() -> list[dict[str, Any]]:
    return [
        {"x": torch.full((4, 3), float(i)), "y": [torch.tensor([i, i])], "name": str(i)} for i in range(9)
    ]


def double(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "x": batch["x"] * 2}


def consume(machine: FakeCuda, *, depth: int, transform: Any = None, stop: int | None = None) -> None:
    """Three epochs, each batch used on the consumer's stream."""
    factor = 1 if transform is None else 2
    loader = ok.DeviceLoader(batches(), "cuda", depth=depth, transform=transform)
    for _ in range(3):
        for index, batch in enumerate(loader):
            assert batch["x"].is_cuda
            assert batch["name"] == str(index)
            total = batch["x"].sum() + batch["y"][0].sum()
            assert total.raw.item() == 12 * index * factor + 2 * index
            if index == stop:
                break
    del batch, total
    loader.close()
    gc.collect()
    torch.cuda.synchronize()


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("transform", [None, double], ids=["plain", "transform"])
@pytest.mark.parametrize("stop", [None, 0, 4])
def test_every_order_holds(depth: int, transform: Any, stop: int | None) -> None:
    with fake_cuda() as machine:
        consume(machine, depth=depth, transform=transform, stop=stop)
        assert machine.faults == []


def test_one_copy_a_batch_from_page_locked_memory_within_the_bound() -> None:
    with fake_cuda() as machine:
        loader = ok.DeviceLoader(batches(), "cuda", depth=2)
        list(loader)
        assert machine.copies == [(1024, True)] * 9  # 48 and 16 bytes, each from a multiple of 512
        assert 0 < sum(machine.pinned.values()) <= 3 * 4096
        loader.close()
        gc.collect()
        assert not machine.pinned


def test_the_consumer_may_iterate_on_a_stream_of_its_own() -> None:
    with fake_cuda() as machine:
        mine = torch.cuda.Stream()
        loader = ok.DeviceLoader(batches(), "cuda")
        with torch.cuda.stream(mine):
            for index, batch in enumerate(loader):
                assert batch["x"].sum().raw.item() == 12 * index
        del batch
        loader.close()
        gc.collect()
        assert machine.faults == []


@pytest.mark.parametrize("transform", [None, double], ids=["plain", "transform"])
@pytest.mark.parametrize("grad", [False, True], ids=["packed", "moved one by one"])
def test_a_batch_used_on_another_stream_than_it_was_read_for_may_be_dropped_at_once(
    grad: bool, transform: Any
) -> None:
    with fake_cuda() as machine:
        mine = torch.cuda.Stream()
        source = [{"x": torch.full((4, 3), float(i), requires_grad=grad)} for i in range(9)]
        loader = ok.DeviceLoader(source, "cuda", depth=1, transform=transform)
        reading = iter(loader)
        next(reading)  # on the default stream: it is where the next batch is read to
        with torch.cuda.stream(mine):
            for batch in reading:
                batch["x"].detach().sum()
                del batch
        gc.collect()
        assert machine.faults == []
        loader.close()


class Moving:
    """Moves itself: on the device its memory is made on the current stream."""

    def pin_memory(self) -> "Moving":
        return self

    def to(self, device: Any, non_blocking: bool) -> "Moving":
        self.x = torch.ones(4, device=device)
        return self

    def record_stream(self, stream: Any) -> None:
        self.x.record_stream(stream)


def test_what_moves_itself_is_ordered_before_its_use_on_another_stream() -> None:
    with fake_cuda() as machine:
        loader = ok.DeviceLoader([Moving() for _ in range(5)], "cuda", depth=1)
        reading = iter(loader)
        next(reading)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert [batch.x.sum().raw.item() for batch in reading] == [4] * 4
        gc.collect()
        assert machine.faults == []
        loader.close()


HIDDEN: dict[int, torch.Tensor] = {}


class Hidden(Moving):
    """Its memory is where nobody finds it but itself, such as in an extension."""

    def to(self, device: Any, non_blocking: bool) -> "Hidden":
        HIDDEN[id(self)] = torch.ones(4, device=device)
        return self

    def record_stream(self, stream: Any) -> None:
        HIDDEN[id(self)].record_stream(stream)


def test_what_moves_itself_is_told_which_stream_uses_it() -> None:
    with fake_cuda() as machine:
        loader = ok.DeviceLoader([Hidden() for _ in range(5)], "cuda", depth=1)
        reading = iter(loader)
        next(reading)
        with torch.cuda.stream(torch.cuda.Stream()):
            for batch in reading:
                HIDDEN.pop(id(batch)).sum()
        HIDDEN.clear()
        gc.collect()
        assert machine.faults == []
        loader.close()


def test_batches_that_nobody_takes_go_back_behind_their_copies_wherever_they_are_dropped() -> None:
    with fake_cuda() as machine:
        loader = ok.DeviceLoader(batches(), "cuda", depth=3)
        reading = iter(loader)
        with torch.cuda.stream(torch.cuda.Stream()):
            next(reading)
            next(reading)  # from here on they are read for this stream, and dropped on another
        time.sleep(0.05)  # the reader may have gone on, or not: both are right
        del reading
        loader.close()
        gc.collect()
        assert machine.faults == []


def test_no_memory_of_a_batch_is_kept_once_the_loop_has_dropped_it() -> None:
    with fake_cuda() as machine:
        loader = ok.DeviceLoader(batches(), "cuda", depth=3)
        for _ in loader:
            pass
        del _
        gc.collect()
        assert [memory.name for memory in machine.memories.values() if memory.home != "host"] == []
        loader.close()


def test_a_mover_that_is_dropped_waits_for_its_copies_before_its_memory_goes() -> None:
    with fake_cuda() as machine:
        stream = torch.cuda.current_stream()
        mover = Mover(torch.device("cuda", 0), 2, True, None, SpanLog())
        batch = mover.send({"x": torch.ones(4)}, stream).receive()
        assert machine.syncs == 0
        del mover
        gc.collect()
        assert not machine.pinned
        assert machine.faults == []
        assert batch["x"].sum().raw.item() == 4


def without_order(ticket: Ticket) -> Any:
    return ticket._result(None)


def faults_with(target: type, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(target, name, broken)
    with fake_cuda() as machine:
        consume(machine, depth=2, transform=double, stop=4)
        return machine.faults


def test_the_recorder_sees_a_consumer_that_is_not_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults_with(Ticket, "order", without_order, monkeypatch)


def test_the_recorder_sees_a_host_buffer_that_is_given_back_early(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back = PinnedBuffer.give_back
    assert faults_with(PinnedBuffer, "give_back", lambda buffer, after=None: give_back(buffer), monkeypatch)


def test_the_recorder_sees_a_copy_that_does_not_wait_for_its_destination(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit = Lane._run_on_stream

    def without_wait(lane: Lane, *args: Any) -> None:
        lane._stream = lane._stream or torch.cuda.Stream(lane.device)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(lane._stream), "wait_stream", lambda self, other: None)
            submit(lane, *args)

    assert faults_with(Lane, "_run_on_stream", without_wait, monkeypatch)


class Slotted:
    __slots__ = ("parts",)

    def __init__(self, x: torch.Tensor) -> None:
        self.parts = {"x": [x]}


WRAPS: dict[str, tuple[Any, Any]] = {
    "dict": (lambda x: {"x": x}, lambda made: made["x"]),
    "object": (lambda x: SimpleNamespace(inner=SimpleNamespace(x=x)), lambda made: made.inner.x),
    "slots": (Slotted, lambda made: made.parts["x"][0]),
    "moves itself": (lambda x: Unhelpful(x), lambda made: made.x),
    "partial": (lambda x: partial(torch.sum, x), lambda made: made.args[0]),
}


class Unhelpful(Moving):
    """Moves itself, and has no record_stream."""

    record_stream = None  # type: ignore[assignment]

    def __init__(self, x: Any = None) -> None:
        self.x = x


@pytest.mark.parametrize("how", WRAPS)
def test_what_a_transform_made_is_not_used_again_while_the_loop_s_stream_reads_it(how: str) -> None:
    wrap, get = WRAPS[how]
    with fake_cuda() as machine:
        loader = ok.DeviceLoader(batches(), "cuda", transform=lambda batch: wrap(batch["x"] * 2))
        for index, batch in enumerate(loader):
            assert get(batch).sum().raw.item() == 24 * index
            del batch
        gc.collect()
        assert machine.faults == []
        loader.close()


def test_what_moves_itself_and_says_nothing_of_streams_is_ordered_all_the_same() -> None:
    with fake_cuda() as machine:
        loader = ok.DeviceLoader([Unhelpful() for _ in range(5)], "cuda", depth=1)
        reading = iter(loader)
        next(reading)
        with torch.cuda.stream(torch.cuda.Stream()):
            for batch in reading:
                assert batch.x.sum().raw.item() == 4
                batch.x = None
        gc.collect()
        assert machine.faults == []
        loader.close()


@pytest.mark.parametrize(
    "kind", ["plain", "coo", "csr", "nested", "jagged", "two in one", "twice two in one"]
)
def test_the_memory_of_every_kind_of_tensor_is_found(kind: str) -> None:
    eye, rows = torch.eye(4), [torch.ones(2, 3), torch.ones(4, 3)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: these are prototypes
        coo, csr, nested = eye.to_sparse(), eye.to_sparse_csr(), torch.nested.nested_tensor(rows)
    made, parts = {
        "plain": (eye, [eye]),
        "coo": (coo, [coo._indices(), coo._values()]),
        "csr": (csr, [csr.crow_indices(), csr.col_indices(), csr.values()]),
        "nested": (nested, [nested.values()]),
        "jagged": (jagged, [jagged.values(), jagged.offsets()]),
        "two in one": (TwoTensor(eye, eye + 1), None),
        "twice two in one": (TwoTensor(TwoTensor(eye, eye * 2), TwoTensor(eye + 1, eye + 2)), None),
    }[kind]
    if parts is None:
        parts, waiting = [], [made]
        for two in waiting:
            waiting += [one for one in (two.a, two.b) if isinstance(one, TwoTensor)]
            parts += [one for one in (two.a, two.b) if not isinstance(one, TwoTensor)]
    found = {part.data_ptr() for part in _parts(made)}
    assert {part.data_ptr() for part in parts} <= found
