"""Each component under the recorder, as a seed draws it: what the loop does, and how its threads take turns.

Values are compared with what a plain loop has; the recorder says whether each use comes after its write, and
each reuse after its last use. A seed that fails is run again with `-k`.
"""

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overlapkit as ok
from overlapkit.checkpoint import layout
from tests.cuda_fake import FakeCuda, fake_cuda, module_on_device, on_device
from tests.optim.on_fake import kernels_on

SEEDS = range(6)


@pytest.fixture(autouse=True)
def _any_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "check_tensor", lambda path, tensor: None)  # the fake's are a subclass


@pytest.fixture(params=SEEDS)
def machine(request: pytest.FixtureRequest) -> Iterator[FakeCuda]:
    with fake_cuda(request.param) as made, kernels_on(made):
        yield made
        gc.collect()
        torch.cuda.synchronize()
        assert made.faults == []


@pytest.fixture
def draw(machine: FakeCuda) -> random.Random:
    return random.Random(machine.seed)


class Batches:
    """Batch k is full of k; made in the loader's own memory where it lends some."""

    def __init__(self, n: int, lent: bool) -> None:
        self.n = n
        if not lent:
            self.iter_into = None  # type: ignore[assignment]  # an ordinary source

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Any]:
        return self._made(lambda shape, dtype: torch.empty(shape, dtype=dtype))

    def iter_into(self, empty: Any) -> Iterator[Any]:
        return self._made(empty)

    def _made(self, empty: Any) -> Iterator[Any]:
        for k in range(self.n):
            yield {
                "x": empty((4, 3), torch.float32).fill_(k),
                "y": (torch.full((5,), k), str(k)),
                "grad": torch.full((2,), float(k), requires_grad=k % 2 == 1),
            }


def double(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "x": batch["x"] * 2}


@pytest.mark.parametrize("fixed", [False, True], ids=["fresh", "fixed"])
def test_the_loader_and_whoever_reads_its_batches(
    machine: FakeCuda, draw: random.Random, fixed: bool
) -> None:
    factor = draw.choice((1, 2))
    source = Batches(draw.randrange(1, 9), draw.choice((True, False)))
    if fixed:  # which takes plain tensors only
        source = [torch.full((4, 3), float(k)) for k in range(source.n)]  # type: ignore[assignment]
    options = {"transform": double if factor == 2 and not fixed else None, "reuse_buffers": fixed}
    loader = ok.DeviceLoader(source, "cuda", depth=draw.randrange(1, 5), pin=draw.random() < 0.7, **options)
    streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(draw.randrange(3)))]
    for _ in range(draw.randrange(1, 4)):
        reading, stop = iter(loader), draw.randrange(12)
        for k in range(len(source)):
            with torch.cuda.stream(draw.choice(streams)):  # an epoch, and a batch, each where it likes
                batch = next(reading)
                x = batch if fixed else batch["x"]
                assert x.sum().raw.item() == 12 * k * (1 if fixed else factor)
                if not fixed:
                    assert (batch["y"][0].sum().raw.item(), batch["y"][1]) == (5 * k, str(k))
                    assert batch["grad"].detach().sum().raw.item() == 2 * k
                if draw.random() < 0.5:
                    del x, batch
            if k == stop:
                break
        del reading
    loader.close()


def test_the_checkpointer_and_an_optimizer_that_goes_on(
    machine: FakeCuda, draw: random.Random, tmp_path: Path
) -> None:
    torch.manual_seed(machine.seed or 0)
    net = module_on_device(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))
    adamw = draw.random() < 0.5
    opt = ok.AdamW(net.parameters(), max_norm=1.0) if adamw else torch.optim.SGD(net.parameters(), lr=0.1)
    loose, saved = on_device(torch.zeros(7)), {}
    stage, in_flight = draw.choice(("late", "late", "now")), draw.randrange(1, 4)
    state = {"net": net, "opt": opt, "loose": loose}
    with ok.Checkpointer(tmp_path, stage=stage, in_flight=in_flight) as ckpt:
        if draw.random() < 0.5:
            ckpt._saver.prewarm(state, beside=draw.random() < 0.5)
        for step in range(draw.randrange(2, 8)):
            net(on_device(torch.randn(4, 3))).sum().backward()
            opt.step()
            opt.zero_grad(set_to_none=draw.random() < 0.5)
            with torch.no_grad():
                loose.add_(1)
            if draw.random() < 0.7:
                saved[step] = [t.detach().raw.clone() for t in (*net.state_dict().values(), loose)]
                save = ckpt.save(step, state)
                if draw.random() < 0.3:
                    getattr(save.staged, draw.choice(("wait", "order")))()
                    with torch.no_grad():
                        net[0].weight.mul_(2)  # by hand, as soon as that is allowed
            if draw.random() < 0.2:
                ckpt.wait()
    for step, wanted in saved.items():
        there = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        back = {"net": there, "loose": torch.zeros(7)}
        with ok.Checkpointer(tmp_path) as ckpt:
            ckpt.restore(back, step, only=("net", "loose"))
        found = [*there.state_dict().values(), back["loose"]]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), step


def test_the_optimizer_s_table_while_everything_in_it_changes(machine: FakeCuda, draw: random.Random) -> None:
    """The truth is the same optimizer on the CPU: gradients come and go, numbers and states are replaced."""
    torch.manual_seed(0)
    shapes = [(3, 4), (5,), (1,), (2, 2, 2)]
    here = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    there = [nn.Parameter(on_device(p.detach().clone())) for p in here]
    mine = {"a": torch.tensor(1e-2), "b": on_device(torch.tensor(1e-2))}  # written to between steps
    lr = draw.random() < 0.5
    options: dict[str, Any] = {"amsgrad": draw.random() < 0.5, "max_norm": draw.choice((None, 0.5))}
    opts = [
        ok.AdamW([{"params": params[:2]}, {"params": params[2:]}], lr=rate if lr else 1e-2, **options)
        for params, rate in ((here, mine["a"]), (there, mine["b"]))
    ]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    last = streams[0]
    for _ in range(draw.randrange(3, 8)):
        stream = draw.choice(streams)
        if stream is not last:
            stream.wait_stream(last)  # the loop's own duty, as with any optimizer
        last = stream
        with torch.cuda.stream(stream), torch.no_grad():
            machine.dawdle()
            for p, q in zip(here, there, strict=True):
                p.grad = torch.randn(p.shape) if draw.random() < 0.8 else None
                q.grad = None if p.grad is None else on_device(p.grad.clone())
                if q.grad is not None:
                    q.grad.record_stream(streams[0])
                    q.grad.record_stream(streams[1])
            event = draw.randrange(4)
            if event == 0 and lr:
                for rate in mine.values():
                    rate.mul_(0.5)
            if event == 1:
                for opt in opts:
                    opt.param_groups[1]["weight_decay"] = 0.3
            if event == 2:
                for opt in opts:
                    opt.load_state_dict(opt.state_dict())
            before = machine.syncs
            for opt in opts:
                opt.step()
            assert machine.syncs == before
    torch.cuda.synchronize()
    for p, q in zip(here, there, strict=True):
        torch.testing.assert_close(q.detach().raw, p.detach(), rtol=1e-5, atol=1e-6)


def test_the_meter_s_clock_memory_and_logged_values(machine: FakeCuda, draw: random.Random) -> None:
    """A value is what it was when it was logged; the calls come in order; no step waits for the device."""
    model = module_on_device(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    told: list[tuple[int, dict[str, float]]] = []
    meter = ok.StepMeter(model, optimizer, on_log=[lambda step, values: told.append((step, dict(values)))])
    wanted: list[tuple[int, dict[str, float]]] = []
    x, steps = on_device(torch.ones(1, 2)), draw.randrange(3, 30)
    for step in range(steps):
        before = machine.syncs
        with meter.step(tokens=1):
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            if draw.random() < 0.7:
                value = loss.detach()
                wanted.append((step, {"loss": value.raw.item(), "step": float(step)}))
                meter.log(loss=value, step=step)
                value.add_(1)
                del value
            del loss
        if draw.random() < 0.2:
            with meter.pause():
                model(x)
        if draw.random() < 0.1:
            meter.report()
        assert machine.syncs == before
    while meter.last is None or meter.last.index < steps - 1:
        pass
    times = [record.period for record in meter._ledger]
    meter.close()
    assert len(times) == steps
    assert all(time >= 0 for time in times)
    assert told == wanted


def test_a_whole_loop(machine: FakeCuda, draw: random.Random, tmp_path: Path) -> None:
    """Loader, model, optimizer, checkpointer and meter; the truth is the same loop on plain tensors."""
    torch.manual_seed(0)
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(draw.randrange(2, 9))]
    here = nn.Linear(3, 1)
    there = module_on_device(nn.Linear(3, 1))
    with torch.no_grad():
        for p, q in zip(here.parameters(), there.parameters(), strict=True):
            q.copy_(p)
    loader = ok.DeviceLoader(data, "cuda", depth=draw.randrange(1, 4), reuse_buffers=draw.random() < 0.3)
    plain, opt = ok.AdamW(here.parameters()), ok.AdamW(there.parameters())
    ckpt = ok.Checkpointer(tmp_path, every=draw.randrange(1, 4), in_flight=draw.randrange(1, 3))
    meter = ok.StepMeter(model=there, optimizer=opt, loader=loader, checkpointer=ckpt)
    state = {"model": there, "optimizer": opt, "loader": loader}
    stop = draw.randrange(1, 12)
    for step, (x, y) in enumerate(loader, start=1):
        with meter.step():
            (there(x) - y).square().mean().backward()
            opt.step()
            opt.zero_grad(set_to_none=True)
        (here(data[step - 1][0]) - data[step - 1][1]).square().mean().backward()
        plain.step()
        plain.zero_grad(set_to_none=True)
        ckpt.save(step, state)
        if step == stop:
            break
    loader.close()
    ckpt.close()
    meter.close()
    for p, q in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(q.detach().raw, p.detach(), rtol=1e-5, atol=1e-6)
