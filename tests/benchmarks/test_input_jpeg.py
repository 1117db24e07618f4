"""The JPEG variants do the same work, and what is reported of them is what they did."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import input_jpeg
import jpeg_run
from input_jpeg import DALI, OURS, Run
from jpeg_variants import AREA, ASPECT, MEAN, STD, VARIANTS, Job, _box
from photographs import write_photographs

COUNT, BATCH, SIZE, EPOCHS = 8, 4, 32, 6
COLORS = np.random.default_rng(0).integers(30, 220, (COUNT, 3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Photographs of one colour each: whatever is cut out of them, it is that colour."""
    for number, color in enumerate(COLORS):
        pixels = np.broadcast_to(color.astype(np.uint8), (90 + 10 * number, 120, 3))
        Image.fromarray(pixels).save(tmp_path / f"{number}.jpg", quality=95)
    return tmp_path


@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_gives_each_photograph_once_an_epoch_normalised(name: str, folder: Path) -> None:
    files = sorted(map(str, folder.glob("*.jpg")))
    prepare, install = VARIANTS[name]
    try:
        open_ = prepare(Job(files, BATCH, SIZE, threads=2, epochs=EPOCHS, device=torch.device("cpu")))
    except ImportError as error:
        pytest.skip(f"{error}: {install}")
    seen = []
    for images, labels in open_():
        assert (images.shape, images.dtype) == ((BATCH, 3, SIZE, SIZE), torch.float32)
        assert images.is_contiguous()
        expected = (COLORS[labels.flatten()] - MEAN) / STD
        torch.testing.assert_close(
            images, torch.tensor(expected)[..., None, None].expand_as(images).float(), atol=0.05, rtol=0
        )
        seen += labels.flatten().tolist()
    epochs = [seen[at : at + COUNT] for at in range(0, len(seen), COUNT)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(COUNT))] * EPOCHS
    assert len({tuple(epoch) for epoch in epochs}) > 1  # shuffled


def test_random_crops_lie_in_the_photograph_and_keep_their_ranges() -> None:
    width, height = 400, 300
    boxes = np.array([_box(width, height) for _ in range(2000)])
    left, top, wide, high = boxes.T
    assert left.min() >= 0
    assert top.min() >= 0
    assert (left + wide).max() <= width
    assert (top + high).max() <= height
    share, aspect = wide * high / (width * height), wide / high
    assert share.min() > AREA[0] * 0.97
    assert share.max() > 0.85
    assert ASPECT[0] * 0.97 < aspect.min() < 0.8
    assert 1.25 < aspect.max() < ASPECT[1] * 1.03


def test_a_run_counts_what_it_took(folder: Path) -> None:
    run = Run("DataLoader, 1 worker", _options(folder, "--later", "2"))
    run()
    (report,) = run.reports
    assert report["images"] == 4 * COUNT  # the first epoch, two later ones, and that for the memory
    assert report["shape"] == [BATCH, 3, SIZE, SIZE]
    assert 0 < report["first_batch_s"] < report["imported_s"]
    assert report["memory"] > 2**26  # torch alone holds more


def test_a_start_up_beside_work_reports_both(folder: Path) -> None:
    run = Run("DataLoader, 0 workers", _options(folder, "--work", "0.05"))
    run()
    assert run.median("work_s") >= 0.05
    assert run.median("first_batch_s") is not None
    assert run.median("later_rate") is None


def test_a_photograph_that_came_twice_is_an_error() -> None:
    jpeg_run._check([torch.tensor([1, 0]), torch.tensor([2, 0]), torch.tensor([1, 2])], 3)
    with pytest.raises(SystemExit, match="epoch 1"):
        jpeg_run._check([torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1])], 3)


def test_what_is_not_installed_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    monkeypatch.setattr(sys, "argv", ["jpeg_run.py", "thread pool", *_options(folder)])
    assert jpeg_run.main() == jpeg_run.ABSENT
    assert "simplejpeg" in capsys.readouterr().err
    rows = {figure.name: figure for figure in input_jpeg.figures(*_runs({"thread pool": None}))}
    missing = rows["JPEG later epochs, thread pool (pip install simplejpeg pillow)"]
    assert (missing.value, missing.peer_value) == (None, None)


def test_without_photographs_every_variant_is_reported_as_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    rows = input_jpeg.measure(True, torch.device("cpu"))
    assert {row.value for row in rows} == {None}
    assert {row.met for row in rows} == {False, None}
    assert "JPEG memory, SPDL (pip install scikit-learn pillow)" in [row.name for row in rows]


@pytest.mark.parametrize(
    ("rates", "ahead", "near"),
    [
        ({OURS: 99.0, DALI: 100.0, "SPDL": 80.0}, True, True),
        ({OURS: 97.0, DALI: 100.0, "SPDL": 80.0}, True, False),
        ({OURS: 99.0, DALI: 100.0, "SPDL": 99.5}, False, True),
        ({OURS: 99.0, DALI: None}, False, False),  # what was not measured is not met
        ({OURS: None, DALI: 100.0, "SPDL": 99.5}, False, False),
    ],
)
def test_goals(rates: dict[str, float | None], ahead: bool, near: bool) -> None:
    rows = {figure.name: figure for figure in input_jpeg.figures(*_runs(rates))}
    assert rows["JPEG later epochs, ours beside the best other"].met is ahead
    assert next(row for name, row in rows.items() if name.startswith("JPEG later epochs, ours")).met is near


def test_photographs_are_the_same_each_time_and_of_the_size_that_is_told(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="pip install scikit-learn")
    (tmp_path / "again").mkdir()
    files, again = write_photographs(tmp_path, 24), write_photographs(tmp_path / "again", 24)
    contents = [Path(file).read_bytes() for file in files]
    assert contents == [Path(file).read_bytes() for file in again]
    assert len(set(contents)) == 24
    assert 45_000 < np.mean([len(content) for content in contents]) < 60_000
    with Image.open(files[0]) as first:
        assert 240 < first.height <= 427
        assert 360 < first.width <= 640


def _options(folder: Path, *more: str) -> list[str]:
    return ["--folder", str(folder), "--batch", str(BATCH), "--size", str(SIZE), *more]


def _runs(rates: dict[str, float | None]) -> tuple[list[Run], list[Run]]:
    """Runs as if these rates had been measured; None: not installed."""
    whole = [Run(name, []) for name in (OURS, DALI, *(name for name in rates if name not in (OURS, DALI)))]
    for run in whole:
        rate = rates.get(run.variant)
        if rate is None:
            run.absent = VARIANTS[run.variant][1]
        else:
            run.reports.append({"later_rate": rate})
    return whole, whole[:2]
