"""Write the diffs between the versions into README.md, so that nobody types them a second time.

python examples/migrate/diffs.py
"""

import difflib
import re
from pathlib import Path

HERE = Path(__file__).parent
BLOCK = re.compile(r"(?<=\n```diff )(step_\w+)\n.*?(?=^```$)", re.MULTILINE | re.DOTALL)


def diff(version: str) -> str:
    """How a version differs from the one before, without the docstrings that say so."""
    versions = sorted(path.stem for path in HERE.glob("step_*.py"))
    before = versions[versions.index(version) - 1]
    old, new = ((HERE / f"{name}.py").read_text().splitlines() for name in (before, version))
    lines = list(difflib.unified_diff(old[1:], new[1:], n=1, lineterm=""))[2:]
    return "\n".join("@@" if line.startswith("@@") else line for line in lines)


def with_diffs(text: str) -> str:
    """The README with its diffs as they are now."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{diff(found[1])}\n", text)


if __name__ == "__main__":
    readme = HERE / "README.md"
    readme.write_text(with_diffs(readme.read_text()))
