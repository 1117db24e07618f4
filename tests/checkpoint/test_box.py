"""Boxes against brute force over every element."""

import itertools
import random

import torch

from overlapkit.checkpoint.box import Box, tiles


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


def test_tiling_is_to_cover_each_cell_once():
    rng = random.Random(1)
    whole = Box((1, 2), (3, 4))
    seen = set()
    for _ in range(4000):
        boxes = [cut(rng, whole) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.8:  # mostly such as nearly do
            boxes = list(split(rng, whole, 3))
            if rng.random() < 0.4:
                boxes[rng.randrange(len(boxes))] = cut(rng, rng.choice([whole, Box((0, 0), (9, 9))]))
        rng.shuffle(boxes)
        covered = [cell for box in boxes for cell in cells(box)]
        truth = sorted(covered) == sorted(cells(whole))
        assert tiles(boxes, whole) == truth, boxes
        seen.add((truth, len(boxes) > 2))
    assert len(seen) == 4


def test_tiling_of_nothing_and_of_a_scalar():
    empty = Box((0, 0), (0, 5))
    assert tiles([], empty)
    assert tiles([empty, empty], empty)
    assert not tiles([Box((0, 0), (1, 5))], empty)
    scalar = Box.whole(())
    assert tiles([scalar], scalar)
    assert not tiles([], scalar)
    assert not tiles([scalar, scalar], scalar)


def cut(rng, box):
    sides = [
        sorted(rng.choices(range(a, a + n + 1), k=2)) for a, n in zip(box.offset, box.shape, strict=True)
    ]
    return Box(tuple(a for a, _ in sides), tuple(b - a for a, b in sides))


def split(rng, box, depth):
    """A box cut in two, again and again: not always a grid."""
    side = rng.randrange(len(box.shape))
    if depth == 0 or box.shape[side] < 2:
        return [box]
    at = rng.randrange(1, box.shape[side])
    first, second = list(box.shape), list(box.shape)
    first[side], second[side] = at, box.shape[side] - at
    offset = list(box.offset)
    offset[side] += at
    return split(rng, Box(box.offset, tuple(first)), depth - 1) + split(
        rng, Box(tuple(offset), tuple(second)), depth - 1
    )
