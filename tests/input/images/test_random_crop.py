"""Crops of many images at once against a loop over one at a time, and their distribution against chance."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapkit.input.images.random_crop import RandomCrop

IMAGENET = {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3), "flip": 0.5, "seed": 0}


def crop_of(**options: object) -> RandomCrop:
    return RandomCrop(**{"size": 224, **IMAGENET, **options})  # type: ignore[arg-type]


def reference(
    height: int, width: int, draws: Iterator[float], scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """One image, as torchvision.transforms.RandomResizedCrop.get_params goes about it."""
    numbers = list(draws)
    top, left = numbers[20], numbers[21]
    for attempt in range(10):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * numbers[attempt])
        low, high = math.log(ratio[0]), math.log(ratio[1])
        aspect = math.exp(low + (high - low) * numbers[10 + attempt])
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return (int(top * (height - h + 1)), int(left * (width - w + 1))), (h, w)
    h, w = height, width
    if width / height < ratio[0]:
        h = max(1, round(width / ratio[0]))
    elif width / height > ratio[1]:
        w = max(1, round(height * ratio[1]))
    return ((height - h) // 2, (width - w) // 2), (h, w)


SIDES = st.one_of(st.integers(1, 12), st.integers(13, 700), st.sampled_from([65_500]))


@settings(deadline=None)
@given(
    extents=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=20),
    scale=st.sampled_from([(0.08, 1.0), (1.0, 1.0), (0.001, 0.002), (0.5, 0.9)]),
    ratio=st.sampled_from([(3 / 4, 4 / 3), (1.0, 1.0), (0.01, 100.0), (2.0, 3.0)]),
    seed=st.integers(0, 10**6),
)
def test_many_at_once_are_what_each_is_alone(
    extents: list[tuple[int, int]], scale: tuple[float, float], ratio: tuple[float, float], seed: int
) -> None:
    crop = crop_of(scale=scale, ratio=ratio, seed=seed)
    sizes = np.array(extents)
    draws = crop.draw(np.arange(len(sizes)), 3)
    start, shape = crop.windows(sizes, draws)
    assert (start >= 0).all()
    assert (shape >= 1).all()
    assert (start + shape <= sizes).all()
    for index, (height, width) in enumerate(extents):
        expected = reference(height, width, iter(draws[index].tolist()), scale, ratio)
        assert (tuple(start[index]), tuple(shape[index])) == expected


def test_areas_aspects_and_places_are_spread_as_they_should_be():
    """In an image so large that no try fails: deciles of each, within 5 standard deviations."""
    count = 20_000
    crop = crop_of(scale=(0.01, 0.2))
    extents = np.full((count, 2), 10_000)
    start, shape = crop.windows(extents, crop.draw(np.arange(count), 0))
    area = (shape.prod(1) / 1e8 - 0.01) / 0.19
    aspect = np.log(shape[:, 1] / shape[:, 0]) / math.log(4 / 3) / 2 + 0.5
    places = start / (extents - shape + 1)
    for name, value in {"area": area, "aspect": aspect, "top": places[:, 0], "left": places[:, 1]}.items():
        tenths = np.bincount((value * 10).clip(0, 9.5).astype(int), minlength=10)
        assert abs(tenths - count / 10).max() < 5 * math.sqrt(count * 0.09), name
    assert np.abs(np.corrcoef([area, aspect, *places.T]) - np.eye(4)).max() < 5 / math.sqrt(count)


@pytest.mark.parametrize("flip", [0.0, 0.25, 0.5, 1.0])
def test_as_many_are_flipped_as_asked_for(flip):
    crop = crop_of(flip=flip)
    inputs = crop.inputs(np.full((20_000, 2), 100), crop.draw(np.arange(20_000), 0))
    assert set(inputs["flip"].tolist()) <= {0, 1}
    assert abs(inputs["flip"].mean() - flip) <= 5 * math.sqrt(flip * (1 - flip) / 20_000)


def test_epochs_and_seeds_have_other_crops():
    extents = np.full((100, 2), 1000)
    windows = [
        np.hstack(crop_of(seed=seed).windows(extents, crop_of(seed=seed).draw(np.arange(100), epoch)))
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    for index, one in enumerate(windows):
        for other in windows[:index]:
            assert (one == other).all(1).sum() < 3
