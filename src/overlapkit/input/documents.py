"""Which document each token of a row belongs to, and how far into it the token stands."""

from typing import NamedTuple

import numpy as np
import torch


class PackedTokens(NamedTuple):
    """Rows cut from a stream of documents.

    Attributes:
        tokens: (B, T + 1), uint16 or uint32.
        documents: int32 (B, T + 1): 0 for the row's first document, 1 for the next, and so on. Two tokens
            of a row may attend to each other where these are equal.
        positions: int32 (B, T + 1): 0 at the row's first token and at each document's first. A document
            that began in an earlier row is counted anew, so that no position exceeds T.
    """

    tokens: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor


def write_documents(
    batch: PackedTokens, offsets: np.ndarray, local: np.ndarray, first: np.ndarray, last: np.ndarray
) -> None:
    """Fill in a batch's documents and positions.

    Args:
        batch: Of B rows.
        offsets: int64; document d of a row's shard is tokens [offsets[d], offsets[d + 1]) of the shard.
        local: A row's first token, counted in its shard, int64 (B,).
        first: The document that it is in, int64 (B,).
        last: The one that the row's last token is in, int64 (B,).
    """
    rows, length = batch.tokens.shape
    counts = last - first + 1
    row = np.repeat(np.arange(rows), counts)
    ordinal = count_up(counts)
    document = first[row] + ordinal
    begin = np.maximum(offsets[document] - local[row], 0)
    lengths = np.minimum(offsets[document + 1] - local[row], length) - begin
    if not lengths.all():  # empty documents: they get no number
        kept = lengths > 0
        row, begin, lengths = row[kept], begin[kept], lengths[kept]
        ordinal = count_up(np.bincount(row, minlength=rows))
    every = np.arange(rows * length, dtype=np.int32)
    start = (row * length + begin).astype(np.int32)
    np.subtract(every, np.repeat(start, lengths), out=batch.positions.numpy().reshape(-1))
    batch.documents.numpy().reshape(-1)[:] = np.repeat(ordinal.astype(np.int32), lengths)


def count_up(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... count - 1 for each of some counts, int64 (sum,)."""
    within: np.ndarray = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return within
