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
    assert found.paths == ["b.jpg", "a.jpg", "b.jpg"]
    assert found.labels.tolist() == [2, 0, 7]
    assert found.labels.dtype == np.int64
    assert found.classes is None


def test_the_digest_is_of_names_in_their_order_not_of_where_they_lie():
    digest = find_files(["/here/a.jpg", "/here/b.jpg"], [0, 1]).digest
    assert digest == find_files(["/there/c/a.jpg", "b.jpg"], [1, 1]).digest
    assert digest != find_files(["/here/b.jpg", "/here/a.jpg"], [0, 1]).digest
    assert digest != find_files(["/here/a.jpgb.jpg", ""], [0, 1]).digest
    assert find_files(["\udce9.jpg"], [0]).digest  # a name that is no UTF-8


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
