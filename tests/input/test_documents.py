"""Documents packed into rows, against a walk over the tokens one by one."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapkit.input.documents import PackedTokens
from overlapkit.input.targets import PackedInputs, inputs_and_targets
from overlapkit.input.tokens import TokenShards
from tests.input.token_sets import load_set, write_set

Row = tuple[list[int], list[int], list[int]]


def walked(folder: Path, window: int) -> list[Row]:
    """Tokens, document numbers and positions of every window."""
    rows = []
    for shard in load_set(folder):
        lengths = np.diff(shard["offsets"]).tolist()
        owner = [number for number, length in enumerate(lengths) for _ in range(length)]
        tokens = shard["tokens"].tolist()
        for start in range(0, len(tokens) - window, window):
            documents, positions = [0], [0]
            for at in range(start + 1, start + window + 1):
                same = owner[at] == owner[at - 1]
                documents.append(documents[-1] + (not same))
                positions.append(positions[-1] + 1 if same else 0)
            rows.append((tokens[start : start + window + 1], documents, positions))
    return rows


def as_rows(batch: PackedTokens) -> list[Row]:
    return list(zip(*(field.tolist() for field in batch), strict=True))


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    window=st.integers(1, 12),
    shard_tokens=st.integers(5, 60),
    batch_size=st.integers(1, 5),
)
def test_any_documents_in_any_windows(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    window: int,
    shard_tokens: int,
    batch_size: int,
) -> None:
    if not any(lengths):
        lengths = [*lengths, 5]
    folder = write_set(tmp_path_factory.mktemp("set") / "x", lengths, shard_tokens)
    want = walked(folder, window)
    if not want:
        return
    shards = TokenShards(
        folder, window, batch_size, rank=0, world_size=1, shuffle=False, drop_last=False, pack="documents"
    )
    assert [row for batch in shards for row in as_rows(batch)] == want


def test_rows_are_those_of_plain_windows_in_the_same_order(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "x", [30, 7, 0, 41, 1, 1, 60, 9, 33], 50)
    plain = TokenShards(folder, 6, 4, rank=1, world_size=2, seed=3)
    packed = TokenShards(folder, 6, 4, rank=1, world_size=2, seed=3, pack="documents")
    assert [batch.tokens.tolist() for batch in packed] == [batch.tolist() for batch in plain]
    packed.load_state_dict(plain.state_dict())  # and a state of one is a state of the other


def test_documents_and_positions_go_straight_into_the_memory_that_is_offered(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "x", [3, 4, 5, 6])
    pool: list[torch.Tensor] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        pool.append(torch.full((math.prod(shape),), 77, dtype=torch.int32).to(dtype).view(shape))
        return pool[-1]

    shards = TokenShards(folder, 3, 5, rank=0, world_size=1, shuffle=False, pack="documents")
    (batch,) = shards.iter_into(empty)
    assert [tensor.dtype for tensor in pool] == [torch.uint16, torch.int32, torch.int32]
    assert all(field is made for field, made in zip(batch, pool, strict=True))
    assert as_rows(batch) == walked(folder, 3)[:5]


def test_many_documents_over_many_shards(tmp_path: Path) -> None:
    """The bisection has more than a step or two to go, from starts that differ by shard."""
    lengths = np.random.default_rng(0).integers(0, 40, size=400).tolist()
    folder = write_set(tmp_path / "x", lengths, 700)
    shards = TokenShards(folder, 16, 8, rank=0, world_size=1, drop_last=False, pack="documents")
    assert sorted(row for batch in shards for row in as_rows(batch)) == sorted(walked(folder, 16))


def test_inputs_and_targets_of_windows() -> None:
    for dtype in (torch.uint16, torch.uint32):
        top = 2 ** (8 * dtype.itemsize) - 1
        batch = torch.tensor([[0, 1, top], [top - 1, 3, 2]], dtype=dtype)
        inputs, targets = inputs_and_targets(batch)
        assert inputs.tolist() == [[0, 1], [top - 1, 3]]
        assert targets.tolist() == [[1, top], [3, 2]]
        assert all(made.dtype == torch.int64 and made.is_contiguous() for made in (inputs, targets))


def test_targets_do_not_cross_documents() -> None:
    batch = PackedTokens(
        torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]], dtype=torch.uint16),
        torch.tensor([[0, 0, 1, 2], [0, 0, 0, 0]], dtype=torch.int32),
        torch.tensor([[0, 1, 0, 0], [0, 1, 2, 3]], dtype=torch.int32),
    )
    made = inputs_and_targets(batch)
    assert isinstance(made, PackedInputs)
    assert made.inputs.tolist() == [[5, 6, 7], [1, 2, 3]]
    assert made.targets.tolist() == [[6, -100, -100], [2, 3, 4]]
    assert made.documents.tolist() == [[0, 0, 1], [0, 0, 0]]
    assert made.positions.tolist() == [[0, 1, 0], [0, 1, 2]]
    assert all(field.dtype == torch.int64 and field.is_contiguous() for field in made)


def test_attention_within_documents_is_that_of_each_document_alone(tmp_path: Path) -> None:
    """What the numbers are for: a row's outputs under the mask are those of its documents one by one."""
    folder = write_set(tmp_path / "x", [3, 5, 2, 7, 4])
    shards = TokenShards(folder, 10, 2, rank=0, world_size=1, pack="documents")
    (batch,) = shards
    inputs, _, documents, positions = inputs_and_targets(batch)
    torch.manual_seed(0)
    embed, place = torch.randn(30, 4), torch.randn(10, 4)

    def attend(tokens: torch.Tensor, at: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = (embed[tokens] + place[at])[None]
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)[0]

    for row in range(2):
        causal = torch.ones(10, 10, dtype=torch.bool).tril()
        same = documents[row][:, None] == documents[row][None]
        whole = attend(inputs[row], positions[row], causal & same)
        alone: list[Any] = []
        for number in documents[row].unique():
            part = inputs[row][documents[row] == number]
            alone.append(attend(part, torch.arange(len(part)), causal[: len(part), : len(part)]))
        torch.testing.assert_close(whole, torch.cat(alone))
