import pytest

from overlapkit.counted import counted


@pytest.mark.parametrize(
    ("number", "thing", "text"),
    [(0, "step", "0 steps"), (1, "step", "1 step"), (2, "step", "2 steps"), (3, "batch", "3 batches")],
)
def test_one_thing_stands_in_the_singular(number, thing, text):
    assert counted(number, thing) == text
