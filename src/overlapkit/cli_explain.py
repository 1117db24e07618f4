"""`overlapkit explain` and `overlapkit compare`: reports of traces, and of two runs side by side."""

from typing import Annotated

import typer

READ = "Exit status: 0 read (whatever it shows), 1 a trace is damaged, 2 wrong usage."
COMPARED = "Exit status: 0 compared (whatever it shows), 1 a file cannot be read, 2 wrong usage."

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def explain(
    trace: Annotated[
        list[str],
        typer.Argument(help="Traces of torch.profiler (.json, .json.gz, .tar.gz) or a folder: one a rank."),
    ],
    as_json: AsJson = False,
    plot: Annotated[
        str | None, typer.Option(help="Draw the lanes of the first rank's last steps into this PNG.")
    ] = None,
    perfetto: Annotated[
        str | None,
        typer.Option(help="Write the lanes of all ranks' last steps, on one clock, for ui.perfetto.dev."),
    ] = None,
) -> bool:
    """Say what profiler traces expose: lanes, seven answers, the late rank, and what to change."""
    from overlapkit.checkpoint import tables
    from overlapkit.measure import explain as read

    with tables.progress_bar("reading") as progress:
        report = read(trace, progress=progress)
    if plot is not None:
        report.plot(plot, steps=min(8, report.steps))
    if perfetto is not None:
        report.to_perfetto(perfetto)
    if as_json:
        tables.print_json(report.to_dict())
    else:
        print(report)
    return True


def compare(
    before: Annotated[str, typer.Argument(help="What StepReport.save or `explain --json` wrote.")],
    after: Annotated[str, typer.Argument(help="Likewise, of the other run.")],
    as_json: AsJson = False,
) -> bool:
    """Compare two saved reports: what became faster or slower by more than noise, and which findings."""
    from overlapkit.checkpoint import tables
    from overlapkit.measure import StepReport

    found = StepReport.compare(before, after)
    if as_json:
        tables.print_json(found.to_dict())
    else:
        print(found)
    return True
