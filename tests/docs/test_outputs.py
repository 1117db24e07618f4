"""Each text block of docs/scaling_out.md is what the block before it prints: a simulation repeats exactly."""

import contextlib
import io
import shlex
import sys
from pathlib import Path

import pytest

from overlapkit import cli
from tests.docs.blocks import Block, chains

BLOCKS = [block for chain in chains("docs/scaling_out.md") for block in chain.blocks]


def printed(block: Block, names: dict[str, object]) -> str:
    """What a block prints in the present folder."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if block.kind == "python":
            exec(compile(block.text, block.page, "exec"), names)
        else:
            sys.argv = shlex.split(block.text.replace("\\\n", " "))
            with pytest.raises(SystemExit) as ended:
                cli.main()
            assert not ended.value.code
    return out.getvalue()


def outputs() -> list[str]:
    """Of the page's blocks, in order, as it shows them: without what went into a simulation."""
    names: dict[str, object] = {}
    found = []
    for block in BLOCKS:
        if block.kind != "text":
            found.append(printed(block, names).split("\nfrom:\n")[0])
    return ["\n".join(line.rstrip() for line in one.strip("\n").splitlines()) for one in found if one]


def test_outputs_are_those_of_the_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    shown = [block.text.strip("\n") for block in BLOCKS if block.kind == "text"]
    assert shown == outputs()
    assert len(shown) == 8
