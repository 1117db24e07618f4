"""Files mapped side by side: their bytes, and that nothing of it is left when the last view is gone."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapkit.input.address_range import map_files
from tests.leftovers import Leftovers


def files(folder: Path, sizes: list[int]) -> list[tuple[Path, int]]:
    made = []
    for number, size in enumerate(sizes):
        path = folder / f"file{number}"
        path.write_bytes(np.random.default_rng(number).bytes(size))
        made.append((path, size))
    return made


def mapped(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.sampled_from([1, 8, 4095, 4096, 4097, 3 << 20, 2 << 20]), min_size=1, max_size=5))
def test_each_file_is_where_it_is_said_to_be(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("files")
    made = files(folder, sizes)
    memory, starts = map_files(made)
    for (path, size), start in zip(made, starts, strict=True):
        assert memory[start : start + size].tobytes() == path.read_bytes()
        assert (memory.ctypes.data + start) % (2 << 20) == 0
    assert len(mapped(folder)) == len(sizes)
    assert all(" r--s " in line for line in mapped(folder))


def test_views_keep_it_and_the_last_one_lets_it_go(tmp_path: Path) -> None:
    before = Leftovers()
    made = files(tmp_path, [5000, 6000])
    memory, starts = map_files(made)
    before.check(0)  # the mapping needs none
    view = memory.view(np.uint16)[starts[1] // 2 :][:10]
    want = made[1][0].read_bytes()[:20]
    del memory
    gc.collect()
    assert view.tobytes() == want
    assert len(mapped(tmp_path)) == 2
    del view
    gc.collect()
    assert mapped(tmp_path) == []


def test_addresses_are_given_back(tmp_path: Path) -> None:
    made = files(tmp_path, [5000])
    before = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(200):
        map_files(made)
    gc.collect()
    assert len(Path("/proc/self/maps").read_text().splitlines()) < before + 20


def test_a_file_that_changed_or_went_is_an_error_and_nothing_stays_mapped(tmp_path: Path) -> None:
    made = files(tmp_path, [5000, 6000])
    os.truncate(made[1][0], 100)
    with pytest.raises(ValueError, match=r"file1 has 100 bytes, and had 6000 a moment ago"):
        map_files(made)
    made[1][0].unlink()
    with pytest.raises(FileNotFoundError, match="file1"):
        map_files(made)
    gc.collect()
    assert mapped(tmp_path) == []


def test_what_the_system_refuses_is_told_with_the_limits(tmp_path: Path) -> None:
    made = files(tmp_path, [10])
    with pytest.raises(OSError, match=r"reserving .* bytes of addresses: .*vm.max_map_count"):
        map_files([(made[0][0], 1 << 60)])
    with pytest.raises(OSError, match=rf"mapping {tmp_path}: .*ulimit -v"):
        map_files([(tmp_path, tmp_path.stat().st_size)])  # a directory cannot be mapped
