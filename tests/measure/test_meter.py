import gc
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from overlapkit.measure import StepMeter, StepRecord, stepping
from overlapkit.measure import meter as module
from overlapkit.measure.summary import PARTS
from overlapkit.span import Span, SpanLog
from tests.fake_clock import FakeClock, FakeComponent
from tests.on_gpu import assert_flat, no_waits, spin

MS = 1_000_000


class Slow(nn.Module):
    """Takes `forward` and `backward` of a clock's time; returns its loss, or logits of two."""

    def __init__(self, clock, forward=10, backward=20, logits=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.clock, self.times, self.logits = clock, (forward, backward), logits

    def forward(self, x):
        spend(self.clock, self.times[0])
        y = Work.apply(self.weight * x, self.clock, self.times[1])
        return y if self.logits else y.sum()


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, duration):
        ctx.spent = clock, duration
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        spend(*ctx.spent)
        return gradient, None, None


class SlowSGD(torch.optim.SGD):
    def __init__(self, clock, params, duration=7):
        super().__init__(params, lr=0.1)
        self.clock, self.duration = clock, duration

    def step(self, closure=None):
        spend(self.clock, self.duration)
        return super().step(closure)


def spend(clock, duration):
    if clock.on_device:
        clock.queue(duration)
        clock.host += 1
    else:
        clock.host += duration


@pytest.fixture
def clock(monkeypatch):
    fake = FakeClock()
    monkeypatch.setattr(module, "clock_of", lambda device: fake)
    return fake


def train(meter, model, optimizer, x=None):
    with meter.step():
        model(torch.ones(2) if x is None else x).sum().backward()
        optimizer.step()


def records_of(meter):
    meter.report()  # steps are recorded by the eight, or when somebody asks
    return list(meter._ledger.records)


def is_whole(record):
    return sum(getattr(record, part) or 0 for part in PARTS) == record.period


def test_one_step_to_the_nanosecond(clock):
    loader, checkpointer = FakeComponent(clock), FakeComponent(clock)
    model = Slow(clock)
    communication = FakeComponent(clock)
    model.__dict__["timings"] = communication.timings
    optimizer = SlowSGD(clock, model.parameters())
    meter = StepMeter(model, optimizer, loader, checkpointer)
    train(meter, model, optimizer)
    first = meter.last
    checkpointer.wait("checkpoint", 11)
    clock.host += 3  # between the steps
    loader.wait("input", 5)
    loader.wait("transfer", 2, bytes=64)
    loader.publish(Span("input", "make", clock.host - 9, clock.host, bytes=100))
    with meter.step(tokens=8):
        clock.host += 1
        loss = model(torch.ones(2))
        clock.host += 4  # not compute: the model made its loss itself
        loss.backward()
        communication.wait("communication", 6)  # beside gradients, before the optimizer
        optimizer.step()
        clock.host += 2
    assert (first.index, first.period, first.input, first.other) == (0, 37, 0, 0)
    assert meter.last == StepRecord(
        index=1,
        period=71,
        forward=10,
        backward=20,
        optimizer=7,
        transfer=2,
        communication=6,
        checkpoint=11,
        input=5,
        other=10,
        outside=3,
        lane_bytes={"transfer": 64, "input": 100},
        peak_memory=meter.last.peak_memory,
        tokens=8,
        compilation=0,
        garbage=0,
        recompute=0,
        microbatches=((10, 20),),
    )
    assert is_whole(meter.last)
    assert meter.last.exposed == 24


def test_a_loss_outside_of_the_model_is_part_of_the_forward(clock):
    model = Slow(clock, logits=True)
    optimizer = SlowSGD(clock, model.parameters())
    meter = StepMeter(model, optimizer)
    with meter.step():
        logits = model(torch.ones(2))
        clock.host += 9
        logits.sum().backward()
        optimizer.step()
    assert (meter.last.forward, meter.last.backward, meter.last.other) == (19, 20, 0)


def test_accumulation_and_an_optimizer_that_steps_often_or_never(clock):
    model = Slow(clock)
    optimizer = SlowSGD(clock, model.parameters())
    meter = StepMeter(model, optimizer)
    with meter.step():
        for _ in range(3):
            model(torch.ones(2)).backward()
            clock.host += 1
    assert (meter.last.forward, meter.last.backward, meter.last.optimizer) == (30, 63, 0)
    with meter.step():
        model(torch.ones(2)).backward()
        for _ in range(3):
            optimizer.step()
    assert (meter.last.backward, meter.last.optimizer, meter.last.other) == (20, 21, 0)


def test_pauses_are_cut_out_inside_a_step_and_between_two(clock):
    model = Slow(clock)
    optimizer = SlowSGD(clock, model.parameters())
    loader = FakeComponent(clock)
    meter = StepMeter(model, optimizer, loader)
    with meter.pause():  # before there is anything to pause
        clock.host += 100
    train(meter, model, optimizer)
    with meter.pause(), torch.no_grad(), meter.pause():
        model(torch.ones(2))
        loader.wait("input", 50)
    with meter.step():
        model(torch.ones(2)).backward()
        with meter.pause(), torch.no_grad():
            model(torch.ones(2))
        optimizer.step()
    assert (meter.last.period, meter.last.forward, meter.last.input) == (37, 10, 0)
    assert is_whole(meter.last)


def test_a_pause_may_outlast_the_step_in_which_it_began(clock):
    model = Slow(clock)
    meter = StepMeter(model)
    pause = meter.pause()
    with meter.step():
        model(torch.ones(2)).backward()
        pause.__enter__()
        clock.host += 50
    clock.host += 1000
    pause.__exit__(None, None, None)
    clock.host += 3
    with meter.step():
        model(torch.ones(2)).backward()
    assert [(r.period, r.outside) for r in records_of(meter)] == [(30, 0), (33, 3)]


def test_a_pause_left_by_an_exception_ends(clock):
    meter = StepMeter()
    with pytest.raises(KeyError), meter.pause():
        raise KeyError
    with meter.step():
        clock.host += 3
    assert meter.last.period == 3


def test_a_step_left_by_an_exception_is_not_recorded_and_the_exception_passes(clock):
    model = Slow(clock)
    optimizer = SlowSGD(clock, model.parameters())
    meter = StepMeter(model, optimizer)
    train(meter, model, optimizer)
    error = ValueError("mine")

    def fails():
        with meter.step():
            model(torch.ones(2))
            raise error

    with pytest.raises(ValueError, match="mine") as caught:
        fails()
    assert caught.value is error
    clock.host += 5
    train(meter, model, optimizer)
    assert (meter.last.index, meter.last.period, meter.last.outside) == (1, 42, 5)
    assert meter.report().steps == 1  # step 0 left out


def test_an_exception_in_the_model_leaves_the_next_step_right(clock):
    model = Slow(clock)
    optimizer = SlowSGD(clock, model.parameters())
    meter = StepMeter(model, optimizer)
    with pytest.raises(RuntimeError), meter.step():
        model(torch.ones(3))
    train(meter, model, optimizer)
    assert (meter.last.index, meter.last.forward, meter.last.backward) == (0, 10, 20)


def test_steps_do_not_nest(clock):
    meter = StepMeter()
    with meter.step():
        with pytest.raises(RuntimeError, match="do not nest"), meter.step():
            pass
        clock.host += 2
    assert meter.last.period == 2


def test_another_thread_may_step_but_not_at_the_same_time(clock):
    meter, errors = StepMeter(), []

    def step():
        try:
            with meter.step():
                clock.host += 4
        except RuntimeError as error:
            errors.append(str(error))

    def in_thread():
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()

    with meter.step():
        in_thread()
    assert len(errors) == 1
    assert "need a StepMeter each" in errors[0]
    in_thread()
    assert (meter.last.index, meter.last.period) == (1, 4)


def test_a_step_in_a_pause_or_after_close_is_an_error():
    meter = StepMeter()
    with meter.pause(), pytest.raises(RuntimeError, match="leave the pause first"), meter.step():
        pass
    meter.close()
    meter.close()
    with pytest.raises(RuntimeError, match="after meter.close"), meter.step():
        pass


def test_only_every_nth_step_is_measured_with_its_own_period(clock):
    model = Slow(clock)
    optimizer = SlowSGD(clock, model.parameters())
    loader = FakeComponent(clock)
    meter = StepMeter(model, optimizer, loader, every=3)
    for number in range(7):
        loader.wait("input", number)
        train(meter, model, optimizer)
        clock.host += 1
    records = records_of(meter)
    assert [r.index for r in records] == [0, 4, 6]
    assert [(r.period, r.input) for r in records] == [(37, 0), (42, 4), (44, 6)]
    assert all(is_whole(record) for record in records)


def test_what_happens_every_nth_step_is_measured_as_often_as_it_happens(clock):
    checkpointer = FakeComponent(clock)
    meter = StepMeter(checkpointer=checkpointer, every=10)
    for number in range(4000):
        if number % 100 == 0:
            start = clock.host
            clock.host += 50
            checkpointer.publish(Span("checkpoint", "save", start, clock.host, exposed=True))
        with meter.step():
            clock.host += 5
    report = meter.report(window=1000)
    assert report.steps > 390
    assert report.detail.checkpoint.interval == pytest.approx(100, rel=0.4)
    assert report.parts["checkpoint"].mean_ms * 1e6 == pytest.approx(0.5, rel=0.4)


def test_nothing_is_lost_of_a_model_that_publishes_thousands_of_spans_a_step(clock):
    model = Slow(clock)
    log = SpanLog()
    model.__dict__["timings"] = log.take
    meter = StepMeter(model)
    for _ in range(12):
        with meter.step():
            for _ in range(3000):
                clock.host += 2
                log.add(Span("communication", "wait all_gather a", clock.host - 1, clock.host, exposed=True))
    assert {record.communication for record in records_of(meter)} == {3000}


def test_two_meters_see_the_same(clock):
    model, loader = Slow(clock), FakeComponent(clock)
    optimizer = SlowSGD(clock, model.parameters())
    first, second = StepMeter(model, optimizer, loader), StepMeter(model, optimizer, loader)
    for _ in range(3):
        loader.wait("input", 5)
        with first.step(), second.step():
            loss = model(torch.ones(2))
            loss.backward()
            optimizer.step()
    seen = replace(second.last, peak_memory=first.last.peak_memory)  # the process's: it may grow in between
    assert first.last == seen
    assert (first.last.input, first.last.forward) == (5, 10)


def test_steps_measures_any_loader_itself():
    def batches():
        for number in range(4):
            time.sleep(0.01)
            yield number

    meter = StepMeter()
    seen = list(meter.steps(batches(), tokens=3))
    assert seen == [0, 1, 2, 3]
    records = records_of(meter)
    assert [r.index for r in records] == [0, 1, 2, 3]
    assert records[0].input == 0  # the period begins with the first step
    assert all(r.input >= 10 * MS for r in records[1:])
    assert all(is_whole(r) and r.tokens == 3 for r in records)


def test_what_an_epoch_takes_to_begin_and_to_end_is_waiting_for_input(clock, monkeypatch):
    monkeypatch.setattr(stepping.time, "perf_counter_ns", clock.now)

    class Loader:
        def __iter__(self):
            clock.host += 100
            yield from range(2)
            clock.host += 30

    meter, loader = StepMeter(), Loader()
    for _ in range(2):
        for _ in meter.steps(loader):
            clock.host += 5
    assert [(r.period, r.input, r.other) for r in records_of(meter)] == [
        (5, 0, 5),
        (5, 0, 5),
        (135, 130, 5),
        (5, 0, 5),
    ]
    with meter.step():
        clock.host += 5
    assert (meter.last.period, meter.last.input, meter.last.other) == (35, None, 35)


def test_a_break_or_an_error_in_the_loop_ends_the_step():
    meter = StepMeter()
    for number in meter.steps(range(10)):
        if number == 2:
            break
    assert meter.last.index == 1

    def fails():
        for _ in meter.steps(range(10)):
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert list(meter.steps([5])) == [5]
    assert meter.last.index == 2


def test_an_error_of_the_loader_passes():
    def broken():
        yield 1
        raise OSError("disk")

    meter = StepMeter()
    with pytest.raises(OSError, match="disk"):
        list(meter.steps(broken()))
    assert list(meter.steps([])) == []


def test_a_device_that_lags_is_never_waited_for(monkeypatch):
    clock = FakeClock(on_device=True)
    monkeypatch.setattr(module, "clock_of", lambda device: clock)
    model, loader = Slow(clock, forward=100, backward=200), FakeComponent(clock)
    optimizer = SlowSGD(clock, model.parameters(), duration=50)
    meter = StepMeter(model, optimizer, loader)
    clock.seen = 0
    for _ in range(4):
        loader.wait("input", 30)  # hidden: the device has work for longer
        train(meter, model, optimizer)
    assert meter.last is None
    clock.seen = 10**9
    records = records_of(meter)
    assert [r.index for r in records] == [0, 1, 2, 3]
    for record in records[1:]:
        assert (record.forward, record.backward, record.optimizer) == (100, 200, 50)
        assert (record.period, record.input, record.other) == (350, 0, 0)


def test_a_device_that_waits_for_the_host_shows_the_wait(monkeypatch):
    clock = FakeClock(on_device=True)
    monkeypatch.setattr(module, "clock_of", lambda device: clock)
    model, loader = Slow(clock, forward=100, backward=200), FakeComponent(clock)
    optimizer = SlowSGD(clock, model.parameters(), duration=50)
    meter = StepMeter(model, optimizer, loader)
    for _ in range(3):
        loader.wait("input", 400)  # the host is 3 ns into the device's 350 when it begins to wait
        train(meter, model, optimizer)
    assert (meter.last.period, meter.last.input) == (403, 53)
    assert (meter.last.forward, meter.last.backward, meter.last.optimizer) == (100, 200, 50)
    assert is_whole(meter.last)


def test_a_span_that_ends_in_a_later_step_counts_its_bytes_there(clock):
    checkpointer = FakeComponent(clock)
    meter = StepMeter(checkpointer=checkpointer)
    with meter.step():
        clock.host += 10
    start = clock.host
    with meter.step():
        clock.host += 10
        checkpointer.publish(Span("checkpoint", "write", start + 5, start + 15, bytes=7))  # known early
    with meter.step():
        clock.host += 10
    assert [r.lane_bytes for r in records_of(meter)] == [{}, {}, {"checkpoint": 7}]


def test_reports_are_handed_out_after_each_hundred_steps():
    reports = []
    meter = StepMeter(on_report=[reports.append])
    for _ in range(250):
        with meter.step():
            pass
    assert [(r.first_step, r.last_step) for r in reports] == [(1, 99), (100, 199)]


def test_steps_that_nobody_reads_do_not_fill_memory(clock):
    loader = FakeComponent(clock)
    meter = StepMeter(loader=loader, history=20)
    for _ in range(300):
        loader.wait("input", 3)
        with meter.step():
            clock.host += 5
    kept = [spans for _, spans in meter._ledger._aside]
    assert sum(len(over) for over, _ in meter._ledger._aside) <= 30
    assert sum(map(len, kept)) <= 30
    records = records_of(meter)
    assert [record.index for record in records] == list(range(280, 300))
    assert {(record.period, record.input) for record in records} == {(8, 3)}


def test_steps_end_while_another_thread_reads_the_records():
    """The comparison of ranks reads beside the loop: both take steps from the same end."""
    meter = StepMeter(history=2)
    ledger = meter._ledger
    reading, over = threading.Event(), threading.Event()

    class Read(type(ledger._aside)):
        """A reader that has begun takes the steps at the worst moment: when the loop has counted them."""

        def __iter__(self):
            yield from list(super().__iter__())
            if reading.is_set():
                self.clear()

    def read():
        with ledger.lock:
            reading.set()
            over.wait(30)

    ledger._aside = Read()
    reader = threading.Thread(target=read)
    reader.start()
    assert reading.wait(30)
    for _ in range(300):
        with meter.step():
            pass
    reading.clear()
    assert sum(len(steps) for steps, _ in ledger._aside) > 200  # they are the reader's to take
    over.set()
    reader.join()
    assert [record.index for record in records_of(meter)] == [298, 299]
    meter.close()


def test_history_bounds_what_is_kept():
    meter = StepMeter(history=5)
    for _ in range(9):
        with meter.step():
            pass
    report = meter.report(window=1000)
    assert (report.steps, report.first_step, report.last_step) == (5, 4, 8)
    assert meter.report(window=2).steps == 2


def test_close_and_collection_leave_nothing_on_the_model():
    model, loader = nn.Linear(2, 2), FakeComponent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = StepMeter(model, optimizer, loader)
    meter.close()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert meter.report().steps == 0
    forgotten = StepMeter(model, optimizer, loader)
    alive = weakref.ref(forgotten)
    del forgotten
    gc.collect()
    assert alive() is None
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_numbers_and_gradients_are_those_of_an_unmeasured_run():
    def run(measured):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        meter = StepMeter(model if measured else None, optimizer if measured else None)
        for x in meter.steps([torch.randn(3, 4) for _ in range(5)]):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    for ours, plain in zip(run(True), run(False), strict=True):
        assert torch.equal(ours, plain)


def test_planted_delays_are_found_in_a_real_loop():
    class Sleepy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 1)

        def forward(self, x):
            time.sleep(0.004)
            return self.inner(x).sum()

    model = Sleepy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: time.sleep(0))  # somebody else's hook beside ours
    loader, checkpointer = RealComponent(), RealComponent()
    meter = StepMeter(model, optimizer, loader, checkpointer)
    slept = {"input": 0, "checkpoint": 0}
    for number in range(6):
        slept["input"] += loader.sleep("input", 0.01) if number else 0
        train(meter, model, optimizer, torch.ones(1, 2))
        slept["checkpoint"] += checkpointer.sleep("checkpoint", 0.006) if number < 5 else 0
    records = records_of(meter)
    assert sum(r.input for r in records) == slept["input"]
    assert sum(r.checkpoint for r in records) == slept["checkpoint"]
    assert all(r.forward >= 4 * MS and is_whole(r) for r in records)
    assert {"input", "checkpoint"} <= {finding.lane for finding in meter.report().findings}


class RealComponent(FakeComponent):
    def sleep(self, lane, seconds):
        start = time.perf_counter_ns()
        time.sleep(seconds)
        end = time.perf_counter_ns()
        self.publish(Span(lane, "wait", start, end, exposed=True))
        return end - start


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"model": nn.ReLU()}, ValueError, "model=ReLU has no parameters"),
        ({"model": 3}, TypeError, "model=int: give a torch.nn.Module"),
        ({"optimizer": nn.Linear(1, 1)}, TypeError, "optimizer=Linear: give a torch.optim.Optimizer"),
        ({"loader": 3}, TypeError, "loader=int: give an iterable"),
        ({"checkpointer": "runs/a"}, TypeError, r"checkpointer=str has no timings\(\)"),
        ({"every": 0}, ValueError, "every=0: give an int of at least 1"),
        ({"every": True}, TypeError, "every=True: give an int"),
        ({"every": 1.5}, TypeError, "every=1.5: give an int"),
        ({"history": -1}, ValueError, "history=-1"),
        ({"history": True}, TypeError, "history=True"),
        ({"trace_every": 1}, ValueError, "trace_every=1: a step that is traced is not measured"),
        ({"trace_every": 2.5}, TypeError, "trace_every=2.5: give an int of at least 2"),
        ({"trace_folder": "a"}, ValueError, "trace_folder='a' without trace_every"),
        ({"trace_every": 9, "trace_folder": 3}, TypeError, "trace_folder=3: give the name of a folder"),
        ({"on_log": [1]}, TypeError, "on_log="),
        ({"progress": "yes"}, TypeError, "progress='yes': give a bool or an overlapkit.measure.ProgressLine"),
        ({"hang_timeout": "5"}, TypeError, "hang_timeout='5': give seconds"),
        ({"hang_timeout": True}, TypeError, "hang_timeout=True: give seconds"),
        ({"hang_timeout": 0}, ValueError, "hang_timeout=0: give seconds above 0"),
        ({"hang_timeout": float("nan")}, ValueError, "hang_timeout=nan: give seconds above 0"),
        ({"hang_timeout": 5, "on_hang": "stop"}, ValueError, "on_hang='stop': give 'exit', 'wait'"),
        ({"on_hang": "wait"}, ValueError, "on_hang='wait' without hang_timeout"),
        ({"on_report": print}, TypeError, "on_report="),
        ({"on_report": [1]}, TypeError, "on_report="),
    ],
)
def test_mistakes_are_errors_at_construction(given, error, message):
    with pytest.raises(error, match=message):
        StepMeter(**given)


@pytest.mark.parametrize("groups", [([], [nn.Parameter(torch.ones(1))]), ([],)])
def test_an_optimizer_may_have_groups_without_parameters(groups):
    meter = StepMeter(optimizer=torch.optim.SGD([{"params": group} for group in groups], lr=0.1))
    with meter.step():
        pass
    assert meter.report().device == "cpu"


def test_a_launched_rank_without_its_group_is_an_error_at_construction(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="no process group"):
        StepMeter()


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (torch.tensor(3), TypeError),
        (1.5, TypeError),
        (True, TypeError),
        (0, ValueError),
        (-4, ValueError),
    ],
)
def test_tokens_are_a_positive_int(tokens, error):
    with pytest.raises(error, match="tokens="):
        StepMeter().step(tokens)
    with pytest.raises(error, match="tokens="):
        StepMeter().steps([1], tokens=tokens)  # at the call, not at the first batch


def test_steps_of_something_that_is_not_iterable_are_an_error_at_the_call():
    with pytest.raises(TypeError, match="loader=5: give an iterable of batches"):
        StepMeter().steps(5)


@pytest.mark.parametrize(
    ("window", "error"), [(0, ValueError), ("x", TypeError), (1.5, TypeError), (True, TypeError)]
)
def test_a_report_needs_a_window(window, error):
    with pytest.raises(error, match=f"window={window!r}: give an int of at least 1"):
        StepMeter().report(window=window)


@pytest.mark.gpu
def test_on_a_gpu_nothing_synchronises_and_the_phases_are_the_devices():
    device = torch.device("cuda", torch.cuda.current_device())
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    meter = StepMeter(model, optimizer)
    x = torch.randn(512, 1024, device=device)
    with no_waits():
        for _ in range(10):
            with meter.step():
                spin()  # the host is far ahead: none of this is input or idle time
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    torch.cuda.synchronize(device)
    report = meter.report()
    assert report.device == str(device)
    assert report.steps == 9
    assert all(is_whole(record) and record.forward > 0 and record.backward > 0 for record in report.records)
    assert report.peak_memory > 8 * 1024 * 1024 * 4


@pytest.mark.gpu
def test_on_a_gpu_memory_is_flat():
    model = nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    meter = StepMeter(model, optimizer, history=50)
    x = torch.randn(64, 256, device="cuda")

    def step():
        with meter.step():
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            meter.log(loss=loss)

    assert_flat(step)
    meter.close()
