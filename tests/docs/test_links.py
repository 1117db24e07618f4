"""Every link and picture of every page leads to a file of the checkout, and every anchor to a heading."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = [path for where in ("*.md", "docs/**/*.md", "examples/**/*.md") for path in sorted(ROOT.glob(where))]


def slug(heading: str) -> str:
    """As GitHub names a heading, and the site (mkdocs.yml: toc)."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def inline(page: Path) -> Iterator[tuple[Token, list[Token]]]:
    """What each heading, paragraph or cell holds, with the token that opens it."""
    tokens = MarkdownIt().enable("table").parse(page.read_text())
    for opening, content in zip(tokens, tokens[1:], strict=False):
        if content.type == "inline":
            yield opening, content.children or []


def anchors(page: Path) -> set[str]:
    found: dict[str, int] = {}
    for opening, content in inline(page):
        if opening.type == "heading_open":
            name = slug("".join(token.content for token in content))
            found[name] = found.get(name, -1) + 1
    return {f"{name}-{again}" if again else name for name, last in found.items() for again in range(last + 1)}


def links(page: Path) -> Iterator[str]:
    for _, content in inline(page):
        for token in content:
            target = token.attrGet("href") or token.attrGet("src")
            if target is not None:
                yield str(target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in links(page):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        place = (page.parent / file).resolve() if file else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            broken.append(target)
    assert broken == []


def test_every_page_is_reached_from_the_site_s_navigation() -> None:
    named = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    hooks = ast.parse((ROOT / "docs/hooks.py").read_text())
    outside = next(
        ast.literal_eval(node.value)
        for node in hooks.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PAGES"
    )
    places = {str(page.relative_to(ROOT)) for page in PAGES}
    assert named == {outside.get(place, place.removeprefix("docs/")) for place in places}


def test_headings_get_the_names_that_github_gives_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b_c`, d\n## --link: why?\n## Twice\n## Twice\n")
    assert anchors(page) == {"a-b_c-d", "--link-why", "twice", "twice-1"}
