"""The evaluation crop: the short side resized to one length, the middle of it cut out."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np


@dataclass(frozen=True)
class CentreCrop:
    """Resize and centre crop in one step, in torchvision's arithmetic.

    Attributes:
        size: Height and width of what comes out.
        short: What the short side is resized to, at least `size`.
    """

    size: int
    short: int

    substitutes: ClassVar[bool] = False

    def draw(self, samples: np.ndarray, epoch: int) -> np.ndarray:
        """Nothing is left to chance: float64 (n, 0)."""
        return np.empty((len(samples), 0))

    def inputs(self, extents: np.ndarray, draws: np.ndarray) -> dict[str, np.ndarray]:
        """What `build` reads for images of extents (n, 2): heights and widths."""
        start, end = self.windows(extents)
        return {"start": start.astype(np.float32), "end": end.astype(np.float32)}

    def build(self, dali: Any, encoded: Any, device: str) -> tuple[Any, Any]:
        """The nodes of a DALI graph that make an image (size, size, 3) in uint8, and 0 for no flip."""
        start = dali.fn.external_source(name="start", dtype=dali.types.FLOAT, ndim=1)
        end = dali.fn.external_source(name="end", dtype=dali.types.FLOAT, ndim=1)
        image = dali.fn.decoders.image(encoded, device=device)
        return dali.fn.resize(image, size=(self.size, self.size), roi_start=start, roi_end=end), 0

    def windows(self, extents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What becomes the crop, in pixels of the images themselves.

        Args:
            extents: Heights and widths, int64 (n, 2).

        Returns:
            Top and left, and bottom and right: float64 (n, 2) each.
        """
        resized = self.short * extents // extents.min(1, keepdims=True)
        corner = np.rint((resized - self.size) / 2)
        scale = extents / resized
        return corner * scale, (corner + self.size) * scale
