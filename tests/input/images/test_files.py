"""What is found in a folder, and what is refused, at once and by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overlapkit.input.images.files import find_files


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def test_classes_are_sorted_folders_and_files_sorted_below_them(tmp_path):
    touch(tmp_path, "dog/b.jpg", "dog/a.PNG", "cat/z.jpeg", "cat/notes.txt", "loose.jpg")
    below = [f"cat/{number:02}/er/a.webp" for number in (7, 3, 9, 1, 8, 0, 5, 2, 6, 4)]
    touch(tmp_path, *below)
    found = find_files(tmp_path, None)
    names = [str(Path(path).relative_to(tmp_path)) for path in found.paths]
    assert names == ["cat/z.jpeg", *sorted(below), "dog/a.PNG", "dog/b.jpg"]
    assert found.classes == ["cat", "dog"]
    assert found.labels.tolist() == [0] * 11 + [1, 1]
    assert found.labels.dtype == np.int64


def test_a_class_may_be_a_link(tmp_path):
    touch(tmp_path, "elsewhere/x.jpg", "root/real/y.jpg")
    (tmp_path / "root/linked").symlink_to(tmp_path / "elsewhere")
    assert find_files(str(tmp_path / "root"), None).classes == ["linked", "real"]


@pytest.mark.parametrize("labels", [[2, 0, 7], (2, 0, 7), np.array([2, 0, 7], dtype=np.uint8)])
def test_a_list_brings_its_labels(labels):
    found = find_files(["b.jpg", Path("a.jpg"), "b.jpg"], labels)
    assert found.paths == [str(Path(name).absolute()) for name in ("b.jpg", "a.jpg", "b.jpg")]
    assert found.labels.tolist() == [2, 0, 7]
    assert found.labels.dtype == np.int64
    assert found.classes is None


def test_files_are_where_they_were_found_also_after_a_chdir(tmp_path, monkeypatch):
    touch(tmp_path, "root/a/x.jpg")
    monkeypatch.chdir(tmp_path)
    assert find_files("root", None).paths == find_files(["root/a/x.jpg"], [0]).paths
    assert find_files("root", None).paths == [str(tmp_path / "root/a/x.jpg")]


def test_a_link_to_a_folder_above_repeats_nothing(tmp_path):
    touch(tmp_path, "root/a/deep/x.jpg", "root/b/y.jpg", "beside/z.jpg")
    (tmp_path / "root/a/self").symlink_to(tmp_path / "root/a")
    (tmp_path / "root/a/deep/up").symlink_to(tmp_path / "root")
    (tmp_path / "root/a/above").symlink_to(tmp_path)
    (tmp_path / "root/b/c").symlink_to(tmp_path / "beside")
    (tmp_path / "beside/back").symlink_to(tmp_path / "root/b")
    found = find_files(tmp_path / "root", None)
    names = [str(Path(path).relative_to(tmp_path / "root")) for path in found.paths]
    assert names == ["a/deep/x.jpg", "b/y.jpg", "b/c/z.jpg"]
    assert found.labels.tolist() == [0, 1, 1]


def digest_of(*paths: str) -> str:
    return find_files(paths, [0] * len(paths)).digest


def test_the_digest_is_of_names_in_their_order_wherever_their_folder_lies():
    digest = digest_of("/here/a/1.jpg", "/here/b/1.jpg")
    assert digest == digest_of("/there/c/a/1.jpg", "/there/c/b/1.jpg") == digest_of("a/1.jpg", "b/1.jpg")
    assert digest != digest_of("/here/b/1.jpg", "/here/a/1.jpg")
    assert digest != digest_of("/here/a/1.jpg", "/here/bc/1.jpg")
    assert digest_of("/here/alone.jpg") == digest_of("alone.jpg") != digest_of("other.jpg")
    assert digest_of("/here/train1.jpg", "/here/train2.jpg") != digest_of("/here/1.jpg", "/here/2.jpg")
    assert digest_of("/there/a.jpg", "b.jpg") == digest_of("/there/a.jpg", "b.jpg")
    assert digest_of("a.jpgb.jpg") != digest_of("a.jpg", "b.jpg")
    assert digest_of("\udce9.jpg")  # a name that is no UTF-8


@pytest.mark.parametrize(
    ("source", "labels", "error", "message"),
    [
        ("{tmp}/absent", None, FileNotFoundError, "absent' is no folder"),
        ("{tmp}/full/a/x.jpg", None, FileNotFoundError, "x.jpg' is no folder"),
        ("{tmp}/empty", None, FileNotFoundError, "has no folders in it"),
        ("{tmp}/full/a", None, FileNotFoundError, "has no folders in it"),
        ("{tmp}/partly", None, FileNotFoundError, "no images in b of .*end in .jpg"),
        ("{tmp}/full", [0], ValueError, "labels were given beside the folder"),
        ([], [], ValueError, "empty list of files"),
        (["a.jpg", ""], [0, 1], ValueError, r"source\[1\] is an empty name"),
        (["a.jpg"], None, ValueError, "labels=None"),
        (["a.jpg", "b.jpg"], [0], ValueError, r"labels has shape \(1,\), there are 2 files"),
        (["a.jpg"], [[0]], ValueError, r"labels has shape \(1, 1\)"),
        (["a.jpg"], 0, ValueError, r"labels has shape \(\)"),
        (["a.jpg"], [0.0], TypeError, "labels are float64"),
        (["a.jpg"], ["cat"], TypeError, "labels are <U3"),
        ([b"a.jpg", 3], [0, 1], TypeError, "source is a list"),
        (3, None, TypeError, "source is a int"),
        ({"a.jpg": 0}, None, TypeError, "source is a dict"),
    ],
)
def test_what_is_no_data_set_is_refused(
    tmp_path: Path, source: Any, labels: Any, error: type[Exception], message: str
) -> None:
    touch(tmp_path, "full/a/x.jpg", "partly/a/x.jpg", "partly/b/x.txt")
    (tmp_path / "empty").mkdir()
    if isinstance(source, str):
        source = source.format(tmp=tmp_path)
    with pytest.raises(error, match=message):
        find_files(source, labels)
