"""The site builds without a warning, fetches nothing, and its reference has every public name."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "checkpoint",
    "doctor",
    "input",
    "input.images",
    "kernels",
    "measure",
    "optim",
    "parallel",
    "plan",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    ran = _build(ROOT, folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


def _build(top: Path, into: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs`."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", into],
        cwd=top,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    """--strict counts warnings, which --quiet would keep from it."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[there](nowhere.md)")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\ntheme: null\n")
    assert _build(tmp_path, tmp_path / "site").returncode == 1


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    text = "".join(page.read_text() for page in sorted((site / "reference").glob("*.html")))
    there = set(re.findall(r'id="(overlapkit\.[\w.]+)"', text))
    for package in PACKAGES:
        module = importlib.import_module(f"overlapkit.{package}")
        for name in module.__all__:
            own = f"overlapkit.{package}.{name}"
            places = {own, f"{own}.{name}", f"{getattr(getattr(module, name), '__module__', '')}.{name}"}
            assert places & there, f"add overlapkit.{package}.{name} to docs/reference"


def test_pages_fetch_nothing(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert fetched == [], page
