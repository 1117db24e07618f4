"""The shell lines of the pages: which run as they stand, which shorter, and which not here, with the reason.

A line of none of these kinds is an error, so that no page shows a command that nobody has tried.
"""

import contextlib
import multiprocessing
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import typer

from overlapkit import cli

ROOT = Path(__file__).parents[2]

OPTIONS_ONLY = {
    "overlapkit doctor": "takes ten seconds and more; the page's Python block runs it once",
    "torchrun --nproc-per-node 8 -m overlapkit doctor": "the same, on eight ranks",
    "python benchmarks/": "takes minutes; tests/benchmarks runs them shortened",
}
"""Beginnings of lines of which only the options are looked up, and why."""

NOT_RUN = {
    "pip install": "needs a network; tests/test_wheel.py installs what is built",
}
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
    elif words[0] == "rm":
        assert not any(word.startswith(("/", "~", "..")) for word in words), "pages remove what they made"
        _succeeds(words, Path.cwd())
    elif words[0] == "make":  # what takes minutes: that there is such a target, and what it would run
        _succeeds(["make", "--dry-run", *words[1:]], ROOT)
    elif words[0] == "python":
        _script(words[1:])
    elif words[0] == "torchrun":
        _torchrun(words[1:])
    else:
        raise AssertionError(f"tests/docs/commands.py does not know how to try: {shlex.join(words)}")


def _knows_options(words: list[str]) -> None:
    given = {word.split("=")[0] for word in words if word.startswith("--")}
    if words[0] == "python":
        sources = [ROOT / words[1], ROOT / "benchmarks/harness.py", ROOT / "benchmarks/budget.py"]
        known = {name for path in sources for name in re.findall(r'"(--[a-z-]+)"', path.read_text())}
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


def _script(words: list[str]) -> None:
    """`python train.py`, in this process."""
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def _torchrun(words: list[str]) -> None:
    """`torchrun --nproc-per-node 2 train.py`: the same variables, in processes forked from this one."""
    assert words[0] == "--nproc-per-node", f"torchrun {shlex.join(words)}: say how many ranks first"
    world = int(words[1])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        multiprocessing.Process(target=_rank, args=(rank, world, port, words[2:])) for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=90)
        rank.kill()
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * world, f"torchrun {shlex.join(words)}"


def _rank(rank: int, world: int, port: int, words: list[str]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    _script(words)


def _succeeds(words: list[str], folder: Path) -> str:
    ran = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, f"{shlex.join(words)}\n{ran.stdout}{ran.stderr}"
    return ran.stdout
