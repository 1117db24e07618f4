"""Checkpoints, their contents and differences, as tables for people and as JSON for scripts.

On a terminal tables are drawn by rich; elsewhere a table is one line a row, with tabs between the columns.
"""

import contextlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from overlapkit.checkpoint.codec import encode
from overlapkit.checkpoint.contents import Contents
from overlapkit.checkpoint.differences import Difference
from overlapkit.checkpoint.listing import Listed
from overlapkit.checkpoint.progress import Progress
from overlapkit.checkpoint.verification import Damage
from overlapkit.counted import counted

_LONG = 60  # characters of a value in a table; JSON has them whole
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows to stdout. A column whose name ends in a blank is set to the right."""
    if not sys.stdout.isatty():
        print("\t".join(column.strip() for column in columns))
        for row in rows:
            print("\t".join(_clean(cell) for cell in row))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.strip(), justify="right" if column.endswith(" ") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_clean(cell)) for cell in row))
    Console().print(table)


def print_json(value: Any) -> None:
    """Print a value to stdout; what JSON has no number for is text ("nan")."""
    print(json.dumps(_finite(value), indent=2, default=str, allow_nan=False))


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Progress | None]:
    """A bar on stderr; None where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def size(nbytes: int) -> str:
    """Bytes for people, in binary units."""
    power = min(len(_UNITS) - 1, max(0, nbytes.bit_length() - 1) // 10)
    return f"{nbytes} B" if power == 0 else f"{nbytes / 1024**power:.1f} {_UNITS[power]}"


def print_list(found: list[Listed]) -> None:
    """A directory's checkpoints."""
    rows = [
        (
            listed.step,
            "-" if listed.written is None else f"{listed.written.astimezone():%Y-%m-%d %H:%M:%S}",
            size(listed.nbytes),
            listed.state,
            "-" if listed.world is None else listed.world,
            "-" if listed.keys is None else " ".join(listed.keys),
            " ".join(f"{name}={value:g}" for name, value in (listed.metrics or {}).items()),
        )
        for listed in found
    ]
    print_table(("step ", "written", "size ", "state", "ranks ", "keys", "metrics"), rows)


def list_as_json(found: list[Listed]) -> list[dict[str, Any]]:
    """What `print_list` shows, for scripts."""
    return [
        {**vars(one), "written": None if one.written is None else one.written.isoformat()} for one in found
    ]


def print_contents(contents: Contents) -> None:
    """A checkpoint's tensors and values."""
    total = sum(tensor.nbytes for tensor in contents.tensors.values())
    metrics = " ".join(f"{name}={value:g}" for name, value in contents.metrics.items())
    facts = [
        str(contents.folder),
        f"step {contents.step}",
        f"written by {contents.world} rank(s), shown for rank {contents.rank}",
        f"{counted(len(contents.tensors), 'tensor')}, {size(total)}",
        f"generators: {', '.join(contents.generators) or 'none'}",
        *([metrics] if metrics else []),
    ]
    print(" · ".join(_clean(fact) for fact in facts))
    rows = [
        (
            name,
            _dtype(tensor.dtype),
            _shape(tensor.shape),
            tensor.nbytes,
            " ".join(tensor.files) if tensor.shares is None else f"shares {tensor.shares}",
        )
        for name, tensor in contents.tensors.items()
    ]
    print()
    print_table(("tensor", "dtype", "shape", "bytes ", "files"), rows)
    print()
    print_table(("value", "is"), [(path, _short(value)) for path, value in contents.values.items()])


def contents_as_json(contents: Contents) -> dict[str, Any]:
    """What `print_contents` shows, for scripts; values as typed JSON."""
    tensors = {
        name: {**vars(tensor), "dtype": _dtype(tensor.dtype)} for name, tensor in contents.tensors.items()
    }
    values = {path: encode(value, path, lambda name, _: name) for path, value in contents.values.items()}
    return {**vars(contents), "tensors": tensors, "values": values}


def damage_as_json(damage: Sequence[Damage]) -> list[dict[str, Any]]:
    """Damaged places, for scripts."""
    return [vars(place) for place in damage]


def print_difference(found: Difference) -> None:
    """How two checkpoints differ."""
    rows: list[tuple[object, ...]] = [(path, "missing", "", "", "") for path in found.missing]
    rows += [(path, "added", "", "", "") for path in found.added]
    for tensor in found.tensors:
        shapes, dtypes = map(_shape, tensor.shapes), map(_dtype, tensor.dtypes)
        first, second = (f"{dtype} {shape}" for dtype, shape in zip(dtypes, shapes, strict=True))
        if tensor.differing is None:
            rows.append((tensor.name, "changed", f"{first} -> {second}", "", ""))
        else:
            part = f"{tensor.differing} of {math.prod(tensor.shapes[0])}"
            rows.append((tensor.name, "differs", first, part, f"{tensor.max_abs:g}"))
    for path, (one, other) in found.values.items():
        rows.append((path, "value", f"{_short(one)} -> {_short(other)}", "", ""))
    if rows:
        print_table(("name", "how", "what", "elements ", "max abs "), rows)
    compared = "all ranks' own values" if found.ranks > 1 else "rank 0's own values"
    same = f"{counted(found.same_tensors, 'tensor')} {'is' if found.same_tensors == 1 else 'are'} the same"
    print(f"{same}, {counted(len(rows), 'difference')}; {compared} were compared")


def difference_as_json(found: Difference) -> dict[str, Any]:
    """What `print_difference` shows, for scripts; values as typed JSON."""
    tensors = [
        {**vars(tensor), "dtypes": [_dtype(dtype) for dtype in tensor.dtypes]} for tensor in found.tensors
    ]
    values = {
        path: [encode(value, path, lambda name, _: name) for value in pair]
        for path, pair in found.values.items()
    }
    return {**vars(found), "same": found.same, "tensors": tensors, "values": values}


def _clean(cell: object) -> str:
    """A cell on one line; what could move a terminal's cursor is spelt out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(cell))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONG else f"{text[: _LONG - 4]} ..."


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
