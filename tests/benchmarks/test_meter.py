"""What benchmarks/meter.py times is the meter at work, looking closely or not."""

import pytest
import torch

import meter
from meter import HooksOnly

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for name, value in (("FIRST", 2), ("LAST", 40), ("COUNTED", (10,)), ("OPERATORS", 5), ("BLOCKS", 3)):
        monkeypatch.setattr(meter, name, value)


def test_steps_are_whole_and_looked_at_closely_where_they_are_to_be():
    loop = HooksOnly(CPU, measured=True, close=True)
    assert len(loop()) == 38
    report = loop.meter.report()
    assert report.steps == 38  # all but the first and the counted one
    for record in report.records:
        assert None not in (record.forward, record.backward, record.optimizer, record.input)
        assert record.lane_bytes == {"transfer": 1 << 20, "communication": 8 << 20}
    assert loop.meter._closeup.seen.counted == 1
    assert report.detail.recompute_ms > 0
    assert report.detail.peaks


def test_always_on_is_without_close_looks():
    loop = HooksOnly(CPU, measured=True, close=False)
    loop()
    assert loop.meter.report().steps == 39
    assert loop.meter._closeup.seen.counted == 0
    assert loop.meter._closeup.seen.peaks.phases == {}


def test_each_setting_is_a_figure_with_its_goal():
    figures = [
        meter.hooks(str(close), CPU, close, 1, share) for close, share in ((False, 0.002), (True, 0.005))
    ]
    assert [figure.limit for figure in figures] == [40, 100]
    assert all(figure.value is not None for figure in figures)
    assert meter.report(CPU, 1).value > 0
    assert meter.syncs(CPU).value is None
