"""The evaluation window against torchvision's arithmetic, one image at a time."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapkit.input.images.centre_crop import CentreCrop


def reference(height: int, width: int, size: int, short: int) -> tuple[list[float], list[float]]:
    """torchvision's Resize(short) and CenterCrop(size), then back into pixels of the image."""
    if width <= height:
        new_width, new_height = short, int(short * height / width)
    else:
        new_height, new_width = short, int(short * width / height)
    top, left = round((new_height - size) / 2.0), round((new_width - size) / 2.0)
    rows, columns = height / new_height, width / new_width
    return [top * rows, left * columns], [(top + size) * rows, (left + size) * columns]


@settings(deadline=None)
@given(
    extents=st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), min_size=1, max_size=20),
    size=st.integers(1, 300),
    more=st.integers(0, 100),
)
def test_windows_are_torchvisions(extents: list[tuple[int, int]], size: int, more: int) -> None:
    sizes = np.array(extents)
    start, end = CentreCrop(size, size + more).windows(sizes)
    expected = [reference(height, width, size, size + more) for height, width in extents]
    np.testing.assert_allclose(start, [corner for corner, _ in expected], rtol=1e-12)
    np.testing.assert_allclose(end, [corner for _, corner in expected], rtol=1e-12)
    assert (start >= 0).all()
    assert (end <= sizes + 1e-6).all()
