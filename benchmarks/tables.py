"""What do the pages show of benchmarks/results? Fills the marked tables of README.md and docs/ from the JSON.

    python benchmarks/tables.py [--check]

A table stands between `<!-- table: KIND FILE ... -->` and `<!-- /table -->`:

    goals FILE [GLOB ...]      figures with a goal: measured, beside whom, goal, met or missed
    figures FILE [GLOB ...]    those and the ones without a goal
    pivot FILE REGEX [PEER]    a row and a column for what the groups `row` and `col` match; one that matches
                               nothing is called "ours". With PEER the peer's value has a column of that name
    about                      of each file: the question, the command, machine, versions, commit
    command NAME ...           arguments and options of `overlapkit NAME ...`
"""

import argparse
import fnmatch
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from figure import short

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_REGION = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- /table -->)", re.DOTALL)

Row = dict[str, Any]


def main() -> int:
    """Fill, or check, every page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a table is old")
    check = parser.parse_args().check
    old = [page for page in PAGES if filled(page.read_text()) != page.read_text()]
    for page in old:
        print(f"{page.relative_to(ROOT)}: {'old tables' if check else 'written'}")
        if not check:
            page.write_text(filled(page.read_text()))
    return 1 if check and old else 0


def filled(text: str) -> str:
    """A page's text with every table as the results give it."""
    return _REGION.sub(lambda match: f"{match[1]}\n{_made(match[2])}\n\n{match[3]}", text)


def _made(said: str) -> str:
    kind, *words = shlex.split(said)
    return KINDS[kind](*words)


def read(file: str) -> Row:
    """A results file."""
    return json.loads((RESULTS / file).read_text())


def goals(file: str, *globs: str) -> str:
    """Every figure that has a goal."""
    return figures(file, *globs, only_goals=True)


def figures(file: str, *globs: str, only_goals: bool = False) -> str:
    """Figures of a file by name."""
    rows = [row for row in _named(file, globs) if row["goal"] or not only_goals]
    body = [
        (
            row["name"],
            _number(row["value"], row["unit"]),
            "" if row["peer"] is None else f"{row['peer']} {_number(row['peer_value'], row['unit'])}",
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            row["goal"] or "",
            {None: "", True: "met", False: "**missed**"}[row["met"]],
        )
        for row in rows
    ]
    return _table(("figure", "measured", "beside", "ratio", "goal", ""), body)


def pivot(file: str, pattern: str, peer: str | None = None) -> str:
    """Figures whose names have a row and a column in them."""
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for row in read(file)["figures"]:
        match = re.fullmatch(pattern, row["name"])
        if match is None:
            continue
        line = cells.setdefault(match["row"] or "ours", {})
        for column, value in _cells(match, row, peer):
            if column in line:
                raise ValueError(f"{file}: {pattern} gives two figures for {match['row']}, {column}")
            columns[column] = None
            line[column] = value
    if not cells:
        raise ValueError(f"{file} has no figure that is called like {pattern}")
    return _table(
        ("", *columns), [(name, *(row.get(one, "") for one in columns)) for name, row in cells.items()]
    )


def _cells(match: re.Match[str], row: Row, peer: str | None) -> Iterable[tuple[str, str]]:
    column = match.groupdict().get("col")
    yield column or "ours", _number(row["value"], row["unit"])
    if peer is not None and row["peer"] is not None:
        yield f"{column}, {peer}" if column else peer, _number(row["peer_value"], row["unit"])


def about() -> str:
    """Where each file comes from."""
    body = []
    for path, said in ((path, read(path.name)) for path in sorted(RESULTS.glob("*.json"))):
        if "figures" not in said:  # ahead.json, which has a page of its own
            continue
        machine = said["hardware"]
        gpus = ", ".join(str(gpu) for gpu in machine["gpus"]) or "no GPU"
        where = f"{machine['cores']} cores ({machine['cpu']}), {gpus}"
        link = f"[{path.stem}](../benchmarks/results/{path.name})"
        body.append((link, said["question"], f"`{said['command']}`", where, f"`{said['commit'][:8]}`"))
    return _table(("results", "question", "command", "machine", "commit"), body)


def command(*names: str) -> str:
    """Arguments and options of a command of ours, from what its parser knows."""
    import typer

    from overlapkit import cli

    found: Any = typer.main.get_command(cli.app)
    for name in names:
        found = found.commands[name]
    body = []
    for parameter in found.params:
        option = parameter.param_type_name == "option"
        name = ", ".join(f"`{opt}`" for opt in [*parameter.opts, *parameter.secondary_opts])
        default = f"`{parameter.default}`" if option and parameter.default not in (None, False) else ""
        body.append((name if option else f"`{parameter.name.upper()}`", default, parameter.help or ""))
    return _table(("", "default", ""), body)


def _number(value: float | None, unit: str) -> str:
    """Three digits, whole numbers as they are, and milliseconds where seconds would be a small part."""
    if value is not None and unit == "s" and abs(value) < 0.1:
        value, unit = value * 1e3, "ms"
    if value is None or (abs(value) >= 1 and value != int(value)):
        return short(value, unit)
    return f"{value:#.3g} {unit}" if 0 < abs(value) < 1 else f"{value:,.0f} {unit}"


def _named(file: str, globs: tuple[str, ...]) -> list[Row]:
    rows = read(file)["figures"]
    unknown = [glob for glob in globs if not any(fnmatch.fnmatchcase(row["name"], glob) for row in rows)]
    if unknown:
        raise ValueError(f"{file} has no figure that is called like {unknown[0]!r}")
    return [row for row in rows if not globs or any(fnmatch.fnmatchcase(row["name"], one) for one in globs)]


def _table(head: tuple[str, ...], body: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *body]
    cells = [[re.sub(r"\s+", " ", cell.replace("|", "\\|")) for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


KINDS: dict[str, Callable[..., str]] = {
    "about": about,
    "command": command,
    "figures": figures,
    "goals": goals,
    "pivot": pivot,
}


if __name__ == "__main__":
    sys.exit(main())
