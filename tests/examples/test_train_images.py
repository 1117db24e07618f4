"""The example with images: it knows more than a table of neighbours, and resumes bit for bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overlapkit.checkpoint import diff
from tests.examples.scripts import beside, refusal, run, run_on_ranks

pytest.importorskip("sklearn")
pytest.importorskip("nvidia.dali")
pytestmark = pytest.mark.timeout(300)
SCRIPT = "train_images.py"
SMALL = ("--device", "cpu", "--width", 4, "--steps", 5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data") / "digits"


def result(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())


def test_a_quarter_of_its_length_is_enough_to_beat_the_neighbours(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sklearn.neighbors import KNeighborsClassifier

    run(SCRIPT, "--device", "cpu", "--data", data, "--out", tmp_path, "--steps", 100)
    found, printed = result(tmp_path), capsys.readouterr().out
    assert found["accuracy"] >= 0.985
    assert f"right about {found['accuracy']:.2%} of the digits" in printed
    assert "1 batch ready" in printed
    with beside(SCRIPT):
        from digits import split
    (x, y), (held_x, held_y) = split()
    judge = KNeighborsClassifier(1).fit(x.reshape(len(x), -1), y)
    assert found["nearest_neighbour"] == judge.score(held_x.reshape(len(held_x), -1), held_y)
    assert found["accuracy"] > found["nearest_neighbour"]


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = (("--data", data, "--out", tmp_path / name, *SMALL) for name in ("whole", "parts"))
    run(SCRIPT, *whole)
    run(SCRIPT, *parts, "--stop-at", 2)
    assert "accuracy" not in result(tmp_path / "parts")
    run(SCRIPT, *parts)
    assert "going on after step 2" in capsys.readouterr().out
    difference = diff(tmp_path / "parts", tmp_path / "whole")
    assert difference.same_tensors > 60
    assert difference.same, difference
    assert result(tmp_path / "parts")["accuracy"] == result(tmp_path / "whole")["accuracy"]
    run(SCRIPT, *parts)
    assert "nothing left to do" in capsys.readouterr().out
    run(SCRIPT, *whole, "--seed", 1, "--out", tmp_path / "other")
    assert not diff(tmp_path / "other", tmp_path / "whole").same


def test_two_ranks_and_then_one(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--data", data, "--out", tmp_path, *SMALL)
    run_on_ranks(2, (SCRIPT, *words))
    found = result(tmp_path)
    assert found["world"] == 2
    assert found["report"]["parts"]["communication"]["bytes"] > 0
    assert found["accuracy"] * 450 == pytest.approx(round(found["accuracy"] * 450))  # each image once
    run(SCRIPT, *words, "--steps", 6)
    assert "going on after step 5" in capsys.readouterr().out


def test_the_files_are_the_digits_each_in_one_part(data: Path) -> None:
    from PIL import Image
    from sklearn.datasets import load_digits

    with beside(SCRIPT):
        from digits import split, write_jpegs
    write_jpegs(data)
    digits, parts = load_digits(), split()
    images = np.concatenate([images for images, _ in parts]).reshape(-1, 64)
    assert sorted(map(tuple, images)) == sorted(map(tuple, digits.data))
    for part, (images, labels) in zip(("train", "held_out"), parts, strict=True):
        paths = sorted((data / part).glob("*/*.jpg"), key=lambda path: path.name)
        assert [int(path.parent.name) for path in paths] == labels.tolist()
        assert np.abs(np.bincount(labels) / np.bincount(digits.target) - len(labels) / 1797).max() < 0.01
        for path, original in zip(paths, images, strict=True):
            with Image.open(path) as image:
                assert (image.format, image.size, image.mode) == ("JPEG", (32, 32), "L")
                small = np.asarray(image.resize((8, 8), Image.Resampling.BOX), dtype=float) * 16 / 255
            assert np.abs(small - original).mean() < 1.5


def test_an_interrupted_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    with beside(SCRIPT):
        from digits import write_jpegs
    monkeypatch.setattr(Image.Image, "save", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_jpegs(tmp_path / "digits")
    assert list(tmp_path.iterdir()) == []


def test_wrong_options_are_one_line_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ("--out", tmp_path / "out", "--data", tmp_path / "data")
    assert "--device='bogus' names no device" in refusal(SCRIPT, *out, "--device", "bogus")
    assert "argument --width: invalid positive value: '0'" in refusal(SCRIPT, *out, "--width", 0)
    assert "argument --steps: invalid positive value: '0'" in refusal(SCRIPT, *out, "--steps", 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--batch 7: give a multiple of the 2 ranks" in refusal(SCRIPT, *out, "--batch", 7)
    assert list(tmp_path.iterdir()) == []
