"""The training crop: a window of random area and aspect, resized, perhaps flipped."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from overlapkit.input.images.draws import uniforms

TRIES = 10
_DRAWS = 2 * TRIES + 3


@dataclass(frozen=True)
class RandomCrop:
    """Inception's crop (Szegedy et al., "Going deeper with convolutions", 2014), as torchvision draws it.

    Attributes:
        size: Height and width of what comes out.
        scale: Range of the window's area, as a share of the image's.
        ratio: Range of its width over its height, drawn on a logarithmic scale.
        flip: Probability of a horizontal flip.
        seed: Of all that is drawn.
    """

    size: int
    scale: tuple[float, float]
    ratio: tuple[float, float]
    flip: float
    seed: int

    substitutes: ClassVar[bool] = True

    def draw(self, samples: np.ndarray, epoch: int) -> np.ndarray:
        """What chance says about samples (n,): float64 (n, draws)."""
        return uniforms(samples, _DRAWS, self.seed, epoch)

    def inputs(self, extents: np.ndarray, draws: np.ndarray) -> dict[str, np.ndarray]:
        """What `build` reads for images of extents (n, 2): heights and widths."""
        start, shape = self.windows(extents, draws)
        flip = draws[:, -1] < self.flip
        return {
            "start": start.astype(np.int32),
            "shape": shape.astype(np.int32),
            "flip": flip.astype(np.int32),
        }

    def build(self, dali: Any, encoded: Any, device: str) -> tuple[Any, Any]:
        """The nodes of a DALI graph that make an image (size, size, 3) in uint8, and say whether to flip it.

        Only the window is decoded.
        """
        integers = {"dtype": dali.types.INT32}
        start = dali.fn.external_source(name="start", ndim=1, **integers)
        shape = dali.fn.external_source(name="shape", ndim=1, **integers)
        flip = dali.fn.external_source(name="flip", ndim=0, **integers)
        image = dali.fn.decoders.image_slice(
            encoded, device=device, start=start, shape=shape, axis_names="HW"
        )
        return dali.fn.resize(image, size=(self.size, self.size)), flip

    def windows(self, extents: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where windows lie in images.

        The first of ten tries that fits is taken; where none does, the largest window in the middle whose
        aspect is in range.

        Args:
            extents: Heights and widths, int64 (n, 2).
            draws: From `draw`, float64 (n, draws).

        Returns:
            Top and left, and heights and widths: int64 (n, 2) each.
        """
        (low, high), (narrow, wide) = self.scale, self.ratio
        area = extents.prod(1, keepdims=True) * (low + draws[:, :TRIES] * (high - low))
        aspect = narrow * (wide / narrow) ** draws[:, TRIES : 2 * TRIES]
        sides = np.rint(np.sqrt(np.stack([area / aspect, area * aspect], axis=2))).astype(np.int64)
        fits = ((sides > 0) & (sides <= extents[:, None])).all(2)
        first = np.take_along_axis(sides, fits.argmax(1)[:, None, None], 1)[:, 0]
        room = extents - first + 1
        start = (draws[:, 2 * TRIES : -1] * room).astype(np.int64)
        if not (fitting := fits.any(1)).all():
            last = self._largest(extents)
            first = np.where(fitting[:, None], first, last)
            start = np.where(fitting[:, None], start, (extents - last) // 2)
        return start, first

    def _largest(self, extents: np.ndarray) -> np.ndarray:
        """The largest windows (n, 2) with an aspect in range."""
        height, width = extents.T
        tall = np.minimum(height, np.rint(width / self.ratio[0]).astype(np.int64))
        broad = np.minimum(width, np.rint(height * self.ratio[1]).astype(np.int64))
        largest: np.ndarray = np.maximum(np.stack([tall, broad], axis=1), 1)
        return largest
