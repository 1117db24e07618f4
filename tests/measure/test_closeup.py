import gc
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from overlapkit.measure import StepMeter, closeup, memory
from overlapkit.measure import meter as module
from overlapkit.measure.record import Microbatch
from tests.cuda_fake import fake_cuda, module_on_device, on_device
from tests.fake_clock import FakeClock


class Block(nn.Module):
    """Takes 3 of a clock's time forward."""

    def __init__(self, clock):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.clock = clock

    def forward(self, x):
        self.clock.host += 3
        return self.inner(x)


class Model(nn.Module):
    def __init__(self, clock, how, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(clock) for _ in range(blocks))
        self.how = how

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.how is None else checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return x.sum()


@pytest.fixture
def clock(monkeypatch):
    fake = FakeClock()
    monkeypatch.setattr(module, "clock_of", lambda device: fake)
    return fake


def run(meter, model, steps, microbatches=1):
    for _ in range(steps):
        with meter.step():
            for _ in range(microbatches):
                model(torch.ones(1, 2, requires_grad=True)).backward()
    return meter.report()


@pytest.mark.parametrize(("how", "recomputed"), [(None, 0), ("reentrant", 9), ("not reentrant", 9)])
def test_forward_that_runs_again_within_backward_is_recomputation(clock, how, recomputed):
    model = Model(clock, how)
    meter = StepMeter(model)
    report = run(meter, model, steps=3, microbatches=2)
    assert [record.recompute for record in report.records] == [2 * recomputed] * 2
    for record in report.records:
        assert (record.forward, record.backward) == (18, 2 * recomputed)
        assert record.microbatches == (Microbatch(9, recomputed),) * 2
    assert report.detail.recompute_ms == 2 * recomputed / 1e6
    assert [one.backward_ms for one in report.detail.passes] == [recomputed / 1e6] * 2


def test_no_hook_stays_on_a_module_and_later_looks_hook_only_what_ran_again(clock):
    model = Model(clock, "not reentrant")
    meter = StepMeter(model)
    run(meter, model, steps=9)
    assert not any(part._forward_pre_hooks for part in model.modules() if part is not model)
    watched = meter._closeup._recompute
    assert watched._found == list(model.blocks)[::-1]
    watched.attach(everywhere=False)
    assert [bool(part._forward_pre_hooks) for part in (*model.blocks, model.blocks[0].inner)] == [
        True
    ] * 3 + [False]
    watched.detach()


def test_a_compiled_model_tells_no_recomputation_nor_arithmetic(clock):
    model = Model(clock, None)
    model.blocks[0]._compiled_call_impl = model.blocks[0]._call_impl  # as Module.compile leaves it
    report = run(StepMeter(model, flops_per_token=None), model, steps=12)
    assert report.detail.recompute_ms is None
    assert "compiled" in report.detail.missing["recompute_ms"]
    assert "flops_per_token=" in report.detail.missing["flops"]


def test_operators_are_counted_in_one_early_step_and_rarely_later(clock, monkeypatch):
    monkeypatch.setattr(closeup, "_RHYTHM", 53)
    counted = []
    begin = closeup.Operators.__enter__
    monkeypatch.setattr(
        closeup.Operators, "__enter__", lambda self: counted.append(meter._index) or begin(self)
    )
    model = Model(clock, None)
    meter = StepMeter(model, every=2)
    run(meter, model, steps=90)
    assert counted == [10, 55]  # the first measured ones at or after 10 and 53
    assert [record.index for record in meter._ledger.records if record.counted] == counted
    assert not any(record.counted for record in meter.report(window=40).records)


def test_a_step_that_fails_while_it_is_counted_leaves_no_mode_behind(clock):
    model = Model(clock, None)
    meter = StepMeter(model)
    run(meter, model, steps=10)
    with pytest.raises(KeyError), meter.step():
        raise KeyError
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert meter._closeup.seen.counted == 0


def test_the_collector_is_a_part_of_its_own(monkeypatch):
    gc.collect()
    model = nn.Linear(2, 2)
    meter = StepMeter(model)
    rubbish = []
    for number in range(3):
        with meter.step():
            out = model(torch.ones(1, 2))
            if number == 1:
                rubbish += [[i] for i in range(100_000)]
                gc.collect()
            out.sum().backward()
    report = meter.report()
    first, second = report.records
    assert 0 < first.garbage <= first.period
    assert first.garbage > second.garbage
    assert report.parts["garbage"].mean_ms > 0
    assert "Python's collector" in report.answers[2].evidence
    assert gc.callbacks
    before = len(gc.callbacks)
    meter.close()
    assert len(gc.callbacks) == before - 1


def test_a_forgotten_meter_leaves_no_callback():
    gc.collect()
    before = len(gc.callbacks)
    meter = StepMeter(nn.Linear(2, 2))
    alive = weakref.ref(meter)
    assert len(gc.callbacks) == before + 1
    del meter
    gc.collect()
    assert alive() is None
    assert len(gc.callbacks) == before


def test_compilations_are_counted_named_and_cut_out():
    import torch._dynamo

    torch._dynamo.reset()

    @torch.compile(backend="eager", dynamic=False)
    def doubled(x):
        return x * 2

    meter = StepMeter()
    for size in (1, 1, 3, 3, 4, 4):
        with meter.step():
            doubled(torch.ones(size + 1))
    report = meter.report()
    assert [record.compiled for record in report.records] == [0, 1, 0, 1, 0]
    assert [bool(record.compilation) for record in report.records] == [False, True, False, True, False]
    for record in report.records:
        assert record.compilation + record.other + record.garbage == record.period
    assert sorted(one.steps for one in report.detail.compilations) == [(2,), (4,)]
    for one in report.detail.compilations:
        assert one.name == "doubled"
        assert one.where.startswith(__file__)
        assert one.reason is not None
    (finding,) = [one for one in report.findings if one.lane == "compilation"]
    assert "doubled" in finding.setting
    assert finding.gain_ms == pytest.approx(report.parts["compilation"].mean_ms)
    meter.close()
    assert not sys.modules["torch._dynamo.callback"].callback_handler.end_callbacks
    torch._dynamo.reset()


def test_dynamos_reset_does_not_make_the_meter_blind():
    import torch._dynamo

    meter = StepMeter()
    for _ in range(3):
        torch._dynamo.reset()
        with meter.step():
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert [record.compiled for record in meter.report().records] == [1, 1]
    meter.close()
    torch._dynamo.reset()


def test_the_meter_itself_never_waits_for_a_device():
    with fake_cuda() as machine:
        model = module_on_device(nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        meter = StepMeter(model, optimizer)
        x = on_device(torch.ones(1, 2))
        waits = []
        for _ in range(40):
            before = machine.syncs
            with meter.step(tokens=1):
                model(x).sum().backward()
                optimizer.step()
            waits.append(machine.syncs - before)
        assert meter._closeup.seen.counted == 1
        for _ in range(2000):  # each event answers late
            last = meter.last
        assert last.index == 39
        report = meter.report()
        assert report.detail.flops == 2 * 2 * 2 * 2  # forward and the weight's gradient; x needs none
        assert report.detail.mfu == pytest.approx(16 / 19.5e12 * 1e3 / report.period_ms)
        assert report.detail.syncs == ()
        assert [one.component for one in report.findings if one.lane == "compute"] == [
            "torch.set_float32_matmul_precision"
        ]
        meter.close()
        assert sum(waits) == 0
        assert machine.faults == []
        assert machine.syncs == 0


def test_recomputed_blocks_do_not_multiply_the_readings_of_memory(clock, monkeypatch):
    readings = []
    monkeypatch.setattr(memory, "peak_memory", lambda device: readings.append(1) or 1000)
    monkeypatch.setattr(memory, "reset_peak", lambda device: True)
    model = Model(clock, "reentrant", blocks=20)
    run(StepMeter(model), model, steps=4)
    assert len(readings) <= 1 + 4 * 6  # each phase, not each block
