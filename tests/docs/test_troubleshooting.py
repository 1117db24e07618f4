"""docs/troubleshooting.md has every error and warning of the library, found in the sources by syntax.

The rule: errors about an argument (TypeError, ValueError and their like) name the argument, its value, what
is allowed and the remedy, so the page says that once. The classes of `ONE_REMEDY` have one thing to do,
whatever the message; the page has the class. Of all others the page has each message, up to its remedy, and
so of each warning.
"""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/overlapkit"
PAGE = re.sub(r"\s+", " ", (ROOT / "docs/troubleshooting.md").read_text())

ARGUMENTS = {"AttributeError", "IndexError", "TypeError", "ValueError"}
"""Raised for what a caller gave: the message is the remedy."""

ONE_REMEDY = {"CollectiveFailed", "DamagedCheckpoint", "TraceError"}
"""Whatever the message says, the same is to be done."""

MADE_BY = {
    "misfit": "MismatchError",
    "reader.fail": "TraceError",
    "self._broken": "TraceError",
    "self._cut_off": "TraceError",
    "self._failure": "RankFailed",
    "self._roll.failed": "CollectiveFailed",
    "self.fail": "TraceError",
    "self.failed": "CollectiveFailed",
}
"""Functions that make an error for `raise`, and of which class."""

INSIDE = {
    "AssertionError": "our own bugs",
    "InterruptedError": "ends a thread that deletes, and is caught there",
    "Late": "becomes a line of the doctor's report",
    "SystemExit": "the exit status after a signal: preemption.md",
    "Unreadable": "becomes a line of the doctor's report",
    "pickle.UnpicklingError": "becomes a DamagedCheckpoint",
    "typer.Exit": "the command line's exit status",
}
"""Never reaches a user as an exception."""

WARNS = {"log.warning", "warn", "warnings.warn"}
"""What says a message and lets training go on."""


def template(node: ast.AST) -> str | None:
    """A string in the source with … for what is put in; None for anything else."""
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        return re.sub("…+", "…", "".join(map(str, parts)))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(template(side) or "…" for side in (node.left, node.right))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def beginning(message: str) -> str:
    """A message up to where it says what to do: the first colon, semicolon or stop with words before it."""
    for match in re.finditer(r"[:;.] ", message):
        if len(re.findall(r"[a-z]{2,}", message[: match.start()])) >= (2 if match[0] == ". " else 3):
            return message[: match.start()]
    return message


def raised() -> Iterator[tuple[str, str, str]]:
    """Place, class and message of each `raise Class(message)` in the sources."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                kind = MADE_BY.get(ast.unparse(node.exc.func), ast.unparse(node.exc.func))
                messages = [text for text in map(template, node.exc.args) if text is not None]
                yield f"{path.relative_to(SOURCES)}:{node.lineno}", kind, messages[0] if messages else ""


def warned() -> Iterator[tuple[str, str | None]]:
    """Place and message of each warning in the sources; None where the message cannot be told by syntax."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCES.rglob("*.py"))}
    made = {
        one.name: text
        for tree in trees.values()
        for one in ast.walk(tree)
        if isinstance(one, ast.FunctionDef)
        for node in one.body
        if isinstance(node, ast.Return) and node.value is not None and (text := template(node.value))
    }
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in WARNS and path.name != "warn.py":
                said = node.args[0]
                if isinstance(said, ast.Call):  # a function makes it
                    text = made.get(ast.unparse(said.func).rpartition(".")[2])
                else:
                    text = template(said)
                yield f"{path.relative_to(SOURCES)}:{node.lineno}", text and re.sub("%[sd]", "…", text)


ALL = list(raised())
NAMED = [one for one in ALL if one[2] and one[1] not in ARGUMENTS | ONE_REMEDY | INSIDE.keys()]
WARNED = list(warned())


def test_the_page_has_every_message() -> None:
    missing = [(place, beginning(text)) for place, _, text in NAMED if f"`{beginning(text)}`" not in PAGE]
    assert missing == [], "add them to docs/troubleshooting.md, with what is to be done"


def test_the_page_has_every_warning() -> None:
    assert [place for place, text in WARNED if text is None] == [], "say it where it is warned of"
    missing = [
        (place, beginning(text)) for place, text in WARNED if text and f"`{beginning(text)}`" not in PAGE
    ]
    assert missing == [], "add them to docs/troubleshooting.md, with what is to be done"


def test_the_page_has_the_classes() -> None:
    ours = {kind for _, kind, _ in ALL if kind[0].isupper() and not hasattr(builtins, kind)}
    assert {kind for kind in (ours | ONE_REMEDY) - INSIDE.keys() if f"`{kind}`" not in PAGE} == set()


def test_the_page_has_no_message_of_yesterday() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    known = {
        beginning(message) for message in [*(one[2] for one in ALL), *(text or "" for _, text in WARNED)]
    }
    assert [row for row in rows if " " in row and row not in known] == []


def test_what_counts_as_the_beginning() -> None:
    assert beginning("lane … is closed: submit before close()") == "lane … is closed"
    assert beginning("…: not done; wait") == "…: not done; wait"
