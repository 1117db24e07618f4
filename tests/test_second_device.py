"""Components on cuda:1 while cuda:0 is current, under the recorder: no stream of cuda:0 is asked for.

A machine with one GPU cannot show this, and most have one.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overlapkit as ok
from overlapkit.checkpoint import layout
from overlapkit.measure.clock import StreamClock
from tests import cuda_fake
from tests.cuda_fake import FakeCuda, FakeStream, fake_cuda, module_on_device, on_device
from tests.optim.on_fake import kernels_on

SECOND = torch.device("cuda", 1)


class Machine:
    """The recorder with two devices, of which the first is current.

    Attributes:
        wrong: What was asked for on the first.
    """

    def __init__(self, recorder: FakeCuda) -> None:
        self.recorder = recorder
        self.wrong: list[str] = []
        self._inside = 0  # of `with torch.cuda.stream(one of the second's)`, which makes that device current

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("current_stream", "default_stream", "synchronize"):
            patch.setattr(torch.cuda, name, self._watched(name, getattr(torch.cuda, name)))
        patch.setattr(torch.cuda, "Stream", self._streams())
        entered = torch.cuda.stream

        @contextmanager
        def stream(one: Any) -> Iterator[None]:
            self._inside += 1
            try:
                with entered(one):
                    yield
            finally:
                self._inside -= 1

        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "device_count", lambda: 2)

    def _watched(self, name: str, real: Any) -> Any:
        def asked(device: Any = None) -> Any:
            self._look(name, device)
            return real(device)

        return asked

    def _streams(self) -> type:
        class Stream(FakeStream):
            def __init__(inner, device: Any = None, priority: int = 0) -> None:
                self._look("Stream", device)
                super().__init__(device, priority)

        return Stream

    def _look(self, name: str, device: Any) -> None:
        if device is None and self._inside:
            return
        if device is None or torch.device(device) != SECOND:
            self.wrong.append(f"torch.cuda.{name}({device})")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(cuda_fake, "CUDA", SECOND)
    monkeypatch.setattr(layout, "check_tensor", lambda path, tensor: None)  # the fake's are a subclass
    with fake_cuda() as recorder, pytest.MonkeyPatch.context() as patch:
        made = Machine(recorder)
        made.watch(patch)
        yield made
        gc.collect()
        assert made.wrong == []
        assert recorder.faults == []


@pytest.mark.parametrize("reuse", [False, True])
def test_the_loader(machine: Machine, reuse: bool) -> None:
    batches = [torch.full((4,), float(k)) for k in range(6)]
    loader = ok.DeviceLoader(batches, SECOND, transform=lambda got: got * 2, reuse_buffers=reuse)
    assert [got.sum().raw.item() for got in loader] == [8.0 * k for k in range(6)]
    loader.timings()
    loader.close()


def test_the_checkpointer_and_the_optimizer(machine: Machine, tmp_path: Path) -> None:
    net = module_on_device(nn.Linear(3, 5))
    optimizer = ok.AdamW(net.parameters(), lr=0.1, max_norm=1.0)
    with kernels_on(machine.recorder), ok.Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 4):
            net(on_device(torch.ones(2, 3))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            saved = net.weight.detach().raw.clone()
            checkpointer.save(step, {"net": net, "optimizer": optimizer})
        checkpointer.wait()
    there = nn.Linear(3, 5)
    with ok.Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore({"net": there}, 3, only=("net",))
    assert torch.equal(there.weight, saved)


def test_the_meter_its_clock_and_what_it_logs(machine: Machine) -> None:
    net = module_on_device(nn.Linear(3, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    meter = ok.StepMeter(net, optimizer)
    for _ in range(12):
        with meter.step():
            loss = net(on_device(torch.ones(2, 3))).sum()
            loss.backward()
            optimizer.step()
            meter.log(loss=loss)
    clock = StreamClock(SECOND)
    clock.mark(clock.now())
    meter.close()
    assert meter.logged["loss"] == pytest.approx(loss.detach().raw.item())


def test_the_watch_sees_who_names_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_fake, "CUDA", SECOND)
    with fake_cuda() as recorder, pytest.MonkeyPatch.context() as patch:
        made = Machine(recorder)
        made.watch(patch)
        torch.cuda.current_stream()
        torch.cuda.Stream(torch.device("cuda", 0))
        with torch.cuda.stream(torch.cuda.Stream(SECOND)):
            torch.cuda.current_stream()
    assert made.wrong == ["torch.cuda.current_stream(None)", "torch.cuda.Stream(cuda:0)"]
