"""Run an example's file as a script: in this process, which is warm, or on ranks as torchrun would."""

import io
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_S = 280.0
"""For all commands together, on a machine that others keep busy; such tests are marked timeout(300)."""


@contextmanager
def beside(script: str) -> Iterator[Path]:
    """What a script imports from its own folder can be imported; it is forgotten again afterwards."""
    path = EXAMPLES / script
    with mock.patch.object(sys, "path", [str(path.parent), *sys.path]):
        try:
            yield path
        finally:
            for name, module in list(sys.modules.items()):
                if str(getattr(module, "__file__", None)).startswith(str(EXAMPLES)):
                    del sys.modules[name]


def run(script: str, *words: object) -> None:
    """`python examples/SCRIPT WORDS`, on a machine without a GPU."""
    with (
        beside(script) as path,
        mock.patch.object(sys, "argv", [str(path), *map(str, words)]),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
    ):
        runpy.run_path(str(path), run_name="__main__")


def run_on_ranks(world: int, *commands: tuple[object, ...]) -> str:
    """Each command, a script and its words, one after the other on all ranks, in a group of its own.

    Returns:
        What rank 0 printed.
    """

    def all_of_them(rank: int) -> str:
        dist.destroy_process_group()  # the scripts join one themselves
        store, join = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"])), dist.init_process_group
        printed = io.StringIO()
        for number, (script, *words) in enumerate(commands):
            there = {"store": dist.PrefixStore(f"{number}", store), "rank": rank, "world_size": world}
            with (
                mock.patch.object(dist, "init_process_group", lambda *_, there=there: join("gloo", **there)),
                redirect_stdout(printed),
            ):
                run(str(script), *words)
        return printed.getvalue()

    return run_ranks(world, all_of_them, timeout=PATIENCE_S)[0]


def refusal(script: str, *words: object) -> str:
    """The last line that a script leaves on stderr which ends with the status of wrong usage."""
    with redirect_stderr(io.StringIO()) as stderr, pytest.raises(SystemExit) as exit:
        run(script, *words)
    assert exit.value.code == 2
    return stderr.getvalue().splitlines()[-1]
