import subprocess
import sys

import numpy as np
import pytest

from overlapkit.measure.draw import _consecutive, _row, save_drawing
from overlapkit.measure.ledger import Trace
from overlapkit.measure.record import Segment
from overlapkit.span import Span

pytest.importorskip("matplotlib")

MS = 1_000_000


def trace(index, start, *phases, waits=None):
    segments = []
    for kind, ms in phases:
        end = start + ms * MS
        segments.append(Segment(kind, start, end, start, end))
        start = end
    return Trace(index, segments, waits or {})


STEP = (("outside", 2), ("forward", 10), ("backward", 20), ("optimizer", 3))


def test_a_row_shows_work_then_phases_then_what_was_exposed():
    one = trace(0, 0, *STEP, waits={"communication": [(30 * MS, 32 * MS)], "input": []})
    spans = [
        Span("communication", "all_reduce", 20 * MS, 32 * MS),
        Span("communication", "tail", 29 * MS, 32 * MS, exposed=True),
    ]
    assert _row("communication", [one], spans) == [
        ("beside the step", [(20 * MS, 32 * MS), (29 * MS, 32 * MS)]),
        ("exposed", [(30 * MS, 32 * MS)]),  # as it was attributed, not as it was published
    ]
    compute = dict(_row("compute", [one], spans))
    assert compute["forward"] == [(2 * MS, 12 * MS)]
    assert compute["backward"] == [(12 * MS, 30 * MS)]
    assert dict(_row("optimizer", [one], spans))["optimizer"] == [(32 * MS, 35 * MS)]


def test_only_the_latest_steps_without_a_hole_are_drawn():
    steps = [trace(0, 0, *STEP), trace(3, 99 * MS, *STEP), trace(4, 134 * MS, *STEP)]
    assert [one.index for one in _consecutive(steps)] == [3, 4]
    assert _consecutive(steps[:1]) == steps[:1]


def red_pixels(path):
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    return int((np.abs(pixels - np.array([0.839, 0.153, 0.157])) < 0.02).all(axis=-1).sum())


def test_exposed_time_is_what_is_red_in_the_picture(tmp_path):
    counts = []
    for wait in (0, 10, 20):
        waits = {"input": [(0, wait * MS)] if wait else []}
        path = tmp_path / f"{wait}.png"
        save_drawing(path, [trace(0, 0, ("outside", 20), *STEP, waits=waits)], [], {})
        assert path.read_bytes().startswith(b"\x89PNG")
        counts.append(red_pixels(path))
    legend, ten, twenty = counts[0], counts[1] - counts[0], counts[2] - counts[0]
    assert legend > 0
    assert twenty == pytest.approx(2 * ten, rel=0.02)


def test_when_buckets_were_ready_is_marked(tmp_path):
    from matplotlib.image import imread

    black = []
    for ready in ((), (14,), (14, 20, 26), (14, 20, 26, 99)):  # the last one is beyond the picture
        spans = [Span("communication", "all_reduce", r * MS, (r + 1) * MS, ready=r * MS) for r in ready]
        save_drawing(tmp_path / "a.png", [trace(0, 0, *STEP)], spans, {})
        pixels = imread(tmp_path / "a.png")[: int(3.8 * 130 * 0.7), 200:, :3]  # above the legend
        black.append(int((pixels.max(axis=-1) < 0.08).sum()))
    one = black[1] - black[0]
    assert one > 10
    assert black[2] - black[0] == pytest.approx(3 * one, rel=0.2)
    assert black[3] == black[2]


def test_the_garbage_collector_has_a_row_where_it_ran(tmp_path):
    one = trace(0, 0, *STEP, waits={"garbage": [(5 * MS, 9 * MS)]})
    save_drawing(tmp_path / "a.png", [one], [], {})
    save_drawing(tmp_path / "b.png", [trace(0, 0, *STEP, waits={"garbage": []})], [], {})
    assert red_pixels(tmp_path / "a.png") > 1.5 * red_pixels(tmp_path / "b.png")


def test_pauses_notes_and_steps_of_no_length_can_be_drawn(tmp_path):
    steps = [trace(0, 5, ("outside", 0)), trace(1, 5, ("paused", 3), *STEP)]
    save_drawing(tmp_path / "a.png", steps, [], {"transfer": "not measured: tensors stay on the CPU"})
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_the_users_pyplot_is_left_alone(tmp_path):
    code = f"""
import sys
from overlapkit.measure import StepMeter
meter = StepMeter()
with meter.step(): pass
assert "matplotlib" not in sys.modules
meter.report().plot({str(tmp_path / "x.png")!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"overlapkit\[viz\]"):
        save_drawing(tmp_path / "x.png", [trace(0, 0, *STEP)], [], {})
