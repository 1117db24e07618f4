"""What comes out, pixel by pixel, against Pillow and NumPy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from overlapkit.input import images
from overlapkit.input.images.random_crop import RandomCrop
from overlapkit.input.order import Order
from tests.input.images.photos import MEAN, STD, photograph, pixels

pytest.importorskip("nvidia.dali", reason="needs DALI (extra images)")

LEVELS = 1.01
"""How far two bilinear resizers may be apart, of 255: each rounds to a whole level."""


def everything(loader: images.ImageLoader) -> tuple[torch.Tensor, torch.Tensor]:
    batches = list(loader)
    loader.close()
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def resized(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """By Pillow, with edges as DALI has them: repeated outside, where Pillow's filter ends."""
    margin = 20
    padded = np.pad(np.asarray(image), ((margin, margin), (margin, margin), (0, 0)), "edge")
    box = (margin, margin, margin + image.width, margin + image.height)
    done = Image.fromarray(padded).resize(size, Image.Resampling.BILINEAR, box=box)
    return np.asarray(done, dtype=np.float64)


def test_evaluation_is_pillows_resize_and_centre_crop(photos):
    loader = images.eval_loader(photos, None, 16, size=32, short_side=37)
    assert loader.classes == ["class0", "class1", "class2"]
    shown, labels = everything(loader)
    paths = sorted(photos.rglob("*.jpg"))
    assert shown.shape == (40, 3, 32, 32)
    assert labels.tolist() == [int(path.parent.name[-1]) for path in paths]
    for got, path in zip(pixels(shown), paths, strict=True):
        image = Image.open(path)
        width, height = (round(37 * side // min(image.size)) for side in image.size)
        top, left = round((height - 32) / 2), round((width - 32) / 2)
        expected = resized(image, (width, height))[top : top + 32, left : left + 32]
        assert np.abs(got - expected).max() < LEVELS, path


def test_training_is_pillows_crop_resize_and_flip(photos):
    paths = sorted(photos.rglob("*.jpg"))
    loader = images.train_loader(paths, list(range(40)), 16, size=32, seed=9, drop_last=False)
    loader.set_epoch(3)
    shown, labels = everything(loader)
    order = Order(40, 0, 1, 9, True, False).samples(3, 0, 0, 40)
    assert labels.tolist() == order.tolist()
    crop = RandomCrop(32, (0.08, 1.0), (3 / 4, 4 / 3), 0.5, 9)
    for got, sample in zip(pixels(shown), order.tolist(), strict=True):
        image = Image.open(paths[sample])
        draws = crop.draw(np.array([sample]), 3)
        (top, left), (height, width) = (
            side[0].tolist() for side in crop.windows(np.array([[image.height, image.width]]), draws)
        )
        expected = resized(image.crop((left, top, left + width, top + height)), (32, 32))
        if draws[0, -1] < 0.5:
            expected = expected[:, ::-1]
        assert np.abs(got - expected).max() < LEVELS, paths[sample]


@pytest.fixture
def exact(tmp_path: Path) -> np.ndarray:
    """A folder of lossless images of the size that comes out: uint8 (5, 24, 24, 3)."""
    levels = np.random.default_rng(0).integers(0, 256, (5, 24, 24, 3), dtype=np.uint8)
    (tmp_path / "only").mkdir()
    for index, image in enumerate(levels):
        Image.fromarray(image).save(tmp_path / "only" / f"{index}.png")
    return levels


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]
)
def test_normalisation_is_exact_in_every_dtype_and_layout(
    exact: np.ndarray, tmp_path: Path, layout: Any, dtype: torch.dtype, tolerance: float
) -> None:
    loader = images.eval_loader(tmp_path, None, 2, size=24, short_side=24, layout=layout, dtype=dtype)
    shown, _ = everything(loader)
    assert shown.dtype == dtype
    expected = (exact / 255 - MEAN) / STD
    if layout == "NCHW":
        expected = expected.transpose(0, 3, 1, 2)
    assert shown.shape == expected.shape
    np.testing.assert_allclose(shown.double().numpy(), expected, rtol=tolerance / 4, atol=tolerance / 4)


def test_mean_and_std_are_those_given(exact, tmp_path):
    shown, _ = everything(
        images.eval_loader(
            tmp_path, None, 5, size=24, short_side=24, mean=(0.0, 0.25, 0.5), std=[1.0, 2.0, 0.5]
        )
    )
    expected = (exact / 255 - [0.0, 0.25, 0.5]) / [1.0, 2.0, 0.5]
    np.testing.assert_allclose(shown.double().numpy(), expected.transpose(0, 3, 1, 2), atol=1e-6)


KINDS = {
    "grey.jpg": lambda image: image.convert("L"),
    "cmyk.jpg": lambda image: image.convert("CMYK"),
    "grey.png": lambda image: image.convert("L"),
    "alpha.png": lambda image: image.convert("RGBA"),
    "palette.png": lambda image: image.convert("P"),
    "plain.webp": lambda image: image,
    "plain.bmp": lambda image: image,
    "plain.tif": lambda image: image,
}


def test_images_of_every_kind_become_rgb(tmp_path):
    small = photograph().crop((100, 100, 148, 148))
    for name, convert in KINDS.items():
        convert(small).save(tmp_path / name)
    deep = np.asarray(small.convert("L")).astype(np.uint16) * 257
    Image.fromarray(deep).save(tmp_path / "deep.png")
    names = [*KINDS, "deep.png"]
    shown, _ = everything(
        images.eval_loader([tmp_path / name for name in names], [0] * len(names), 4, size=48, short_side=48)
    )
    for name, got in zip(names, pixels(shown), strict=True):
        like = small.convert("L") if name == "deep.png" else Image.open(tmp_path / name)
        assert np.abs(got - np.asarray(like.convert("RGB"))).max() < LEVELS, name


def test_the_cameras_orientation_is_applied(tmp_path):
    small = photograph().crop((100, 100, 180, 148))
    turned = small.getexif()
    turned[0x112] = 6
    small.save(tmp_path / "turned.jpg", exif=turned, quality=95)
    shown, _ = everything(images.eval_loader([tmp_path / "turned.jpg"], [0], 1, size=48, short_side=48))
    upright = Image.open(tmp_path / "turned.jpg").transpose(Image.Transpose.ROTATE_270)
    assert upright.size == (48, 80)
    assert np.abs(pixels(shown)[0] - np.asarray(upright)[16:64]).max() < LEVELS


def test_a_name_may_be_anything_that_a_file_system_takes(tmp_path):
    names = [tmp_path / name for name in ("mit Leer.png", "\u00fc\u65e5.png", "\udce9.png", "a\nb.png")]
    for level, name in enumerate(names):
        Image.new("RGB", (8, 8), (level, 50, 100)).save(name, "PNG")
    shown, _ = everything(images.eval_loader(names, [0] * 4, 4, size=8, short_side=8))
    assert pixels(shown)[:, 4, 4].round().tolist() == [[level, 50, 100] for level in range(4)]


def test_a_batch_is_the_callers_to_keep(photos):
    """No later batch is decoded into its memory."""
    loader = images.train_loader(photos, None, 8, size=32)
    kept = [(x, x.clone()) for _ in range(4) for x, _ in loader]
    loader.close()
    assert len({x.data_ptr() for x, _ in kept}) == len(kept) == 20
    assert all(torch.equal(x, then) for x, then in kept)
