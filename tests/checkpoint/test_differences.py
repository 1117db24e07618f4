"""diff(): every changed bit is counted, distances are exact, memory is bounded."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from overlapkit.checkpoint import Checkpointer, DamagedCheckpoint, diff
from overlapkit.checkpoint.pieces import DTYPES
from overlapkit.checkpoint.reader import Reader
from tests.checkpoint.test_distributed import sharded
from tests.ranks import run_ranks


def seed():
    """The generators' states are part of every checkpoint."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def save(folder, state, step=1):
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(step, state, block=True)
    return folder


def compared(tmp_path, one, other):
    seed()
    first = save(tmp_path / "a", one)
    return diff(first, save(tmp_path / "b", other))


def truth(a, b):
    """Elements whose bytes differ, and their largest distance: in Python's exact integers, or its floats."""
    size, count, worst = a.element_size(), 0, 0.0
    one, other = (t.contiguous().view(-1).view(torch.uint8).tolist() for t in (a, b))
    for i, (x, y) in enumerate(zip(a.view(-1).tolist(), b.view(-1).tolist(), strict=True)):
        if one[i * size : (i + 1) * size] != other[i * size : (i + 1) * size]:
            count += 1
            far = float(abs(x - y))
            worst = math.nan if math.isnan(far) or math.isnan(worst) else max(worst, far)
    return count, worst


def pair(dtype):
    """Two tensors of random bits, in which about half of the elements are the same."""
    generator = torch.Generator().manual_seed(3)
    raw = torch.randint(0, 256, (2, 40, dtype.itemsize), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        raw &= 1
    raw[1, ::2] = raw[0, ::2]
    return raw[0].view(dtype).view(5, 8), raw[1].view(dtype).view(5, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_counts_and_distances_of_random_bits(tmp_path, dtype):
    a, b = pair(dtype)
    found = compared(tmp_path, {"t": a}, {"t": b})
    (tensor,) = found.tensors
    count, worst = truth(a, b)
    assert count > 5
    assert tensor.differing == count
    assert tensor.max_abs == worst or math.isnan(tensor.max_abs) and math.isnan(worst)
    assert (tensor.dtypes, tensor.shapes) == ((dtype, dtype), ((5, 8), (5, 8)))
    assert (found.missing, found.added, found.values, found.same_tensors) == ((), (), {}, 0)
    assert not found.same


FLOATS = {
    "nothing": ([1.0, math.nan, math.inf, -0.0], [1.0, math.nan, math.inf, -0.0], None),
    "the sign of a zero": ([0.0, 1.0], [-0.0, 1.0], (1, 0.0)),
    "a number became NaN": ([1.0, 2.0, 3.0], [1.5, math.nan, 9.0], (3, math.nan)),
    "infinities": ([math.inf, 1.0], [-math.inf, 1.0], (1, math.inf)),
    "beyond float32": ([3e38, 0.0], [-3e38, 0.0], (1, 2 * float(torch.tensor(3e38)))),
}


@pytest.mark.parametrize("case", FLOATS)
def test_special_values(tmp_path, case):
    a, b, expected = FLOATS[case]
    found = compared(tmp_path, {"t": torch.tensor(a)}, {"t": torch.tensor(b)})
    if expected is None:
        assert found.same
        assert found.same_tensors == 1
    else:
        (tensor,) = found.tensors
        assert tensor.differing == expected[0]
        assert tensor.max_abs == pytest.approx(expected[1], rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [(torch.int64, (2**63 - 1, -(2**63))), (torch.int64, (2**60 + 1, 2**60)), (torch.uint64, (0, 2**64 - 1))],
)
def test_integers_do_not_overflow(tmp_path, dtype, values):
    a, b = (torch.tensor([value], dtype=dtype) for value in values)
    (tensor,) = compared(tmp_path, {"t": a}, {"t": b}).tensors
    assert (tensor.differing, tensor.max_abs) == (1, float(abs(values[0] - values[1])))


def test_names_values_shapes_and_dtypes(tmp_path):
    one = {"a": torch.ones(2), "gone": torch.ones(1), "s": torch.ones(2, 3), "d": torch.ones(3), "n": [1, 2]}
    other = {"a": torch.ones(2), "new": 5, "s": torch.ones(3, 2), "d": torch.ones(3).half(), "n": (1, 2)}
    one["k"], other["k"] = {"x": 1, "nan": math.nan}, {"x": 2, "nan": math.nan}
    found = compared(tmp_path, one, other)
    assert (found.missing, found.added) == (("gone",), ("new",))
    assert found.values == {"n": ([1, 2], (1, 2)), "k/x": (1, 2)}
    assert {t.name: (t.dtypes, t.shapes, t.differing, t.max_abs) for t in found.tensors} == {
        "s": ((torch.float32, torch.float32), ((2, 3), (3, 2)), None, None),
        "d": ((torch.float32, torch.float16), ((3,), (3,)), None, None),
    }
    assert found.same_tensors == 1
    assert found.folders == (tmp_path / "a" / "step-1", tmp_path / "b" / "step-1")


def test_another_kind_is_a_difference(tmp_path):
    found = compared(
        tmp_path, {"x": nn.Linear(1, 1).requires_grad_(False)}, {"x": {"weight": torch.ones(1, 1)}}
    )
    assert found.values["x (kind)"] == ("module", "value")


def test_generators_are_compared(tmp_path):
    first = save(tmp_path / "a", {"n": 1})
    torch.rand(1)
    assert list(diff(first, save(tmp_path / "b", {"n": 1})).values) == ["rng/torch"]


def test_two_steps_of_one_directory(tmp_path):
    save(tmp_path, {"n": 1}, 1)
    save(tmp_path, {"n": 2}, 2)
    assert diff(tmp_path, tmp_path, steps=(1, "latest")).values["n"] == (1, 2)
    assert diff(tmp_path, tmp_path).same


def test_tied_weights_are_compared_under_both_names(tmp_path):
    model, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    other.load_state_dict(model.state_dict())
    model.tied, other.tied = model.weight, other.weight
    with torch.no_grad():
        other.weight[0, 0] += 1
    found = compared(tmp_path, {"model": model}, {"model": other})
    assert {t.name: t.differing for t in found.tensors} == {"model/weight": 1, "model/tied": 1}


def save_on_ranks(rank, folder, changed):
    state = {**sharded(), "own": torch.full((3,), float(rank)), "mine": rank}
    if rank == 1 and changed:
        state["own"][1] += 2
        with torch.no_grad():
            state["model"][0].bias.to_local()[-1] += 4  # of 5 elements, the last: in rank 1's shard
    seed()
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state, block=True)


def test_any_world_size_is_compared_with_any_other(tmp_path):
    run_ranks(2, save_on_ranks, tmp_path / "two", False)
    run_ranks(3, save_on_ranks, tmp_path / "three", False)
    save_on_ranks(0, tmp_path / "one", False)
    for name in ("one", "three"):
        found = diff(tmp_path / "two", tmp_path / name)
        assert found.same
        assert found.ranks == 1
        assert found.same_tensors == 4 + 5 + 1  # two layers, BatchNorm, own


def test_all_ranks_own_tensors_are_compared_where_the_worlds_are_equal(tmp_path):
    run_ranks(2, save_on_ranks, tmp_path / "a", False)
    run_ranks(2, save_on_ranks, tmp_path / "b", True)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.ranks == 2
    assert {t.name: (t.differing, t.max_abs) for t in found.tensors} == {
        "model/0.bias": (1, pytest.approx(4)),
        "rank 1: own": (1, 2.0),
    }
    assert found.values == {}


def test_memory_is_bounded_and_nothing_is_read_twice(tmp_path, monkeypatch):
    """Slices of 64 bytes where a row is shorter, else rows; each byte of both tensors once."""
    a = torch.arange(600, dtype=torch.float32).view(60, 10)
    b = a.clone()
    b[::7] += 1
    taken = []
    fill = Reader.fill
    monkeypatch.setattr(
        Reader, "fill", lambda self, t, box, s: (taken.append(t.nbytes), fill(self, t, box, s))
    )
    monkeypatch.setattr("overlapkit.checkpoint.slices.SLICE", 200)
    seen = []
    first, second = save(tmp_path / "a", {"t": a}), save(tmp_path / "b", {"t": b})
    found = diff(first, second, progress=lambda done, total: seen.append((done, total)))
    assert [t.differing for t in found.tensors] == [90]
    assert max(taken) == 200
    assert sum(taken) == 2 * a.nbytes
    assert seen[-1] == (a.nbytes, a.nbytes)


def test_a_damaged_one_is_an_error(tmp_path):
    first, second = save(tmp_path / "a", {"t": torch.ones(9)}), save(tmp_path / "b", {"t": torch.ones(9)})
    path = second / "step-1" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(DamagedCheckpoint, match="tensor 't'"):
        diff(first, second)


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ([1], [1.0])])
def test_values_that_are_equal_in_python_alone_differ(tmp_path, one, other):
    assert not compared(tmp_path, {"x": one}, {"x": other}).same
