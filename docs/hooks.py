"""What mkdocs needs beside docs/: README and its like as pages, and files of the checkout that pages link to.

A link in a page is written for the checkout, as GitHub follows it (`../benchmarks/results/input.json`). The
site has docs/ only: what is linked outside of it comes along as it is, under `files/`.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "README.md": "project/readme.md",
    "examples/launch/README.md": "project/launch.md",
    "examples/migrate/README.md": "project/migrate.md",
}
"""Pages outside of docs/, and where the site has them."""

FOLDERS = {"benchmarks/results": "docs/benchmarks.md"}
"""Linked folders, which a site does not show, and the page that tells of what is in each."""

_LINK = re.compile(r"(\]\()([^)\s:#]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the top, and every file that some page links to."""
    for place, site in PAGES.items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / place)))
    linked = {target for file in files.documentation_pages() for target in _outside(file)}
    for target in sorted(linked):
        files.append(File.generated(config, f"files/{target}", abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn each link to a file of the checkout into one of the site."""
    home = _place(page.file)

    def turned(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match.groups()
        site = _in_site(posixpath.normpath(posixpath.join(posixpath.dirname(home), target)))
        there = posixpath.relpath(site, posixpath.dirname(page.file.src_uri) or ".")
        return f"{opening}{there}{anchor or ''}{closing}"

    return _LINK.sub(turned, markdown)


def _place(file: File) -> str:
    """Where a page lies in the checkout."""
    outside = {site: place for place, site in PAGES.items()}
    return outside.get(file.src_uri, f"docs/{file.src_uri}")


def _in_site(place: str) -> str:
    place = FOLDERS.get(place, place)
    if place.startswith("docs/"):
        return place.removeprefix("docs/")
    return PAGES.get(place, f"files/{place}")


def _outside(file: File) -> set[str]:
    """The files that a page links to and neither docs/ nor the pages at the top have."""
    home = posixpath.dirname(_place(file))
    text = re.sub(r"^```.*?^```$", "", file.content_string, flags=re.DOTALL | re.MULTILINE)
    found = {posixpath.normpath(posixpath.join(home, match[2])) for match in _LINK.finditer(text)}
    return {place for place in found if _in_site(place).startswith("files/") and (ROOT / place).is_file()}
