"""The tables of the pages are what benchmarks/results gives, and say what is not measured yet."""

import re
from pathlib import Path

import pytest

import tables

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.stem)
def test_tables_are_what_the_results_give(page: Path) -> None:
    text = page.read_text()
    assert tables.filled(text) == text, "python benchmarks/tables.py writes the tables anew"
    assert len(re.findall("<!-- table:", text)) == len(re.findall("<!-- /table -->", text))


def test_every_results_file_is_shown() -> None:
    said = [word for page in tables.PAGES for word in re.findall(r"<!-- table: \w+ (\S+)", page.read_text())]
    files = {path.name for path in tables.RESULTS.glob("*.json") if "figures" in tables.read(path.name)}
    assert files <= set(said)


def test_goals_that_need_a_gpu_say_so_until_one_has_measured_them() -> None:
    rows = [
        line for line in (ROOT / "docs/performance.md").read_text().splitlines() if "not yet measured" in line
    ]
    measured = list(tables.RESULTS.glob("gpu*.json"))
    assert bool(rows) != bool(measured), "show what was measured: <!-- table: goals gpu.json -->"


def test_goals_and_pivots_of_known_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"a, ours": (0.0123, "s"), "a, peer": (1.5, "s"), "b, ours": (0.5, "s"), "b, peer": (1234.4, "s")}
    rows = [
        {"name": name, "value": value, "unit": unit, "peer": None, "peer_value": None, "ratio": None}
        | {"goal": "<= 0.4 s" if name == "b, ours" else None, "met": False if name == "b, ours" else None}
        for name, (value, unit) in names.items()
    ]
    monkeypatch.setattr(tables, "read", lambda file: {"figures": rows})
    text = 'x\n<!-- table: pivot r.json "(?P<row>.), (?P<col>.*)" -->\nold\n<!-- /table -->\ny'
    assert tables.filled(text).splitlines()[3:7] == [
        "|  | ours | peer |",
        "| --- | --- | --- |",
        "| a | 12.3 ms | 1.50 s |",
        "| b | 0.500 s | 1,234 s |",
    ]
    assert tables.goals("r.json").splitlines()[2:] == ["| b, ours | 0.500 s |  |  | <= 0.4 s | **missed** |"]
    with pytest.raises(ValueError, match="called like 'c"):
        tables.goals("r.json", "c*")
    with pytest.raises(ValueError, match="two figures for a, ours"):
        tables.pivot("r.json", r"(?P<row>.), (?P<col>)(ours|peer)")
