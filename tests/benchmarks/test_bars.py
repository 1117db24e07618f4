"""The picture shows every figure with its value, and the goals where they are."""

from pathlib import Path

from bars import draw, picture
from harness import Figure

FIGURES = [
    Figure("rate, ours", 9.0, "GB/s", "higher", peer="p", peer_value=20.0, ratio_limit=0.5),
    Figure("rate, DataLoader, 1 worker", 0.1, "GB/s", "higher"),
    Figure("rate, SPDL (pip install spdl)", None, "GB/s", "higher"),
    Figure("width, ours", 2.0, "B", "lower", limit=2.5),
    Figure("time, no loader", 3.0, "ms", "lower", peer="p", peer_value=None),
]


def test_a_panel_a_group_and_a_bar_a_figure() -> None:
    rate, width, time, empty = picture(FIGURES, "Is it?").axes
    assert [tick.get_text() for tick in rate.get_yticklabels()] == [
        "ours",
        "DataLoader, 1 worker",
        "SPDL (pip install spdl)",
    ]
    assert [bar.get_width() for bar in rate.patches] == [9.0, 0.1, 0.0]
    assert [note.get_text() for note in rate.texts] == ["9.00", "0.1000", "not measured"]
    assert rate.get_xscale() == "log"
    assert [list(line.get_xdata()) for line in rate.lines] == [[10.0, 10.0]]
    assert [list(line.get_xdata()) for line in width.lines] == [[2.5, 2.5]]
    assert not time.lines
    assert (width.get_title("left"), width.get_xscale()) == ("width: B, lower is better", "linear")
    assert not empty.axison


def test_it_is_written(tmp_path: Path) -> None:
    draw(tmp_path / "x.png", FIGURES, "Is it?")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
