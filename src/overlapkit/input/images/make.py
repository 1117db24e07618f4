"""train_loader and eval_loader: what a user writes, checked before anything starts."""

import importlib.util
import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch

from overlapkit.device import as_device
from overlapkit.extras import require
from overlapkit.input.checks import as_count, as_rank, as_seed, check_choice, is_integer
from overlapkit.input.images.arguments import check_crop, check_output, per_channel
from overlapkit.input.images.centre_crop import CentreCrop
from overlapkit.input.images.engine import Crop, Recipe
from overlapkit.input.images.files import Files, find_files
from overlapkit.input.images.loader import ImageLoader
from overlapkit.input.images.random_crop import RandomCrop
from overlapkit.input.images.schedule import Schedule
from overlapkit.input.order import Order

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def train_loader(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    labels: Any,
    batch_size: int,
    *,
    size: int = 224,
    device: torch.device | str | int | None = None,
    seed: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.5,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    dtype: torch.dtype = torch.float32,
    layout: Literal["NCHW", "NHWC"] = "NCHW",
    drop_last: bool = True,
    on_error: Literal["raise", "skip"] = "raise",
    threads: int | None = None,
    prefetch: int = 2,
) -> ImageLoader:
    """Shuffled images, each cut out at random, resized, perhaps flipped, and normalised.

    ```python
    loader = images.train_loader("imagenet/train", None, batch_size=256)
    for x, y in ok.DeviceLoader(loader):
        ...
    ```

    Crops are torchvision's RandomResizedCrop: bilinear, antialiased; greyscale, palette, CMYK, 16-bit and
    transparent images become RGB, and EXIF orientation is applied.

    Args:
        source: A folder with a folder of images per class (torchvision's ImageFolder), or a list of files.
        labels: For a list of files one integer each, for a folder None.
        batch_size: Images in a batch of this rank.
        size: Height and width of what comes out.
        device: Where images are decoded and handed over: a GPU decodes part of each itself. None for the
            current accelerator, else the CPU; logged once.
        seed: Of the shuffle and of all crops; the same on every rank.
        rank: This rank; None asks the process group.
        world_size: Number of ranks; None asks the process group.
        scale: Range of the crop's area, as a share of the image's.
        ratio: Range of the crop's width over its height.
        flip: Probability of a horizontal flip.
        mean: Of each channel, where pixels are in [0, 1].
        std: Of each channel.
        dtype: float32, float16 or bfloat16.
        layout: "NCHW", or "NHWC": (B, size, size, 3), whose `.permute(0, 3, 1, 2)` is channels_last.
        drop_last: Leave out the images, fewer than batch_size * world_size, that do not fill a batch on
            every rank. With False the last batch is smaller, and up to world_size - 1 images of the epoch
            come twice, so that every rank has the same number of batches and of images.
        on_error: What to do about files that cannot be read or decoded: "raise" names them; "skip" lets the
            next file in the list that can be take their place, with its label, so that batches keep their
            size and ranks their number of batches, and notes them in `skipped`. A file that is cut short
            is damaged where a crop reaches what is missing; garbled colours that a decoder puts up with
            are no damage.
        threads: Threads that decode, and as many that read; None for this process's cores, shared with the
            node's other ranks.
        prefetch: Batches decoded ahead, and as many read ahead of those, at least 1.

    Raises:
        FileNotFoundError: There is no such folder, or nothing in it.
        ImportError: DALI is missing.
        TypeError: The source is neither a folder nor a list of files, or labels are no integers.
        ValueError: An argument is out of range, or there is no whole batch.
    """
    _require_dali()
    check_crop(scale, ratio, flip)
    check_choice("drop_last", drop_last)
    size, seed = as_count("size", size), as_seed(seed)
    crop = RandomCrop(size, scale, ratio, flip, seed)
    files = find_files(source, labels)
    recipe = _recipe(files, crop, device, dtype, layout, mean, std)
    order = Order(len(files.paths), *as_rank(rank, world_size), seed, True, drop_last)
    return _loader(recipe, order, batch_size, threads, prefetch, on_error)


def eval_loader(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    labels: Any,
    batch_size: int,
    *,
    size: int = 224,
    short_side: int | None = None,
    device: torch.device | str | int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    dtype: torch.dtype = torch.float32,
    layout: Literal["NCHW", "NHWC"] = "NCHW",
    on_error: Literal["raise", "skip"] = "raise",
    threads: int | None = None,
    prefetch: int = 2,
) -> ImageLoader:
    """Images in their own order, resized by their short side, the middle cut out, and normalised.

    Over all ranks every image comes exactly once, the last batch is smaller, and every rank has the same
    number of batches and of images, so that collectives match: where images run out, up to world_size - 1
    places are filled up with images that are labelled -100, torch's default `ignore_index`. Count by
    `labels >= 0`.

    Args:
        source: As for `train_loader`.
        labels: As for `train_loader`.
        batch_size: Images in a batch of this rank.
        size: Height and width of what comes out.
        short_side: What the short side is resized to, at least `size`; None for size / 0.875, as in 256
            for 224.
        device: As for `train_loader`.
        rank: As for `train_loader`.
        world_size: As for `train_loader`.
        mean: As for `train_loader`.
        std: As for `train_loader`.
        dtype: As for `train_loader`.
        layout: As for `train_loader`.
        on_error: "raise" names files that cannot be read or decoded; "skip" lets the next file in the
            list that can be take their place, labelled -100, and notes them in `skipped`.
        threads: As for `train_loader`.
        prefetch: As for `train_loader`.

    Raises:
        FileNotFoundError: There is no such folder, or nothing in it.
        ImportError: DALI is missing.
        TypeError: The source is neither a folder nor a list of files, or labels are no integers.
        ValueError: An argument is out of range.
    """
    _require_dali()
    size = as_count("size", size)
    short_side = round(size / 0.875) if short_side is None else short_side
    if not is_integer(short_side) or short_side < size:
        raise ValueError(f"short_side={short_side!r}: an integer of at least size={size}, or None")
    files = find_files(source, labels)
    recipe = _recipe(files, CentreCrop(size, int(short_side)), device, dtype, layout, mean, std)
    order = Order(len(files.paths), *as_rank(rank, world_size), 0, False, False)
    return _loader(recipe, order, batch_size, threads, prefetch, on_error)


def _loader(
    recipe: Recipe, order: Order, batch_size: int, threads: int | None, prefetch: int, on_error: str
) -> ImageLoader:
    batch_size, prefetch = as_count("batch_size", batch_size), as_count("prefetch", prefetch)
    threads = _own_cores() if threads is None else as_count("threads", threads)
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error={on_error!r}: use 'raise' or 'skip'")
    schedule = Schedule(order, recipe.files.labels, recipe.crop, batch_size)
    if schedule.batches(0) == 0:
        raise ValueError(
            f"batch_size={batch_size} on {order.world} rank(s): {order.size} files make no whole batch. Use "
            "a smaller batch_size, or drop_last=False"
        )
    return ImageLoader(recipe, schedule, batch_size, threads, prefetch, on_error == "skip")


def _recipe(
    files: Files,
    crop: Crop,
    device: torch.device | str | int | None,
    dtype: torch.dtype,
    layout: str,
    mean: Sequence[float],
    std: Sequence[float],
) -> Recipe:
    check_output(dtype, layout)
    of_mean, of_std = per_channel("mean", mean), per_channel("std", std)
    where = as_device(device)
    if device is None:
        _say_where(where.type)
    return Recipe(files, crop, where, dtype, layout, of_mean, of_std)


def _own_cores() -> int:
    """The cores that this process may use, shared with the node's other ranks."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def _require_dali() -> None:
    """Refuse at once where DALI is missing; it is imported later, in the background."""
    try:
        found = importlib.util.find_spec("nvidia.dali")
    except ModuleNotFoundError:
        found = None
    if found is None:
        require("nvidia.dali", "images")


@cache
def _say_where(kind: str) -> None:
    where = "by the GPU" if kind == "cuda" else "on the CPU"
    logging.getLogger(__name__).info("images are decoded %s", where)
