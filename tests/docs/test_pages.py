"""Each lane's page says what exposes it, how to see it, its options, its limits, and what was measured."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), *sorted(ROOT.glob("examples/**/*.md"))]


@pytest.mark.parametrize("lane", ["checkpoint", "input", "kernels", "optim", "parallel"])
def test_a_lane_s_page_has_all_that_is_asked_of_it(lane: str) -> None:
    text = (ROOT / "docs" / f"{lane}.md").read_text()
    for wanted in (
        r"^## What exposes (it|them), and how to see it$",
        r"^## Limits$",
        r"^\| [^|]+ \| (default|of) \|",  # options
        r"^<!-- table: \w+ \w+\.json",  # figures beside peers
    ):
        assert re.search(wanted, text, re.MULTILINE), wanted


def test_extras_that_pages_name_are_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
    named = {
        (page, extra)
        for page, text in texts.items()
        for several in re.findall(r"(?:overlapkit|\.)\[([a-z0-9,-]+)\]", text)
        for extra in several.split(",")
    }
    assert {extra for _, extra in named} >= {"viz", "examples", "remote", "gpu"}
    assert {(page, extra) for page, extra in named if extra not in extras} == set()


def test_commands_for_examples_name_scripts_and_options_that_there_are() -> None:
    shown = [file.read_text() for file in [*PAGES, *ROOT.glob("examples/**/*")] if file.is_file()]
    lines = {
        found
        for text in shown
        for found in re.findall(r"(examples/[\w/]+\.(?:py|sh|sbatch)) ([^`\n]*)", text)
    }
    assert len(lines) > 25
    for script, words in lines:
        assert (ROOT / script).is_file(), script
        target = re.search(r"examples/[\w/]+\.py", words)  # what a launcher starts
        folder = (ROOT / (target[0] if target else script)).parent
        sources = "".join(file.read_text() for file in folder.glob("*.py"))
        for option in re.findall(r"(--[a-z-]+)", words.partition("#")[0]):
            assert f'"{option}"' in sources, f"{script} {words}: no {option}"
