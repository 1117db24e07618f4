from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapkit.input.packing import ALIGNMENT, Packing, packable


def pack(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """Through host bytes and "the device": what the loader does, in one place."""
    packing = Packing(tensors)
    host = torch.full((packing.nbytes,), 0xAB, dtype=torch.uint8)
    packing.fill(host)
    again = torch.full((packing.nbytes,), 0xAB, dtype=torch.uint8)
    packing.fill_there(again)
    assert torch.equal(host, again)
    device = torch.empty(packing.nbytes, dtype=torch.uint8)
    device.copy_(host)
    host.zero_()
    return packing.views(device), packing.nbytes


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert bits(a) == bits(b)


def bits(tensor: torch.Tensor) -> bytes:
    """The values, bit by bit, whatever the dtype and strides."""
    return (
        torch.empty(tensor.shape, dtype=tensor.dtype)
        .copy_(tensor)
        .view(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


BASE = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
KINDS = {
    "contiguous": BASE,
    "channels last": BASE.contiguous(memory_format=torch.channels_last),
    "transposed": BASE.transpose(0, 3),
    "rows of a larger one": BASE[1:],
    "with holes": BASE[..., ::2],
    "one column": BASE[..., 2],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 6),
    "scalar": torch.tensor(7),
    "one element": torch.tensor([True]),
    "empty": torch.empty(0, 3),
    "empty of a larger one": BASE[2:],
    "bool": BASE > 30,
    "bfloat16": BASE.bfloat16(),
    "complex": torch.tensor([1 + 2j, 3j]),
    "uint16": torch.arange(7).to(torch.uint16),
    "float8": torch.arange(5.0).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("name", KINDS)
def test_values_shape_and_dense_strides_survive(name: str) -> None:
    tensor = KINDS[name]
    assert packable(tensor)
    (made,), nbytes = pack([tensor])
    same(made, tensor)
    if name not in ("with holes", "one column"):
        assert made.stride() == tensor.stride()
    assert nbytes <= tensor.numel() * tensor.element_size() + ALIGNMENT


def test_all_kinds_in_one_batch() -> None:
    tensors = list(KINDS.values())
    made, _ = pack(tensors)
    for new, old in zip(made, tensors, strict=True):
        same(new, old)


def test_a_small_view_of_a_large_storage_costs_what_it_holds() -> None:
    large = torch.arange(1_000_000)
    (column, rows), nbytes = pack([large.view(1000, 1000)[:, 7], large.view(1000, 1000)[990:991, 8:]])
    same(column, large.view(1000, 1000)[:, 7])
    same(rows, large.view(1000, 1000)[990:991, 8:])
    assert nbytes <= 2 * (8000 + ALIGNMENT)


def test_strides_of_a_compacted_tensor_keep_their_order() -> None:
    images = torch.arange(2 * 8 * 3 * 4).view(2, 8, 3, 4).permute(0, 2, 3, 1)[..., :5]
    (made,), _ = pack([images])
    same(made, images)
    assert made.stride() == torch.empty_like(images).stride()


def test_memory_that_was_shared_is_shared() -> None:
    x = torch.arange(12.0).view(3, 4)
    (a, row, again, flipped), nbytes = pack([x, x[1], x.view(12), x.t()])
    a[1, 2] = -1
    assert row[2] == again[6] == flipped[2, 1] == -1
    assert nbytes == ALIGNMENT
    assert x[1, 2] == 6  # the host's is another


def test_interleaved_views_share_too() -> None:
    x = torch.arange(10)
    (even, odd), _ = pack([x[::2], x[1::2]])
    same(even, x[::2])
    same(odd, x[1::2])
    assert even.untyped_storage().data_ptr() == odd.untyped_storage().data_ptr()
    assert odd.data_ptr() - even.data_ptr() == 8


@pytest.mark.parametrize(
    ("whole", "part"),
    [
        (lambda x: x[:, :2], lambda x: x[:, 0]),
        (lambda x: x[:, 1], lambda x: x[::2, 1]),
        (lambda x: x[:, :3], lambda x: x[:5, :3]),
        (lambda x: x[:, 5], lambda x: x[:, 5]),
        (lambda x: x[:, 5], lambda x: x[3:4]),
    ],
)
def test_views_with_more_holes_than_content_share_too(whole: Any, part: Any) -> None:
    """A third one among them, with no byte of theirs, is not copied as they are."""
    x, y = torch.zeros(16, 32), torch.zeros(16, 32)
    (all_, some, other), nbytes = pack([whole(x), part(x), x[:, 30]])
    some.fill_(7)
    part(y).fill_(7)
    same(all_, whole(y))
    same(other, y[:, 30])
    assert nbytes <= x.numel() * 4 + ALIGNMENT


def test_a_few_columns_of_a_large_table_do_not_bring_all_of_it_along() -> None:
    x = torch.arange(2.0**20).view(4096, 256)
    for views in ([x[:, 0], x[:, :2]], [x[::8, i % 4] for i in range(40)]):
        packed, nbytes = pack(views)
        for found, view in zip(packed, views, strict=True):
            same(found, view)
        assert nbytes < x.numel()  # a quarter of its bytes


def test_views_of_other_dtypes_share_where_they_overlap() -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    (odd, wide), _ = pack([raw[3:20], raw[8:40].view(torch.int64)])
    same(odd, raw[3:20])
    same(wide, raw[8:40].view(torch.int64))
    odd[5:13] = 0
    assert wide[0] == 0


def test_two_tensors_over_one_numpy_array_share() -> None:
    array = np.arange(6)
    (short, whole), _ = pack([torch.from_numpy(array[:3]), torch.from_numpy(array)])
    whole[1] = 50
    assert short.tolist() == [0, 50, 2]


def test_neighbours_in_a_storage_are_copied_in_one_go_and_others_are_not() -> None:
    array = np.arange(512, dtype=np.float32)
    whole = torch.from_numpy(array)
    one = Packing([whole[:100], whole[128:130], whole[256:].view(torch.int64)])
    assert one.copied == 2048
    # as far apart as they will be, but of two storages, of which none holds both
    apart = [torch.from_numpy(array[:128]), torch.from_numpy(array[128:])]
    # and of two, of which one does
    within = [torch.from_numpy(array[:128]), whole[128:]]
    for tensors in (apart, within):
        for new, old in zip(pack(tensors)[0], tensors, strict=True):
            same(new, old)


def test_starts_are_aligned_as_the_allocator_would() -> None:
    made, _ = pack([torch.zeros(n, dtype=torch.uint8) for n in (1, 511, 512, 513)])
    starts = [tensor.storage_offset() for tensor in made]
    assert starts == [0, 512, 1024, 1536]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, requires_grad=True),
        torch.nn.Parameter(torch.zeros(2)),
        torch.eye(3).to_sparse(),
        torch.tensor([1j]).conj(),
        torch.zeros(2, device="meta"),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    ],
    ids=["requires_grad", "parameter", "sparse", "conjugate", "meta", "nested"],
)
def test_what_is_more_than_its_bytes_is_not_packed(tensor: torch.Tensor) -> None:
    assert not packable(tensor)


DTYPES = [torch.uint8, torch.int16, torch.float32, torch.int64]


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Strided views at random places of a few storages, overlapping at will."""
    storages = [torch.randint(0, 255, (draw(st.integers(64, 400)),), dtype=torch.uint8) for _ in range(2)]
    made = []
    for _ in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(DTYPES))
        raw = draw(st.sampled_from(storages))
        typed = raw[: raw.numel() // 8 * 8].view(dtype)
        start = draw(st.integers(0, typed.numel()))
        shape, strides, room = [], [], typed.numel() - start
        for _ in range(draw(st.integers(0, 3)) if room else 0):
            n, step = draw(st.integers(0, 4)), draw(st.integers(0, 9))
            if (max(n, 1) - 1) * step < room:
                shape.append(n)
                strides.append(step)
                room -= (max(n, 1) - 1) * step
        if room or 0 in shape:
            made.append(typed.as_strided(shape, strides, start))
    return made


@settings(max_examples=300, deadline=None)
@given(views())
def test_any_views_of_any_storages(tensors: list[torch.Tensor]) -> None:
    made, _ = pack(tensors)
    for new, old in zip(made, tensors, strict=True):
        same(new, old)
    pairs = list(combinations(range(len(made)), 2))
    shared = [np.shares_memory(tensors[a].numpy(), tensors[b].numpy()) for a, b in pairs]
    assert [np.shares_memory(made[a].numpy(), made[b].numpy()) for a, b in pairs] == shared


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_dense_views_that_overlap_keep_their_distance(data: st.DataObject) -> None:
    storage = torch.arange(40, dtype=torch.int16)
    start = data.draw(st.integers(0, 38))
    first = storage[start : data.draw(st.integers(start + 1, 40))]
    inside = data.draw(st.integers(start, start + len(first) - 1))
    second = storage[inside : data.draw(st.integers(inside + 1, 40))]
    (a, b), _ = pack([first, second])
    assert b.data_ptr() - a.data_ptr() == second.data_ptr() - first.data_ptr()
