"""Two DALI pipelines in step: one reads files and finds the images' sizes, one decodes what is cut out.

Windows depend on sizes, and on random numbers that are ours: so they are worked out between the two.
"""

import os
from collections import deque
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from overlapkit.input.images.files import Files
from overlapkit.input.images.importing import import_dali
from overlapkit.input.images.job import Job


class Crop(Protocol):
    """What is cut out of an image."""

    substitutes: ClassVar[bool]  # what takes the place of a damaged file is counted as itself; else IGNORED

    @property
    def size(self) -> int:
        """Height and width of what comes out."""

    def draw(self, samples: np.ndarray, epoch: int) -> np.ndarray:
        """Random numbers of samples (n,), float64 (n, d)."""

    def inputs(self, extents: np.ndarray, draws: np.ndarray) -> dict[str, np.ndarray]:
        """What the built graph reads, by name."""

    def build(self, dali: Any, encoded: Any, device: str) -> tuple[Any, Any]:
        """DALI nodes: an image (size, size, 3) in uint8, and whether to flip it."""


@dataclass(frozen=True)
class Recipe:
    """How a file becomes a part of a batch.

    Attributes:
        files: All there are.
        crop: What is cut out.
        device: Where images are decoded and handed over.
        dtype: float32, float16 or bfloat16.
        layout: "NCHW" or "NHWC".
        mean: Of each channel, where pixels are in [0, 1].
        std: Of each channel.
    """

    files: Files
    crop: Crop
    device: torch.device
    dtype: torch.dtype
    layout: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Engine:
    """Batches through both pipelines, in the order in which they are pushed.

    Invariants:
        * `jobs` are the batches under way, oldest first: those whose encoded images are kept are in the
          second pipeline, the others in the first.
        * After any error, an interrupt too, it is of no further use: DALI says so of its pipelines, and
          what comes out next would no longer be what `jobs` says.

    Args:
        recipe: How a batch is made.
        batch_size: Images in the largest batch.
        threads: Threads of each pipeline.
        ahead: Batches in each pipeline at most; as many must be pushed before the first is pulled.
    """

    def __init__(self, recipe: Recipe, batch_size: int, threads: int, ahead: int) -> None:
        dali = import_dali()
        self._recipe = recipe
        self._ahead = ahead
        self._reading = _Runs(_read_pipeline(dali, batch_size, threads, ahead), ahead)
        self._build_decoding = partial(_decode_pipeline, dali, recipe, batch_size, threads, ahead)
        self._kept: deque[Any] = deque()  # encoded images: DALI reads them where they are
        self.jobs: deque[Job] = deque()

    @property
    def full(self) -> bool:
        """Whether a batch must be pulled before the next is pushed."""
        return len(self.jobs) == 2 * self._ahead

    def push(self, job: Job) -> None:
        """Begin a batch."""
        reading = len(self.jobs) - len(self._kept)
        self.jobs.append(job)
        if reading == self._ahead:  # the first batches all together: decoding begins with so many
            for _ in range(self._ahead - len(self._kept)):
                self._decode_next()
        paths = np.array([os.fsencode(self._recipe.files.paths[sample]) for sample in job.samples])
        self._reading.push(path=paths[:, None].view(np.uint8))  # zeros end the shorter ones, as in C

    def pull(self) -> tuple[Job, torch.Tensor]:
        """The oldest batch: images (n, 3, size, size) or (n, size, size, 3). Waits for them."""
        if not self._kept:
            self._decode_next()
        images = self._to_torch(self._decoding.pull(self._recipe.device)[0])
        self._kept.popleft()
        return self.jobs.popleft(), images

    def drain(self) -> None:
        """Throw away what is under way."""
        while self.jobs:
            self.pull()

    @cached_property
    def _decoding(self) -> "_Runs":
        """The second pipeline, built while the first one reads."""
        return _Runs(self._build_decoding(), self._ahead)

    def _decode_next(self) -> None:
        """Hand the oldest batch that is being read to the second pipeline."""
        job, decoding = self.jobs[len(self._kept)], self._decoding
        encoded, shapes = self._reading.pull()
        extents = shapes.as_array()[:, :2].astype(np.int64)
        decoding.push(encoded=encoded, **self._recipe.crop.inputs(extents, job.draws))
        self._kept.append(encoded)

    def _to_torch(self, images: Any) -> torch.Tensor:
        """No copy: DALI's memory belongs to the tensor from now on."""
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(images.as_tensor())
        return tensor.to(self._recipe.dtype)


class _Runs:
    """A DALI pipeline that is run ahead.

    Its first run starts `depth` of them, so nothing runs before as many have been fed.
    """

    def __init__(self, pipeline: Any, depth: int) -> None:
        self._pipeline = pipeline
        self._depth = depth
        self._fed = 0

    def push(self, **inputs: Any) -> None:
        for name, data in inputs.items():
            self._pipeline.feed_input(name, data)
        self._fed += 1
        if self._fed >= self._depth:
            self._pipeline.schedule_run()

    def pull(self, device: torch.device | None = None) -> Any:
        """The outputs of the oldest run, ordered before what the current stream of `device` is given next."""
        on_gpu = device is not None and device.type == "cuda"
        outputs = self._pipeline.share_outputs(torch.cuda.current_stream(device) if on_gpu else None)
        self._pipeline.release_outputs()
        return outputs


def _read_pipeline(dali: Any, batch_size: int, threads: int, ahead: int) -> Any:
    pipeline = dali.Pipeline(batch_size, threads, device_id=None, prefetch_queue_depth=ahead)
    with pipeline:
        path = dali.fn.external_source(name="path", dtype=dali.types.UINT8, ndim=1)
        encoded = dali.fn.io.file.read(path, dont_use_mmap=True)  # mapping costs a fault for every page
        pipeline.set_outputs(encoded, dali.fn.peek_image_shape(encoded))
    pipeline.build()
    return pipeline


def _decode_pipeline(dali: Any, recipe: Recipe, batch_size: int, threads: int, ahead: int) -> Any:
    on_gpu = recipe.device.type == "cuda"
    pipeline = dali.Pipeline(
        batch_size, threads, device_id=recipe.device.index if on_gpu else None, prefetch_queue_depth=ahead
    )
    half = recipe.dtype is torch.float16
    with pipeline:
        encoded = dali.fn.external_source(name="encoded", dtype=dali.types.UINT8, ndim=1, no_copy=True)
        image, flip = recipe.crop.build(dali, encoded, "mixed" if on_gpu else "cpu")
        pipeline.set_outputs(
            dali.fn.crop_mirror_normalize(
                image,
                mirror=flip,
                mean=[255 * value for value in recipe.mean],
                std=[255 * value for value in recipe.std],
                output_layout=recipe.layout[1:],
                dtype=dali.types.FLOAT16 if half else dali.types.FLOAT,
            )
        )
    pipeline.build()
    return pipeline
