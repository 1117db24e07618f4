"""The variants that read from disk give the same windows, and what is read is counted."""

from pathlib import Path

import numpy as np
import pytest
import torch

import input_cold
from input_cold import BATCH, OURS, PEER, ROW, WINDOW, evict, seconds, sources, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cold")
    write(made, 2**24)
    if not evict(made):
        pytest.skip("this file system keeps files in memory")
    return made


def test_every_variant_reads_windows_of_the_same_tokens(folder: Path) -> None:
    tokens = np.fromfile(folder / "tokens.bin", np.uint16)
    starts = {tuple(tokens[at : at + 8].tolist()) for at in range(0, len(tokens) - WINDOW, WINDOW)}
    for name, source in sources(folder).items():
        batch = next(iter(source(3)))
        rows = batch if name == OURS else torch.cat([batch[0], batch[1][:, -1:]], 1)
        assert rows.shape == (BATCH, WINDOW + 1)
        assert {tuple(row[:8]) for row in rows.tolist()} <= starts, name


def test_what_is_read_is_counted(folder: Path) -> None:
    read: dict[str, float] = {}
    for name in (OURS, PEER):
        assert seconds(name, lambda: sources(folder)[name](0), folder, 4, read) > 0  # noqa: B023
    assert 1 < read[OURS] <= 2 * input_cold.PAGE / ROW
    assert PEER in read  # nothing, where its first batch has read all of so small a set
