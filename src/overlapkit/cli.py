"""The command line: `overlapkit checkpoint ls|show|...`, `compare`, `doctor`, `explain` and `plan`.

Exit status: 0 all is well, 1 a checkpoint or trace is damaged, two checkpoints differ or the doctor found
something weak (or the work failed), 2 wrong usage.
What takes long to import is imported by the command that needs it.
"""

import contextlib
import functools
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from overlapkit import __version__, cli_doctor, cli_explain, cli_plan

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
checkpoint = typer.Typer(
    no_args_is_help=True,
    help="Look at, check, compare and convert checkpoints.",
    epilog="Exit status: 0 all is well, 1 damaged or different (or it failed), 2 wrong usage.",
)
app.add_typer(checkpoint, name="checkpoint")

Where = Annotated[
    str, typer.Argument(help="A directory of checkpoints (its newest), or one's folder step-N; or a URL.")
]
StepArgument = Annotated[int | None, typer.Argument(help="Which checkpoint; the newest where not given.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _print_versions(asked: bool) -> None:
    """What a report of a fault has to name, and nothing else."""
    if asked:
        import torch

        print(f"overlapkit {__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
        raise typer.Exit


@app.callback()
def overlapkit(
    versions: Annotated[
        bool, typer.Option("--version", help="Print versions.", is_eager=True, callback=_print_versions)
    ] = False,
) -> None:
    """Parts for PyTorch training loops whose lanes run at once."""


@checkpoint.command()
def ls(
    directory: Annotated[str, typer.Argument(help="A directory of checkpoints, or its URL.")],
    check: Annotated[bool, typer.Option("--verify", help="Read every byte against its checksum.")] = False,
    as_json: AsJson = False,
) -> None:
    """List a directory's checkpoints. Exit status 1 where one is damaged."""
    with _exit_status():
        from overlapkit.checkpoint import list_checkpoints, tables

        with contextlib.ExitStack() as bars:

            def bar(step: int) -> Any:
                bars.close()
                return bars.enter_context(tables.progress_bar(f"step-{step}"))

            found = list_checkpoints(directory, check=check, progress=bar)
        if as_json:
            tables.print_json(tables.list_as_json(found))
        else:
            tables.print_list(found)
            if not found:
                _complain(f"{directory} holds no checkpoint")
            for listed in found:
                if listed.damage is not None:
                    _complain(listed.damage)
        _exit_unless(all(listed.state != "damaged" for listed in found))


@checkpoint.command()
def show(
    where: Where,
    step: StepArgument = None,
    rank: Annotated[int, typer.Option(help="Whose own values to show.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show a checkpoint's tensors (dtype, global shape, bytes, files) and all else that it holds."""
    with _exit_status():
        from overlapkit.checkpoint import describe, tables

        contents = describe(where, "latest" if step is None else step, rank=rank)
        if as_json:
            tables.print_json(tables.contents_as_json(contents))
        else:
            tables.print_contents(contents)


@checkpoint.command()
def verify(
    where: Where,
    step: StepArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Verify all checkpoints of the directory.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read checkpoints against their checksums; name file, tensor and bytes of all damage."""
    with _exit_status():
        from overlapkit.checkpoint import list_checkpoints, tables
        from overlapkit.checkpoint.finding import find_checkpoint
        from overlapkit.checkpoint.verification import find_damage

        if every and step is not None:
            raise ValueError(f"give step {step} or --all, not both")
        if every:
            folders = [listed.folder for listed in list_checkpoints(where)] or [find_checkpoint(where)]
        else:
            folders = [find_checkpoint(where, "latest" if step is None else step)]
        results = {}
        for folder in folders:
            with tables.progress_bar(folder.name) as progress:
                results[folder] = find_damage(folder, progress)
        if as_json:
            tables.print_json(
                [
                    {"folder": folder, "sound": not damage, "damage": tables.damage_as_json(damage)}
                    for folder, damage in results.items()
                ]
            )
        else:
            for folder, damage in results.items():
                print(f"{folder}\t{'damaged' if damage else 'sound'}")
                for place in damage:
                    _complain(place)
        _exit_unless(not any(results.values()))


@checkpoint.command()
def diff(first: Where, second: Where, as_json: AsJson = False) -> None:
    """Compare two checkpoints, whatever ranks wrote them. Exit status 1 where they differ."""
    with _exit_status():
        from overlapkit.checkpoint import diff as compare
        from overlapkit.checkpoint import tables

        with tables.progress_bar("comparing") as progress:
            found = compare(first, second, progress=progress)
        if as_json:
            tables.print_json(tables.difference_as_json(found))
        else:
            tables.print_difference(found)
        _exit_unless(found.same)


@checkpoint.command()
def export(
    where: Where,
    out: Annotated[str, typer.Argument(help="A folder; model.safetensors will be in it.")],
    only: Annotated[
        str | None, typer.Option(help="The key of the model; not needed where it is alone.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Cast to fp16, bf16, fp32 or fp64.")] = None,
    shard_size: Annotated[str, typer.Option(help="The most bytes in one file, such as 5GB or 4GiB.")] = "5GB",
) -> None:
    """Export a model as Hugging Face lays it out: model.safetensors, or several files with an index."""
    with _exit_status():
        from overlapkit.checkpoint import export as write
        from overlapkit.checkpoint import tables
        from overlapkit.checkpoint.exchange.casting import NAMES

        if dtype is not None and dtype not in NAMES:
            raise ValueError(f"--dtype {dtype}: give one of {', '.join(NAMES)}")
        wanted = None if dtype is None else NAMES[dtype]
        with tables.progress_bar("exporting") as progress:
            done = write(where, out, only=only, dtype=wanted, shard_size=shard_size, progress=progress)
        for path in done.files:
            print(path)
        for name, kept in done.tied.items():
            _complain(f"{name} shares the data of {kept}: it is written once, under that name")
        for name in done.left_out:
            _complain(f"{name} is no weight: it is left out")


@checkpoint.command("import")
def import_(
    source: Annotated[str, typer.Argument(help="A file of torch.save, or a folder of DCP; or a URL.")],
    directory: Annotated[str, typer.Argument(help="A directory of checkpoints; made if needed.")],
    step: Annotated[int, typer.Option(help="The step of the new checkpoint.")],
    key: Annotated[
        list[str] | None,
        typer.Option(help="Take this key only, as KEY or as KEY=NAME to name it anew. May be repeated."),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="KEY=KIND: KEY is a module, optimizer, object, tensor or value. May be repeated."),
    ] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option(help="KEY=FILE: a JSON list of the optimizer's parameters' names, in its order."),
    ] = None,
) -> None:
    """Make a checkpoint of a torch.save file or a DCP folder. Nothing but plain values is unpickled."""
    with _exit_status():
        from overlapkit.checkpoint import import_checkpoint, tables

        keys = {(pair := word.partition("="))[0]: pair[2] or pair[0] for word in key or ()}
        kinds: dict[str, Any] = _pairs("--kind", kind)
        files = _pairs("--parameters", parameters)
        names = {name: _names_in(file) for name, file in files.items()}
        with tables.progress_bar("importing") as progress:
            path = import_checkpoint(
                source,
                directory,
                step=step,
                keys=keys or None,
                kinds=kinds,
                parameters=names,
                progress=progress,
            )
        print(path)


def _pairs(option: str, words: list[str] | None) -> dict[str, str]:
    pairs = [word.partition("=") for word in words or ()]
    if wrong := [key for key, sign, value in pairs if not (key and sign and value)]:
        raise ValueError(f"{option} {wrong[0]}: give it as KEY=...")
    return {key: value for key, _, value in pairs}


def _names_in(file: str) -> Any:
    try:
        return json.loads(Path(file).read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None


@contextlib.contextmanager
def _exit_status() -> Iterator[None]:
    """Turn errors into a line on stderr and the exit status that the module docstring states."""
    try:
        yield
    except (typer.Exit, BrokenPipeError):  # said already; `| head` has seen enough
        raise
    except (
        ValueError,
        TypeError,
        ImportError,  # what reads URLs
        NotImplementedError,  # what does not write to them
        FileNotFoundError,
        FileExistsError,
        NotADirectoryError,
        IsADirectoryError,
    ) as error:
        _complain(f"error: {_told(error)}")
        raise typer.Exit(2) from None
    except (RuntimeError, OSError) as error:
        from overlapkit.checkpoint import CheckpointError
        from overlapkit.measure import TraceError

        if not isinstance(error, CheckpointError | TraceError | OSError):
            raise
        _complain(f"error: {_told(error)}")
        raise typer.Exit(1) from None


def _told(error: Exception) -> str:
    """The message; of the system's own errors what it says of which file, without a number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    return str(error)


def _complain(what: object) -> None:
    print(what, file=sys.stderr)


def _exit_unless(well: bool) -> None:
    if not well:
        raise typer.Exit(1)


def _guarded(command: Callable[..., bool]) -> Callable[..., None]:
    @functools.wraps(command)
    def run(**options: Any) -> None:
        with _exit_status():
            _exit_unless(command(**options))

    return run


app.command(epilog=cli_explain.COMPARED)(_guarded(cli_explain.compare))
app.command(epilog=cli_doctor.EXIT_STATUS)(_guarded(cli_doctor.doctor))
app.command(epilog=cli_explain.READ)(_guarded(cli_explain.explain))
app.command(epilog=cli_plan.EXIT_STATUS)(_guarded(cli_plan.plan))


def main() -> None:
    """Run the command line. What stdout's encoding does not know (a bar, a dot) is a question mark there."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    app()


if __name__ == "__main__":
    main()
