"""What is no value of an argument is refused by its name."""

import numpy as np
import pytest

from overlapkit.input.images.arguments import check_crop, per_channel


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": (0.0, 1.0)}, r"scale=\(0.0, 1.0\): give \(low, high\) with 0 < low <= high <= 1"),
        ({"scale": (0.5, 1.5)}, "scale="),
        ({"scale": (0.5, 0.4)}, "scale="),
        ({"scale": 0.5}, "scale=0.5"),
        ({"scale": (float("nan"), 1.0)}, "scale="),
        ({"ratio": (2.0, 1.0)}, "ratio="),
        ({"ratio": (-1.0, 1.0)}, "ratio="),
        ({"ratio": (1.0, 1.0, 1.0)}, "ratio="),
        ({"flip": 1.5}, "flip=1.5"),
        ({"flip": "no"}, "flip='no'"),
        ({"flip": True}, "flip=True"),
        ({"scale": ("a", "b")}, "scale="),
        ({"ratio": (1.0, float("inf"))}, "ratio="),
    ],
)
def test_what_is_no_range_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check_crop(**{"scale": (0.08, 1.0), "ratio": (1.0, 1.0), "flip": 0.5, **options})


@pytest.mark.parametrize("name", ["mean", "std"])
@pytest.mark.parametrize(
    "value",
    [
        0.5,
        (0.5,),
        (0.5,) * 4,
        ("1", "2", "3"),
        "abc",
        (float("nan"),) * 3,
        (0.5, float("inf"), 1),
        (True,) * 3,
    ],
)
def test_a_channel_has_a_finite_number(name, value):
    with pytest.raises(ValueError, match=f"{name}=.*give one number for each of red, green and blue"):
        per_channel(name, value)


def test_numbers_of_numpy_are_numbers():
    assert per_channel("std", np.array([0.5, 1, 2], dtype=np.float32)) == (0.5, 1.0, 2.0)
    assert per_channel("mean", [-1, 0, 1]) == (-1.0, 0.0, 1.0)
