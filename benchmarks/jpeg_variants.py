"""The ways to turn JPEG files into training batches that benchmarks/input.py compares; all do the same work.

A random crop of 8 to 100 % of the area is resized to `size` x `size` with an antialiasing triangle filter,
flipped at random, and normalised to float32 NCHW; each epoch is shuffled. A variant is a function of a Job
that imports what it needs and returns `open`; `open()` constructs the loader and returns its batches
(images, labels), epoch after epoch.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

AREA, ASPECT, ATTEMPTS = (0.08, 1.0), (3 / 4, 4 / 3), 10
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)

Batches = Iterator[tuple[Tensor, Tensor]]
Open = Callable[[], Batches]


@dataclass(frozen=True)
class Job:
    """What every variant is given.

    Args:
        files: Paths; the label of file i is i, so that a test can tell that each came once an epoch.
        batch: Images a batch; divides the number of files.
        size: Side of the square that comes out.
        threads: Threads that decode, for the variants that have threads.
        epochs: How often the files are gone through.
        device: Where ours and DALI leave their batches.
    """

    files: Sequence[str]
    batch: int
    size: int
    threads: int
    epochs: int
    device: torch.device

    @property
    def labels(self) -> list[int]:
        return list(range(len(self.files)))


def ours(job: Job) -> Open:
    from overlapkit.input import images

    def open_() -> Batches:
        loader = images.train_loader(
            job.files, job.labels, job.batch, size=job.size, threads=job.threads, device=job.device
        )
        return (batch for _ in range(job.epochs) for batch in loader)

    return open_


def dali(job: Job) -> Open:
    """DALI alone: batches stay where it left them."""
    pipeline = _dali_pipeline(job)

    def open_() -> Batches:
        made = pipeline()
        made.build()
        return (_as_tensors(made.run()) for _ in range(job.epochs * len(job.files) // job.batch))

    return open_


def dali_iterator(job: Job) -> Open:
    """DALI through its own iterator for PyTorch, which copies each batch."""
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    pipeline = _dali_pipeline(job)

    def open_() -> Batches:
        batches = DALIGenericIterator(pipeline(), ["images", "labels"], reader_name="files", auto_reset=True)
        return ((made["images"], made["labels"]) for _ in range(job.epochs) for (made,) in batches)

    return open_


def data_loader(workers: int, job: Job) -> Open:
    """DataLoader with a transform in Pillow and torch, as torchvision's reference scripts have it."""
    from PIL import Image

    dataset = _Photographs(job, Image)

    def open_() -> Batches:
        loader: DataLoader[Any] = DataLoader(
            dataset, job.batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        )
        return ((images, labels) for _ in range(job.epochs) for images, labels in loader)

    return open_


def thread_pool(job: Job) -> Open:
    """Threads with a decoder that releases the GIL; each takes a share of a batch, three batches ahead."""
    import simplejpeg
    from PIL import Image

    def decode(file: str, out: Tensor) -> None:
        pixels = Image.fromarray(simplejpeg.decode_jpeg(Path(file).read_bytes()))
        _normalise(_crop(pixels, job.size, Image), out)

    def share(indices: Tensor, out: Tensor) -> None:
        for index, image in zip(indices.tolist(), out, strict=True):
            decode(job.files[index], image)

    def open_() -> Batches:
        return _ahead(ThreadPoolExecutor(job.threads), share, job)

    return open_


def spdl(job: Job) -> Open:
    """SPDL's pipeline: its decoder and FFmpeg's crop, scale and flip; each thread makes a batch."""
    import spdl.io
    import spdl.io.utils
    import spdl.pipeline

    try:
        spdl.io.utils.get_ffmpeg_versions()
    except RuntimeError as error:  # it looks for FFmpeg's libraries when they are first used
        raise ImportError(f"SPDL found no FFmpeg: {error}") from error

    def decode(index: int) -> Any:
        packets = spdl.io.demux_image(job.files[index])
        left, top, width, height = _box(packets.codec.width, packets.codec.height)
        flip = ",hflip" if random.random() < 0.5 else ""
        scale = f"scale={job.size}:{job.size}:flags=bilinear{flip}"
        chain = f"crop={width}:{height}:{left}:{top},{scale},format=pix_fmts=rgb24"
        return spdl.io.decode_packets(packets, filter_desc=chain)

    def make(indices: Tensor) -> tuple[Tensor, Tensor]:
        frames = [decode(index) for index in indices.tolist()]
        out = torch.empty(len(frames), 3, job.size, job.size)
        _normalise(spdl.io.to_torch(spdl.io.convert_frames(frames)), out)
        return out, indices

    def open_() -> Batches:
        made = spdl.pipeline.PipelineBuilder().add_source(_shuffled(job))
        made = made.pipe(make, concurrency=job.threads, output_order="input")  # else epochs run together
        return _spdl_batches(made.add_sink(2).build(num_threads=job.threads))

    return open_


VARIANTS: dict[str, tuple[Callable[[Job], Open], str]] = {
    "ours": (ours, "pip install 'overlapkit[images]'"),
    "bare DALI": (dali, "pip install 'overlapkit[images]'"),
    "DALI's torch iterator": (dali_iterator, "pip install 'overlapkit[images]'"),
    "DataLoader, 0 workers": (partial(data_loader, 0), "pip install pillow"),
    "DataLoader, 1 worker": (partial(data_loader, 1), "pip install pillow"),
    "DataLoader, 2 workers": (partial(data_loader, 2), "pip install pillow"),
    "thread pool": (thread_pool, "pip install simplejpeg pillow"),
    "SPDL": (spdl, "pip install spdl; apt-get install ffmpeg"),
}
"""Each way with how to install what it needs."""


class _Photographs(Dataset[tuple[Tensor, int]]):
    def __init__(self, job: Job, pillow: Any) -> None:
        self.job, self.pillow = job, pillow

    def __len__(self) -> int:
        return len(self.job.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        size = self.job.size
        with self.pillow.open(self.job.files[index]) as photograph:
            pixels = _crop(photograph.convert("RGB"), size, self.pillow)
        out = torch.empty(3, size, size)
        _normalise(pixels, out)
        return out, index


def _dali_pipeline(job: Job) -> Callable[[], Any]:
    """What makes the pipeline: DALI's fused decoder, which decodes the crop alone."""
    from nvidia.dali import fn, pipeline_def, types

    gpu = job.device.type == "cuda"

    @pipeline_def(
        batch_size=job.batch, num_threads=job.threads, device_id=torch.cuda.current_device() if gpu else None
    )
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(
            files=list(job.files), labels=job.labels, shuffle_after_epoch=True, name="files"
        )
        images = fn.decoders.image_random_crop(
            encoded,
            device="mixed" if gpu else "cpu",
            random_area=AREA,
            random_aspect_ratio=ASPECT,
            num_attempts=ATTEMPTS,
        )
        images = fn.resize(images, size=(job.size, job.size), interp_type=types.INTERP_LINEAR, antialias=True)
        mirror = fn.random.coin_flip()
        return fn.crop_mirror_normalize(images, mirror=mirror, mean=MEAN, std=STD, dtype=types.FLOAT), labels

    return pipeline


def _as_tensors(outputs: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
    """DALI's own memory, valid until its next batches are made."""
    images, labels = (torch.from_dlpack(output.as_tensor()) for output in outputs)
    return images, labels


def _ahead(pool: ThreadPoolExecutor, share: Callable[[Tensor, Tensor], None], job: Job) -> Batches:
    """Batches of the pool's work, up to three under way."""
    waiting: deque[tuple[Tensor, Tensor, list[Future[None]]]] = deque()
    part = -(-job.batch // job.threads)
    with pool:
        for indices in (*_shuffled(job), None, None):
            if indices is not None:
                out = torch.empty(len(indices), 3, job.size, job.size)
                parts = zip(indices.split(part), out.split(part), strict=True)
                waiting.append((out, indices, [pool.submit(share, *one) for one in parts]))
            if len(waiting) == 3 or (indices is None and waiting):
                images, labels, futures = waiting.popleft()
                for future in futures:
                    future.result()
                yield images, labels


def _spdl_batches(pipeline: Any) -> Batches:
    with pipeline.auto_stop():
        yield from pipeline


def _shuffled(job: Job) -> Iterator[Tensor]:
    """Indices, int64 (batch,), of all epochs."""
    for _ in range(job.epochs):
        yield from torch.randperm(len(job.files)).split(job.batch)


def _box(width: int, height: int) -> tuple[int, int, int, int]:
    """Left, top, width and height of a random crop; the whole image where ten attempts do not fit."""
    for _ in range(ATTEMPTS):
        area = width * height * random.uniform(*AREA)
        aspect = math.exp(random.uniform(*map(math.log, ASPECT)))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            return random.randint(0, width - wide), random.randint(0, height - high), wide, high
    return 0, 0, width, height


def _crop(pixels: Any, size: int, pillow: Any) -> Tensor:
    """A random crop of a Pillow image, resized and flipped by a coin: uint8 (size, size, 3)."""
    left, top, width, height = _box(*pixels.size)
    box = (left, top, left + width, top + height)
    resized = pixels.resize((size, size), pillow.Resampling.BILINEAR, box=box)  # a triangle filter
    if random.random() < 0.5:
        resized = resized.transpose(pillow.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(resized))


_SCALE = 1 / torch.tensor(STD).view(3, 1, 1)
_SHIFT = -torch.tensor(MEAN).view(3, 1, 1) * _SCALE


def _normalise(pixels: Tensor, out: Tensor) -> None:
    """Uint8 (..., H, W, 3) into float32 (..., 3, H, W)."""
    torch.mul(pixels.movedim(-1, -3), _SCALE, out=out).add_(_SHIFT)
