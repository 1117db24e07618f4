"""Raw tokens to what a language model is trained on: int64 inputs and targets, made on the device."""

from typing import NamedTuple, overload

import torch

from overlapkit.input.documents import PackedTokens

IGNORED = -100
"""The target or label that cross entropies leave out by default, torch's and ours."""


class PackedInputs(NamedTuple):
    """What a model is given of rows of documents; each int64 (B, T).

    Attributes:
        inputs: Tokens.
        targets: The token that follows; -100 where that is another document's first.
        documents: Numbers that are equal within a row where tokens are of one document.
        positions: The token's place in its document, or in what the row holds of it.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor


@overload
def inputs_and_targets(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def inputs_and_targets(batch: PackedTokens) -> PackedInputs: ...
def inputs_and_targets(
    batch: torch.Tensor | PackedTokens,
) -> tuple[torch.Tensor, torch.Tensor] | PackedInputs:
    """Make inputs and targets, each int64 (B, T) and contiguous, on the device that the batch is on.

    `DeviceLoader(shards, device, transform=inputs_and_targets)` calls it on the device, so that tokens
    cross the bus as they are stored.

    Args:
        batch: What TokenShards or Mixture yields: tokens (B, T + 1), or PackedTokens.

    Returns:
        (inputs, targets), or PackedInputs.
    """
    if isinstance(batch, torch.Tensor):
        return batch[:, :-1].to(torch.int64), batch[:, 1:].to(torch.int64)
    inputs, targets = inputs_and_targets(batch.tokens)
    targets.masked_fill_(batch.documents[:, 1:] != batch.documents[:, :-1], IGNORED)
    return PackedInputs(
        inputs, targets, batch.documents[:, :-1].to(torch.int64), batch.positions[:, :-1].to(torch.int64)
    )
