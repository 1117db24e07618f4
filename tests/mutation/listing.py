"""The list in docs/testing.md: what each mutation point is caught by. Written by the tool, read by a test."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.points import Point

PAGE = Path("docs/testing.md")
BEGIN = "<!-- The list of mutations: make mutate ARGS=--write -->"
END = "<!-- The end of the list -->"
_BAR = r"\|"
_HEAD = ("module", "in", "taken out", "caught by", "s")

Key = tuple[str, str, str, int]


@dataclass(frozen=True)
class Row:
    """What is known of one point.

    Attributes:
        key: The point's.
        test: What caught it, or None where it changes nothing.
        seconds: That took.
        reason: Why it changes nothing.
    """

    key: Key
    test: str | None
    seconds: float = 0.0
    reason: str = ""


def read(page: Path) -> dict[Key, Row]:
    """The rows of the list."""
    text = page.read_text()
    _, begin, rest = text.partition(BEGIN)
    listed, end, _ = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has lost the lines {BEGIN!r} and {END!r}: put them back")
    rows = {}
    for line in listed.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == len(_HEAD) and cells[0].startswith("`"):
            row = _row(*cells)
            rows[row.key] = row
    return rows


def write(page: Path, rows: Iterable[Row]) -> None:
    """Put the rows into the page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n{END}{after}")


def table(rows: Iterable[Row]) -> str:
    """The rows as a table, one line each."""
    lines = [f"| {' | '.join(_HEAD)} |", "|---|---|---|---|---|"]
    lines += [_line(row) for row in sorted(rows, key=lambda row: row.key)]
    return "\n".join(lines) + "\n"


def differences(points: Iterable[Point], rows: dict[Key, Row]) -> list[str]:
    """Points without a row, and rows without a point."""
    there = {point.key: point for point in points if point.left_out is None}
    new = [f"not in the list: {there[key]}" for key in there.keys() - rows.keys()]
    gone = [f"listed, but gone: {' '.join(map(str, key))}" for key in rows.keys() - there.keys()]
    return sorted(new + gone)


def _line(row: Row) -> str:
    file, where, text, number = row.key
    code = f"`{text}`" + (f" ({number})" if number > 1 else "")
    if row.test is None:
        caught, seconds = f"nothing: {row.reason}", ""
    else:
        caught, seconds = f"`{row.test}`", f"{row.seconds:.0f}"
    cells = [f"`{file}`", f"`{where}`", code, caught, seconds]
    return f"| {' | '.join(cell.replace('|', _BAR) for cell in cells)} |"


def _row(file: str, where: str, code: str, caught: str, seconds: str) -> Row:
    text, _, number = code[1:].rpartition("`")
    counted = int(number.strip(" ()") or 1)
    key = (file.strip("`"), where.strip("`"), text.replace(_BAR, "|"), counted)
    if caught.startswith("nothing: "):
        return Row(key, None, reason=caught.removeprefix("nothing: "))
    return Row(key, caught.strip("`").replace(_BAR, "|"), float(seconds))
