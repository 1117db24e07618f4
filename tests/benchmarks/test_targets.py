"""What the pages tell to run is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_benchmark_that_a_page_names_can_be_made() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.py")]
    named = {name for page in pages for name in re.findall(r"make bench-(\w+)", page.read_text())}
    goals = re.search(r"^((?:bench-\w+ ?)+): install$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert goals is not None
    assert "meter" in named
    assert named <= {goal.removeprefix("bench-") for goal in goals[1].split()}
    assert all((ROOT / "benchmarks" / f"{name}.py").is_file() for name in named)
