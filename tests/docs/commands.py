"""The shell lines of the pages: which run as they stand, which shorter, and which not here, with the reason.

A line of none of these kinds is an error, so that no page shows a command that nobody has tried.
"""

import contextlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import typer

from overlapkit import cli

ROOT = Path(__file__).parents[2]

OPTIONS_ONLY = {
    "overlapkit doctor": "takes ten seconds and more; the page's Python block runs it once",
    "torchrun --nproc-per-node 8 -m overlapkit.cli doctor": "the same, on eight ranks",
    "python benchmarks/": "takes minutes; tests/benchmarks runs them shortened",
}
"""Beginnings of lines of which only the options are looked up, and why."""

NOT_RUN: dict[str, str] = {}
"""Beginnings of lines that cannot run in a test, and why."""


def run_lines(text: str) -> None:
    """Run a block's lines in the present folder."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        status = 0
        if words[-5:-1] == ["||", "test", "$?", "="]:  # a line that says which exit status it has
            words, status = words[:-5], int(words[-1])
        if not words or any(line.startswith(beginning) for beginning in NOT_RUN):
            continue
        if any(line.startswith(beginning) for beginning in OPTIONS_ONLY):
            _knows_options(words)
        else:
            _run(words, status)


def _run(words: list[str], status: int) -> None:
    if words[0] == "overlapkit":
        _command_line(words, status)
    elif words[0] == "make":  # what takes minutes: that there is such a target, and what it would run
        _succeeds(["make", "--dry-run", *words[1:]], ROOT)
    elif words[0] == "python":
        _succeeds([sys.executable, *words[1:]], Path.cwd())
    else:
        raise AssertionError(f"tests/docs/commands.py does not know how to try: {shlex.join(words)}")


def _knows_options(words: list[str]) -> None:
    given = {word.split("=")[0] for word in words if word.startswith("--")}
    if words[0] == "python":
        known = set(re.findall(r"--[a-z-]+", _succeeds([sys.executable, words[1], "--help"], ROOT)))
        given = {word for word in given if word != "--its-options"}  # of the script that netlab runs
    else:
        command = typer.main.get_command(cli.app).commands[words[-1 - words[::-1].index("doctor")]]
        known = {name for parameter in command.params for name in parameter.opts} | {"--nproc-per-node"}
    assert given <= known, f"{shlex.join(words)}: no such option: {sorted(given - known)}"


def _command_line(words: list[str], status: int) -> None:
    """`overlapkit ...` in this process, which has torch already; `> FILE` at the end is the shell's."""
    with contextlib.ExitStack() as stack:
        if ">" in words:
            words, (file,) = words[: words.index(">")], words[words.index(">") + 1 :]
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(file, "w"))))
        sys.argv = words
        try:
            cli.main()
        except SystemExit as end:
            if (end.code or 0) != status:
                raise AssertionError(f"{shlex.join(words)}: exit status {end.code}, not {status}") from end


def _succeeds(words: list[str], folder: Path) -> str:
    ran = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, f"{shlex.join(words)}\n{ran.stdout}{ran.stderr}"
    return ran.stdout
