"""The token variants read the same windows, and bytes are counted as they are."""

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import input_tokens
from harness import Measurement
from input_tokens import LOADER, MEMCPY, OURS, STATEFUL, Stream, sources, write_tokens

CPU = torch.device("cpu")
COUNT, WINDOW, BATCH = 20_001, 50, 8  # 400 windows, each with one token more: 50 batches


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torchdata's, by newer versions of torch
def test_every_variant_reads_each_window_once(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path, COUNT)
    expected = Counter(tuple(tokens[at : at + WINDOW + 1].tolist()) for at in range(0, COUNT - 1, WINDOW))
    assert len(expected) > 300  # text, not one pattern
    for name, source in sources(tmp_path, tokens, WINDOW, BATCH, CPU).items():
        dtype = torch.int64 if "DataLoader, " in name and "uint16" not in name else torch.uint16
        batches = [_whole(batch) for batch in source]
        assert [(batch.shape, batch.dtype) for batch in batches] == [((BATCH, WINDOW + 1), dtype)] * 50
        rows = [tuple(row) for batch in batches for row in batch.tolist()]
        assert Counter(rows) == expected, name
        assert rows != sorted(rows)


def _whole(batch: Any) -> torch.Tensor:
    """A row of inputs and targets holds one token more than either."""
    if isinstance(batch, torch.Tensor):
        return batch
    inputs, targets = batch
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    return torch.cat([inputs, targets[:, -1:]], 1)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int64])
def test_a_turn_takes_whole_batches_and_goes_on_where_it_ended(dtype: torch.dtype, monkeypatch: Any) -> None:
    """Bytes are those of the tokens as stored, whatever became of them."""
    batches = [torch.full((2, 5), number, dtype=dtype) for number in range(3)]
    clock = iter([0.0, 1.0, 5.0, 7.0])
    stream = Stream(batches, nbytes=30, device=CPU)  # two batches of 20 bytes
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert stream() == 1.0 / 40e-9
    assert stream.batch[0, 0] == 1
    assert stream() == 2.0 / 40e-9
    assert stream.batch[0, 0] == 0  # the next epoch
    assert stream.bytes_per_token == dtype.itemsize


def test_int64_on_the_host_is_seen() -> None:
    stream = Stream([torch.zeros(2, 5, dtype=torch.int64)], nbytes=1, device=CPU)
    stream()
    assert stream.bytes_per_token == 8
    rows = input_tokens.figures(_took(ours=1.0), {OURS: stream})
    assert {row.name: row.met for row in rows}["tokens, bytes a token on the host, ours"] is False


def test_goals() -> None:
    """Of memcpy a third, of the fastest DataLoader twenty times: in GB/s, from seconds a GB."""
    stream = Stream([torch.zeros(2, 5, dtype=torch.uint16)], nbytes=1, device=CPU)
    stream()

    def met(ours: float) -> list[bool | None]:
        rows = {row.name: row for row in input_tokens.figures(_took(ours), {OURS: stream})}
        assert rows["tokens, memcpy"].value == 10.0
        return [rows[f"tokens, ours beside {peer}"].met for peer in (MEMCPY, "DataLoader, 0 workers")]

    assert met(1 / 6.1) == [True, True]
    assert met(1 / 5.9) == [True, False]
    assert met(1 / 3.3) == [False, False]


def test_a_peer_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    assert STATEFUL not in sources(tmp_path, write_tokens(tmp_path, COUNT), WINDOW, BATCH, CPU)
    stream = Stream([torch.zeros(2, 5, dtype=torch.uint16)], nbytes=1, device=CPU)
    stream()
    rows = {row.name: row.value for row in input_tokens.figures(_took(ours=1.0), {OURS: stream})}
    assert rows[f"tokens, {STATEFUL} (pip install torchdata)"] is None


def test_a_gb_is_counted_right() -> None:
    tokens = np.zeros(500_000, np.uint16)
    start = time.perf_counter()
    seconds = input_tokens.memcpy(tokens)()
    assert seconds * 1e-3 < time.perf_counter() - start  # a MB took a thousandth of what is said of a GB


def _took(ours: float) -> dict[str, Measurement]:
    """Seconds a GB."""
    others = {MEMCPY: 0.1, LOADER: 0.2, "DataLoader, 0 workers": 1 / 0.3, "DataLoader, 1 worker": 1 / 0.1}
    return {name: Measurement(name, (value,)) for name, value in {**others, OURS: ours}.items()}
