"""`overlapkit doctor`: its options, its bar, and who prints what in a job."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

EXIT_STATUS = "Exit status: 0 nothing is weak, 1 something is, or a rank is absent, 2 wrong usage."


def doctor(
    checkpoints: Annotated[
        str | None, typer.Option(help="Measure this folder, where checkpoints go.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Measure this folder, where data lies.")] = None,
    workers: Annotated[int | None, typer.Option(help="num_workers of a rank: do the cores suffice?")] = None,
    link: Annotated[bool, typer.Option("--link", help="Measure collectives and pairs of ranks.")] = False,
    ranks: Annotated[int | None, typer.Option(help="Processes that --link starts, without torchrun.")] = None,
    seconds: Annotated[float, typer.Option(help="How long to watch the counters of ports.")] = 2.0,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for other ranks.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> bool:
    """Look at what a step stands on, from GPU to storage: what is weak, what it costs, what to do.

    Alone it looks at this machine; started by torchrun (torchrun ... -m overlapkit doctor), at all
    ranks of the job, and rank 0 prints.
    """
    from overlapkit.checkpoint import tables
    from overlapkit.doctor import examine

    with _bar() as progress:
        diagnosis = examine(
            checkpoints=checkpoints,
            data=data,
            workers=workers,
            link=link,
            ranks=ranks,
            seconds=seconds,
            timeout=timeout,
            progress=progress,
        )
    if diagnosis.rank != 0:  # rank 0 has the verdict; only who did not reach it has something to say
        if diagnosis.alone:
            print(f"rank {diagnosis.rank}: {diagnosis.alone}", file=sys.stderr)
        return not diagnosis.alone
    if as_json:
        tables.print_json(diagnosis.to_dict())
    else:
        print(diagnosis)
    return diagnosis.exit_status == 0


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar on stderr; None where that is no terminal, or another rank draws there."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal or os.environ.get("RANK", "0") != "0":
        yield None
        return
    columns = BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
