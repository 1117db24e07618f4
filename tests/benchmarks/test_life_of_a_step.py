"""The page that walks through a step: its report is one of today's, and the files that it names are there."""

import re
from pathlib import Path

import pytest

import life_of_a_step
from overlapkit.measure.answers import _QUESTIONS

ROOT = Path(__file__).resolve().parents[2]
TEXT = life_of_a_step.PAGE.read_text()


def test_the_report_is_put_between_its_marks_and_nothing_else_is_changed() -> None:
    printed = "12 bytes\nstarting; everything goes to x\nHealthy: a step \n\n part  ms\nsee x/lanes.png\n"
    report = life_of_a_step.report_in(printed)
    assert report == "Healthy: a step\n\n part  ms"
    page = f"# A\n{life_of_a_step.BEGIN}old\n{life_of_a_step.END}rest\n"
    once = life_of_a_step.put(page, report, "here")
    middle = f"\n```text\n{report}\n```\n\n(here.)\n\n"
    assert once == f"# A\n{life_of_a_step.BEGIN}{middle}{life_of_a_step.END}rest\n"
    assert life_of_a_step.put(once, report, "here") == once
    with pytest.raises(AssertionError, match="lacks its marks"):
        life_of_a_step.put("# A\n", report, "here")


def test_the_report_on_the_page_is_whole() -> None:
    report = TEXT.partition(life_of_a_step.BEGIN)[2].partition(life_of_a_step.END)[0]
    assert f"$ {life_of_a_step.RUN}\n" in report
    assert [name for name in _QUESTIONS if name not in report] == []
    assert life_of_a_step.PICTURE.name in TEXT


def test_files_that_the_walk_names_are_there() -> None:
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", TEXT.partition(life_of_a_step.END)[2])
    assert len(named) > 30
    assert [name for name in named if not (ROOT / "src/overlapkit" / name).is_file()] == []
