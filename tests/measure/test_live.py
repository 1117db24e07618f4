"""What is told while training goes on: listeners that fail, the progress line, TensorBoard."""

import gc
import io
import sys
import weakref
from types import SimpleNamespace

import pytest
from rich.console import Console
from torch import nn

from overlapkit.measure import StepMeter, TensorBoardWriter
from overlapkit.measure import meter as module
from overlapkit.measure.progress import ProgressLine, progress_line
from tests.fake_clock import FakeClock, FakeComponent

MS = 1_000_000


def test_a_listener_that_fails_is_warned_of_once_and_the_others_are_told():
    told = []

    def full(step, values):
        raise OSError("disk full")

    meter = StepMeter(on_log=[full, lambda step, values: told.append(step)])
    failed = r"on_log: .*full.* raised OSError: disk full; training goes on"
    with pytest.warns(RuntimeWarning, match=failed), meter.step():
        meter.log(loss=1)
    with meter.step():  # a second warning would be an error
        meter.log(loss=2)
    assert told == [0, 1]


def test_a_report_listener_that_fails(monkeypatch):
    monkeypatch.setattr(module, "_WINDOW", 2)
    told = []
    meter = StepMeter(on_report=[lambda report: 1 / 0, lambda report: told.append(report.last_step)])
    with meter.step():
        pass
    with pytest.warns(RuntimeWarning, match="on_report: .* raised ZeroDivisionError"), meter.step():
        pass
    for _ in range(2):
        with meter.step():
            pass
    assert told == [1, 3]


def test_an_interrupt_of_a_listener_is_no_failure():
    def interrupt(step, values):
        raise KeyboardInterrupt

    meter = StepMeter(on_log=[interrupt])
    meter.log(loss=1)
    with pytest.raises(KeyboardInterrupt), meter.step():
        pass


def test_a_meter_with_listeners_is_collected():
    meter = StepMeter(nn.Linear(1, 1), on_log=[print], on_report=[print], progress=True)
    gone = weakref.ref(meter)
    del meter
    gc.collect()
    assert gone() is None


class Line:
    """A progress line on a clock that is wound by hand."""

    def __init__(self, *, terminal, width=200, **options):
        self.now = 100.0
        self.out = io.StringIO()
        console = Console(file=self.out, force_terminal=terminal, width=width, color_system=None)
        self.line = ProgressLine(console=console, clock=lambda: self.now, **options)
        self.records = []

    def step(self, done, after=0.0, **latest):
        self.now += after
        self.line.step(done, self.records, latest)

    def lines(self):
        return self.out.getvalue().splitlines()


def record(tokens=None, period=10 * MS, exposed=None):
    return SimpleNamespace(tokens=tokens, period=period, exposed=exposed)


def test_plain_lines_come_every_ten_seconds_and_at_the_end():
    line = Line(terminal=False)
    for done in range(1, 62):
        line.step(done, after=0.5)
    assert [words.split()[1] for words in line.lines()] == ["1", "21", "41", "61"]
    line.step(62)
    line.line.close()
    line.line.close()
    line.step(63, after=100)
    assert [words.split()[1] for words in line.lines()][4:] == ["62"]


def test_what_a_line_says(monkeypatch):
    monkeypatch.setattr("overlapkit.measure.progress.rank_and_world", lambda: (0, 4))
    line = Line(terminal=False, total=200, first_step=70)
    line.step(30)
    line.records = [record(tokens=1, exposed=0)] * 30 + [
        record(100, exposed=MS),
        record(300, exposed=3 * MS),
    ] * 10
    line.step(40, after=40.0, loss=2.34567, lr=3e-4, big=1e9, bad=float("nan"), fifth=1)
    assert line.lines() == [
        "step 100/200",
        "step 110/200  loss 2.346  lr 0.0003  big 1.000e+09  bad nan  80,000 tokens/s  exposed 20.0%  "
        "0:06:00 left",
    ]
    line.step(130, after=1.0)
    assert line.lines()[-1].startswith("step 200/200")  # the last one at once
    assert "left" not in line.lines()[-1]


def test_a_line_that_was_never_begun_says_nothing():
    line = Line(terminal=True)
    line.line.close()
    assert line.out.getvalue() == ""


@pytest.mark.parametrize("printed_to_terminal", [True, False])
def test_on_a_terminal_one_line_is_written_over(monkeypatch, capsys, printed_to_terminal):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: printed_to_terminal, raising=False)
    line = Line(terminal=True, width=40)
    outside = sys.stdout
    line.step(1, loss=1)
    for done in range(2, 10):
        line.step(done, after=0.125, loss=done)
    print("said meanwhile")
    line.line.close()
    text = line.out.getvalue()
    assert [n for n in range(1, 10) if f"step {n}  loss {n}" in text] == [1, 5, 9]  # at most twice a second
    above, elsewhere = "said meanwhile\n" in text, "said meanwhile\n" in capsys.readouterr().out
    assert (above, elsewhere) == (printed_to_terminal, not printed_to_terminal)
    assert text.rstrip("\n\x1b[?25h").endswith("step 9  loss 9")
    assert sys.stdout is outside
    assert all(len(piece) < 60 for piece in text.splitlines())


def test_the_line_is_rank_0s():
    own = ProgressLine(7)
    assert progress_line(True, 1) is None
    assert progress_line(own, 1) is None
    assert progress_line(False, 0) is None
    assert isinstance(progress_line(True, 0), ProgressLine)
    assert progress_line(own, 0) is own


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"total": 0}, ValueError, "total=0: give the number of the last step"),
        ({"total": 2.0}, TypeError, "total=2.0"),
        ({"first_step": -1}, ValueError, "first_step=-1: give an int of at least 0"),
        ({"first_step": "3"}, TypeError, "first_step='3'"),
    ],
)
def test_options_of_a_line(given, error, words):
    with pytest.raises(error, match=words):
        ProgressLine(**given)


def test_a_meter_shows_its_line(monkeypatch, capsys):
    clock = FakeClock()
    monkeypatch.setattr(module, "clock_of", lambda device: clock)
    loader = FakeComponent(clock)
    meter = StepMeter(loader=loader, progress=ProgressLine(2))
    for loss in (3, 2):
        loader.wait("input", MS)
        with meter.step(tokens=5):
            clock.host += 9 * MS
            meter.log(loss=loss)
    meter.close()
    assert capsys.readouterr().err.splitlines()[-1] == "step 2/2  loss 2  526 tokens/s  exposed 5.3%"


class Scalars:
    """Stands in for SummaryWriter."""

    def __init__(self):
        self.scalars, self.texts, self.closed = [], [], False

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def add_text(self, name, text, step):
        self.texts.append((name, text, step))

    def flush(self):
        pass

    def close(self):
        self.closed = True


def test_tensorboard(monkeypatch):
    clock, out = FakeClock(), Scalars()
    monkeypatch.setattr(module, "clock_of", lambda device: clock)
    monkeypatch.setattr(module, "_WINDOW", 2)
    loader = FakeComponent(clock)
    writer = TensorBoardWriter(writer=out, first_step=1000)
    writer(StepMeter().report())  # nothing has been measured: nothing to write
    assert out.scalars == []
    meter = StepMeter(loader=loader, on_report=[writer], on_log=[writer.log])
    for loss in (3, float("nan")):
        loader.wait("input", MS)
        with meter.step(tokens=5):
            clock.host += 9 * MS
            meter.log(loss=loss)
    writer.close()
    found = {name: value for name, value, step in out.scalars if step == 1001}
    assert found["step/period_ms"] == 10
    assert found["step/input_ms"] == 1
    assert found["step/exposed_percent"] == 10
    assert found["step/tokens_per_s"] == 500
    assert "step/transfer_ms" not in found  # not measured
    assert [(name, step) for name, _, step in out.scalars if name == "loss"] == [
        ("loss", 1000),
        ("loss", 1001),
    ]
    ((name, text, step),) = out.texts
    assert (name, text, step) == ("step/verdict", meter.report().verdict, 1001)
    assert out.closed


def test_tensorboard_is_written_by_rank_0_only(monkeypatch):
    out = Scalars()
    monkeypatch.setattr("overlapkit.measure.tensorboard.rank_and_world", lambda: (1, 2))
    writer = TensorBoardWriter(writer=out)
    writer.log(1, {"loss": 1.0})
    writer.close()
    assert (out.scalars, out.closed) == ([], False)


def test_a_writer_of_ours_is_closed_when_it_is_dropped(monkeypatch, tmp_path):
    out = Scalars()
    monkeypatch.setattr("overlapkit.measure.tensorboard._summary_writer", lambda directory: out)
    del_me = TensorBoardWriter(tmp_path)
    theirs = TensorBoardWriter(writer=(given := Scalars()))
    del del_me, theirs
    assert (out.closed, given.closed) == (True, False)  # what was given is not ours to close


def test_what_a_tensorboard_writer_needs(monkeypatch, tmp_path):
    for given in ({}, {"directory": tmp_path, "writer": Scalars()}):
        with pytest.raises(TypeError, match="give one of the two"):
            TensorBoardWriter(**given)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"overlapkit\[tensorboard\]"):
        TensorBoardWriter(tmp_path)


def test_torchs_own_writer(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoardWriter(tmp_path)
    writer.log(3, {"loss": 0.5})
    writer.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(3, 0.5)]
