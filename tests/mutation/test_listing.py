"""docs/testing.md and the sources agree, and the table is read as it was written."""

from pathlib import Path

import pytest

from tests.mutation import listing
from tests.mutation.checkout import PACKAGE
from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.listing import BEGIN, END, PAGE, Row, differences
from tests.mutation.points import in_package, in_source

ROWS = [
    Row(("a.py", "A.f", "x.wait()", 1), "tests/test_a.py::test_b[c|d]", 3.0),
    Row(("a.py", "A.f", "x.wait()", 2), "tests/test_a.py::test_b", 61.0),
    Row(("b.py", "f.g", "lane.submit(lambda: a | b).wait()", 1), None, reason="it is over"),
]


def test_what_is_written_is_read_again_and_the_rest_of_the_page_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    listing.write(page, reversed(ROWS))
    assert listing.read(page) == {row.key: row for row in ROWS}
    listing.write(page, ROWS)
    text = page.read_text()
    assert text.startswith(f"# Before\n\n{BEGIN}\n")
    assert text.endswith(f"{END}\n\nafter\n")
    assert "old" not in text
    page.write_text("# A page\n")
    with pytest.raises(ValueError, match="has lost the lines"):
        listing.read(page)


def test_a_new_wait_and_one_that_is_gone_are_both_told() -> None:
    points = in_source("def f():\n    x.wait()\n    y.wait()\n", "a.py")
    rows = {row.key: row for row in [Row(points[0].key, "t"), Row(("a.py", "f", "z.wait()", 1), "t")]}
    assert differences(points, rows) == [
        "listed, but gone: a.py f z.wait() 1",
        "not in the list: a.py f: y.wait()",
    ]


def test_the_page_lists_every_wait_of_the_sources() -> None:
    rows = listing.read(PAGE)
    apart = differences(in_package(PACKAGE), rows)
    assert apart == [], "run: make mutate ARGS=--write"
    assert {key: row.reason for key, row in rows.items() if row.test is None} == EQUIVALENT


def test_the_tests_that_caught_something_are_there() -> None:
    for row in listing.read(PAGE).values():
        if row.test is not None:
            file, name = row.test.partition("[")[0].split("::")[0], row.test.partition("[")[0].split("::")[-1]
            assert f"def {name}(" in Path(file).read_text(), f"{row.test} is gone: make mutate ARGS=--write"
