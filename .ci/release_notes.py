"""Print one version's section of CHANGELOG.md: `make release-notes`, `make release-notes VERSION=0.1.0`.

Without VERSION it is the package's own, and a section that is missing, empty or there twice is refused.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^## \[([^\]]+)\].*$", re.MULTILINE)


def section(changelog: str, version: str) -> str:
    """The text under `## [version]`, without the heading.

    Raises:
        SystemExit: There is no such section, more than one, or nothing in it.
    """
    parts = HEADING.split(changelog)
    found = [text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True) if name == version]
    if len(found) != 1:
        raise SystemExit(
            f"CHANGELOG.md has {len(found) or 'no'} section(s) [{version}], but {', '.join(parts[1::2])}: "
            f"rename [Unreleased] to [{version}] - YYYY-MM-DD and begin a new one, or give VERSION="
        )
    if not found[0]:
        raise SystemExit(f"CHANGELOG.md says nothing under [{version}]")
    return found[0]


def own_version() -> str:
    """The version that the package has, read where it stands."""
    source = (ROOT / "src" / "overlapkit" / "__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    return version


if __name__ == "__main__":
    print(section((ROOT / "CHANGELOG.md").read_text(), sys.argv[1] if sys.argv[1:] else own_version()))
