"""The code blocks of the Markdown pages, cut into chains: blocks that run one after the other in one process.

A page is one chain. `<!-- run: anew -->` before a block begins another one, in a process that has nothing of
what earlier blocks made; `<!-- run: ranks=2 -->` does so, too, on as many ranks of a process group. A chain
has an empty folder of its own. A Python block with `title="train.py"` becomes that file, for the shell lines
below it.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))
"""Every page whose blocks are run, from the top of the checkout; README and CONTRIBUTING: test_readme.py."""

RUN = {"python", "sh"}
SHOWN = {"diff", "json", "text", "yaml"}
"""What is run, and what a reader only looks at: output, files of other programs."""

_COMMENT = re.compile(r"<!-- run: (?:anew|ranks=(\d+)) -->")


@dataclass(frozen=True)
class Block:
    """One block: page, line of its first statement (from 1), kind ("" if indented), text, and file."""

    page: str
    line: int
    kind: str
    text: str
    file: str | None = None


@dataclass
class Chain:
    """Blocks of one page that share a process, a folder and names; ranks is 0 without a process group."""

    page: str
    number: int = 0
    ranks: int = 0
    blocks: list[Block] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.page}#{self.number}"


def chains(page: str) -> list[Chain]:
    """The chains of a page, those without a block as well."""
    found = [Chain(page)]
    for token in MarkdownIt().parse((ROOT / page).read_text()):
        if token.type == "html_block" and "<!-- run" in token.content:
            said = _COMMENT.fullmatch(token.content.strip())
            assert said, (
                f"{page}: {token.content.strip()} is neither <!-- run: anew --> nor <!-- run: ranks=N -->"
            )
            found.append(Chain(page, len(found), int(said[1] or 0)))
        elif token.type in ("fence", "code_block") and token.map is not None:
            first = token.map[0] + (2 if token.type == "fence" else 1)
            kind, _, rest = token.info.strip().partition(" ")
            title = re.fullmatch(r'title="([\w.]+)"', rest)
            assert bool(rest) == bool(title), f"{page}:{first - 1}: {rest} is not title=..."
            found[-1].blocks.append(Block(page, first, kind, token.content, title[1] if title else None))
    return found
