"""A small residual network for small images."""

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al., "Deep residual learning", 2015)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, inside, H, W) to (B, outside, H / stride, W / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Logits (B, classes) of images (B, 3, H, W)."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Classify."""
        x = self.blocks(F.relu(self.norm(self.stem(images))))
        return self.head(x.mean((2, 3)))
