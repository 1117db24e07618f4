"""Every code block of every page runs as it stands there, in order, in a folder of its own."""

import contextlib
import importlib
import io
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from tests.docs import commands, files, stage
from tests.docs.blocks import PAGES, ROOT, RUN, SHOWN, Block, Chain, chains
from tests.ranks import RanksFailed, run_ranks

EDITS: dict[str, list[tuple[str, str]]] = {
    "docs/doctor.md": [('"/ckpt"', '"ckpt"')],
    "docs/plan.md": [("plan.probe_link()", "plan.probe_link(sizes=(4096, 65536), repeats=1)")],
    "docs/object_stores.md": [("s3://", "memory://"), ('"/lustre', '"lustre'), ('"/nvme', '"nvme')],
    "docs/parallel.md": [('"cuda", (data, tensor)', '"cpu", (1, 2)')],
}
"""What a page says and this machine has not: the text, and what is run in its place."""

NOT_RUN = {
    (
        "docs/parallel.md",
        "import netlab",
    ): "needs root, and a train.py: tests/benchmarks/test_netlab.py runs it",
}
"""Blocks that cannot run here: page and first line, and why."""

PARTS = ("checkpoint", "doctor", "input.loader", "kernels", "measure", "optim", "parallel", "plan")
CHAINS = [
    chain for page in PAGES for chain in chains(page) if any(block.kind in RUN for block in chain.blocks)
]


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Each chain forks from this process: what is imported here is imported once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("torch._inductor.compile_fx", *(f"overlapkit.{part}" for part in PARTS)):
            importlib.import_module(name)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page: str) -> None:
    kinds = {block.kind for chain in chains(page) for block in chain.blocks}
    assert kinds <= RUN | SHOWN, f"{page}: a block is one of {sorted(RUN | SHOWN)}; output is text"


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_blocks_run(chain: Chain, tmp_path: Path) -> None:
    run_chain(chain, tmp_path)


def test_lists_of_exceptions_name_what_is_there() -> None:
    first = {(block.page, block.text.splitlines()[0]) for chain in CHAINS for block in chain.blocks}
    assert NOT_RUN.keys() <= first
    stale = [
        (page, old)
        for page, pairs in EDITS.items()
        for old, _ in pairs
        if old not in (ROOT / page).read_text()
    ]
    assert stale == []


def run_chain(chain: Chain, folder: Path) -> list[str]:
    """Run a chain's blocks on its ranks, in processes forked from this one; what each rank printed."""
    return run_ranks(max(chain.ranks, 1), _rank, chain, folder, timeout=100)


def _rank(rank: int, chain: Chain, folder: Path) -> str:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch")  # torchdata's, too: what they say of their own insides
    if not chain.ranks:
        dist.destroy_process_group()
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    os.chdir(folder)
    files.stand_in_for_tensorboard()
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in chain.blocks:
            if block.kind in RUN and (block.page, block.text.splitlines()[0]) not in NOT_RUN:
                _run(block, names)
        for value in list(names.values()):  # threads end before the process does
            if callable(getattr(value, "close", None)) and not isinstance(value, type | ModuleType):
                value.close()
    return printed.getvalue()


def _run(block: Block, names: dict[str, Any]) -> None:
    text = block.text
    for old, new in EDITS.get(block.page, []):
        text = text.replace(old, new)
    files.make(text)
    if block.file is not None:
        Path(block.file).write_text(text)
    elif block.kind == "sh":
        commands.run_lines(text)
    else:
        stage.run_block(text, block.line, ROOT / block.page, names)


def test_a_block_that_fails_names_the_line_of_its_page(tmp_path: Path) -> None:
    block = Block("docs/kernels.md", 41, "python", "x = 1\nassert x == 2\n")
    with pytest.raises(RanksFailed, match=r'docs/kernels.md", line 42'):
        run_chain(Chain(block.page, blocks=[block]), tmp_path)


def test_what_a_block_needs_is_what_it_reads_before_it_sets_it() -> None:
    text = "model = ok.shard(model)\nopt = f(opt=1)\nfor x, y in loader:\n    g = lambda: x + step + len(y)\n"
    assert stage.needed(compile(text, "page", "exec")) == ["ok", "model", "f", "loader", "step"]
