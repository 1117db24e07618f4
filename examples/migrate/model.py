"""The model, as it was before the migration and is after it: a small language model over bytes."""

from torch import Tensor, nn


class LanguageModel(nn.Module):
    """Calling it with bytes and the bytes that follow, int64 (B, T), gives the mean loss."""

    def __init__(self, width: int = 128, layers: int = 2, heads: int = 4, window: int = 64) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(window, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.loss = nn.CrossEntropyLoss()
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(window))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean cross entropy, a scalar."""
        hidden = self.blocks(self.byte(x) + self.place.weight, self.mask, is_causal=True)
        return self.loss(self.head(hidden).flatten(0, 1), y.flatten())
