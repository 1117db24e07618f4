"""A missing optional package is an error that names its extra; a broken one speaks for itself."""

import math

import pytest

from overlapkit.extras import require


def test_it_returns_the_module():
    assert require("math", "viz") is math
    assert require("os.path", "viz").join("a", "b") == "a/b"


@pytest.mark.parametrize("module", ["overlapkit_absent", "overlapkit_absent.part"])
def test_a_missing_package_names_its_extra(module):
    with pytest.raises(ImportError, match=rf"{module} is not installed: pip install 'overlapkit\[images\]'"):
        require(module, "images")


def test_a_package_that_is_there_and_broken_says_so_itself(tmp_path, monkeypatch):
    (tmp_path / "broken_by_its_need.py").write_text("import overlapkit_absent\n")
    (tmp_path / "broken_by_itself.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'overlapkit_absent'"):
        require("broken_by_its_need", "viz")
    with pytest.raises(ZeroDivisionError):
        require("broken_by_itself", "viz")
