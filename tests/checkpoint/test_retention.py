"""Which checkpoints stay."""

import pytest

from overlapkit.checkpoint.retention import surplus


@pytest.mark.parametrize(
    ("steps", "newest", "keep", "keep_every", "gone"),
    [
        ([1, 2, 3, 4], 4, None, None, []),
        ([1, 2, 3, 4], 4, 2, None, [1, 2]),
        ([1, 2, 3, 4], 4, 9, None, []),
        ([4, 3, 2, 1], 4, 1, None, [1, 2, 3]),
        ([0, 10, 20, 25, 30], 30, 1, 20, [10, 25]),
        ([100, 200, 300], 100, 1, None, [200]),  # an abandoned branch never costs what was just saved
        ([5], 5, 1, 7, []),
        ([], 5, 1, None, []),
    ],
)
def test_surplus(steps, newest, keep, keep_every, gone):
    assert surplus(steps, newest, keep, keep_every) == gone
