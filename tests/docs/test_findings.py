"""docs/reading_the_report.md has every finding that the sources can give: they are found by syntax."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlapkit.doctor.layers.kernels import LEFT_ON
from overlapkit.doctor.layers.nccl import RULES
from overlapkit.measure.advice import _NOTABLE

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/overlapkit"
PAGE = re.sub(r"\s+", " ", (ROOT / "docs/reading_the_report.md").read_text())
HEADINGS = re.findall(r"^## (.*)$", (ROOT / "docs/reading_the_report.md").read_text(), re.MULTILINE)

ADVICE = {"tuple[str, str]", "Fix"}
"""What a function returns that gives a component and a setting."""
SENTENCES = {"_REMEDY", "_LESS"}
"""Dicts whose values are advice."""
VERDICTS = {"_remedy", "unexplained", "sentence"}
"""Functions that return a sentence; that on two reports compared is none of a report."""
NAMES = {  # where the name of a doctor's line is no literal
    ("storage", "…"): ("checkpoints", "data"),
    ("storage", "… place"): ("checkpoints place", "data place"),
    ("storage", "… of all ranks"): ("checkpoints of all ranks", "data of all ranks"),
    ("kernels", "…"): ("Triton's cache", "inductor's cache"),
    ("job", "…"): ("link", "transport", "environment"),
}


def said(node: ast.AST | None) -> str | None:
    """A string in the source, with … for what is put in; None for anything else."""
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        return re.sub("…+", "…", "".join(map(str, parts)))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def trees(package: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((SOURCES / package).rglob("*.py")):
        yield path, ast.parse(path.read_text())


def advice(tree: ast.Module) -> Iterator[str]:
    """`component: setting` of every pair that is returned as advice or made a Waste, and other sentences."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef)
            and node.returns is not None
            and ast.unparse(node.returns) in ADVICE
        ):
            for pair in ast.walk(node):
                if isinstance(pair, ast.Return) and isinstance(pair.value, ast.Tuple):
                    component, setting = map(said, pair.value.elts)
                    yield ": ".join(filter(None, (component, setting)))
        elif isinstance(node, ast.FunctionDef) and node.name in VERDICTS:
            yield from (said(one.value) or "" for one in ast.walk(node) if isinstance(one, ast.Return))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Waste":
            yield ": ".join(filter(None, map(said, node.args[2:])))
        elif isinstance(node, ast.Assign) and {ast.unparse(name) for name in node.targets} & SENTENCES:
            assert isinstance(node.value, ast.Dict)
            yield from filter(None, map(said, node.value.values))


MEASURED = sorted(
    {text for path, tree in trees("measure") if path.name != "compare_render.py" for text in advice(tree)}
    - {""}
)


def weak(package: str = "doctor") -> Iterator[tuple[str, str]]:
    """Layer and name of every line that the doctor can call weak."""
    for path, tree in trees(package):
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "weak"
            ):
                layer = ast.unparse(node.func.value).rpartition(".")[2].lower()
                name = said(node.args[0]) or "…"
                assert layer != "self", path
                yield from ((layer, one) for one in NAMES.get((layer, name), (name,)))


def test_the_sources_give_what_a_person_counts() -> None:
    assert len(MEASURED) > 35  # else the syntax that is looked for is no longer the sources'
    assert len(set(weak())) > 45
    assert "replicate: try a smaller bucket_cap_mb=, so that less is left when backward ends" in MEASURED


@pytest.mark.parametrize("text", MEASURED)
def test_each_sentence_is_on_the_page(text: str) -> None:
    assert text in PAGE


def test_each_lane_has_a_section() -> None:
    assert {lane.capitalize() for lane in _NOTABLE} <= set(HEADINGS)


def test_each_line_of_the_doctor_is_on_the_page() -> None:
    assert sorted(f"{layer} {name}" for layer, name in set(weak()) if f"{layer} {name}" not in PAGE) == []


def test_each_variable_that_costs_speed_is_on_the_page() -> None:
    names = {*LEFT_ON, *(rule.name for rule in RULES)}
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", PAGE)) == []


def test_what_is_looked_for_is_seen_to_be_missing() -> None:
    """The page is not so long that anything would be found on it."""
    source = 'def f() -> Fix:\n    return "shard", f"raise {what}= now"\n'
    assert [*advice(ast.parse(source))] == ["shard: raise …= now"]
    assert "shard: raise …= now" not in PAGE
