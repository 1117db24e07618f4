"""The checkpointer's staging on a GPU, under the recorder: late copies, optimizer steps, reused buffers."""

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overlapkit as ok
from overlapkit.checkpoint import CheckpointError, layout
from overlapkit.checkpoint.stage import Stager
from tests.cuda_fake import FakeCuda, fake_cuda, module_on_device, on_device
from tests.optim.on_fake import kernels_on


@pytest.fixture
def _any_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "check_tensor", lambda path, tensor: None)  # the fake's are a subclass


def train(
    machine: FakeCuda, directory: Path, stage: Any, in_flight: int = 1, held: threading.Event | None = None
) -> None:
    """Five steps, a save after each; with `held` the writer begins with none of them before that is set."""
    torch.manual_seed(0)
    net = module_on_device(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    loose = on_device(torch.zeros(7))
    opt = ok.AdamW(net.parameters(), lr=0.1, max_norm=1.0)
    at_save: dict[int, list[torch.Tensor]] = {}
    with ok.Checkpointer(directory, stage=stage, in_flight=in_flight) as ckpt:
        if held is not None:
            ckpt._writer.submit(lambda: held.wait(30))
        for step in range(5):
            net(on_device(torch.randn(4, 3))).sum().backward()
            opt.step()
            opt.zero_grad()
            loose.add_(1)
            at_save[step] = [p.detach().raw.clone() for p in net.parameters()] + [loose.raw.clone()]
            ckpt.save(step, {"net": net, "opt": opt, "loose": loose})
        if held is not None:
            held.set()
        ckpt.wait()
    for step, expected in at_save.items():
        there = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        state = {"net": there, "loose": torch.zeros(7)}
        with ok.Checkpointer(directory) as ckpt:
            ckpt.restore(state, step, only=("net", "loose"))
        found = [*there.parameters(), state["loose"]]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), step


@pytest.mark.usefixtures("_any_tensor")
@pytest.mark.parametrize("stage", ["late", "now"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_every_order_holds(tmp_path: Path, stage: str, in_flight: int) -> None:
    with fake_cuda() as machine, kernels_on(machine):
        train(machine, tmp_path, stage, in_flight)
        gc.collect()
        assert machine.faults == []


@pytest.mark.usefixtures("_any_tensor")
def test_the_optimizer_waits_itself_where_the_writer_has_not_begun(tmp_path: Path) -> None:
    with fake_cuda() as machine, kernels_on(machine):
        train(machine, tmp_path, "late", in_flight=5, held=threading.Event())
        assert machine.faults == []


@pytest.mark.usefixtures("_any_tensor")
def test_the_recorder_sees_an_optimizer_that_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stager, "_order", lambda stager, staging: staging.seal())
    with fake_cuda() as machine, kernels_on(machine):
        train(machine, tmp_path, "late", in_flight=5, held=threading.Event())
        assert any("written" in fault for fault in machine.faults)


@pytest.mark.usefixtures("_any_tensor")
@pytest.mark.parametrize("how", ["wait", "order", "done", "settle"])
def test_parameters_may_be_changed_as_soon_as_they_are_staged(tmp_path: Path, how: str) -> None:
    """Even when the writer is still busy with an earlier save and has not looked at this one."""
    go_on = threading.Event()
    with fake_cuda() as machine:
        net = module_on_device(nn.Linear(3, 5))
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        with ok.Checkpointer(tmp_path, in_flight=2) as ckpt:
            ckpt._writer.submit(lambda: go_on.wait(30))
            save = ckpt.save(1, {"net": net, "opt": opt})
            if how == "done":
                while not save.staged.done():
                    pass
            else:
                getattr(save.staged, how)()
            with torch.no_grad():
                net.weight.mul_(2)
            go_on.set()
            save.wait()
        assert machine.faults == []


@pytest.mark.usefixtures("_any_tensor")
def test_state_leaves_the_device_page_locked_and_without_blocking(tmp_path: Path) -> None:
    with fake_cuda() as machine, kernels_on(machine):
        train(machine, tmp_path, "late")
        assert machine.copies
        assert all(non_blocking for _, non_blocking in machine.copies)
        assert all(nbytes for nbytes, _ in machine.copies)


@pytest.mark.usefixtures("_any_tensor")
def test_a_change_by_hand_under_the_copy_fails_the_save(tmp_path: Path) -> None:
    """Nobody has asked before the writer does: it is told by the ticket that it waits for."""
    go_on = threading.Event()
    with fake_cuda():
        net = module_on_device(nn.Linear(3, 5))
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        with ok.Checkpointer(tmp_path) as ckpt:
            ckpt._writer.submit(lambda: go_on.wait(30))
            save = ckpt.save(1, {"net": net, "opt": opt})
            with torch.no_grad():
                net.weight.mul_(2)
            go_on.set()
            with pytest.raises(CheckpointError, match="changed outside of"):
                save.wait()
