"""Boxes against brute force over every element."""

import itertools

import torch

from overlapkit.checkpoint.box import Box


def cells(box):
    return set(itertools.product(*(range(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))))


def test_meeting_is_the_set_of_common_cells():
    spans = [(a, n) for a in range(3) for n in range(3)]
    boxes = [Box((a, b), (n, m)) for (a, n), (b, m) in itertools.product(spans, spans)]
    for one, other in itertools.product(boxes[::3], boxes[::2]):
        both = one.meet(other)
        assert (set() if both is None else cells(both)) == cells(one) & cells(other)


def test_inside_cuts_out_the_same_cells():
    whole = torch.arange(60).view(5, 4, 3)
    outer, inner = Box((1, 0, 1), (4, 3, 2)), Box((2, 1, 2), (2, 2, 1))
    held = whole[1:5, 0:3, 1:3]
    assert torch.equal(held[inner.inside(outer)], whole[2:4, 1:3, 2:3])


def test_a_scalar_has_one_element():
    scalar = Box.whole(())
    assert scalar.numel == 1
    assert scalar.meet(scalar) == scalar
