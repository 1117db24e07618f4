"""What the two functions refuse, before anything starts; and that a missing DALI is named."""

import importlib.util
import logging
import sys
from typing import Any

import pytest
import torch

from overlapkit.input import images
from overlapkit.input.images import make
from tests.leftovers import Leftovers

pytest.importorskip("nvidia.dali", reason="needs DALI (extra images)")

BOTH = [images.train_loader, images.eval_loader]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: give an integer of at least 1"),
        ({"batch_size": 2.0}, "batch_size=2.0"),
        ({"size": 0}, "size=0"),
        ({"threads": 0}, "threads=0"),
        ({"prefetch": True}, "prefetch=True"),
        ({"dtype": torch.int8}, "dtype=torch.int8: use torch.float32, torch.float16 or torch.bfloat16"),
        ({"dtype": "float32"}, "dtype='float32'"),
        ({"layout": "HWC"}, "layout='HWC': use 'NCHW' or 'NHWC'"),
        ({"mean": (0.5,)}, r"mean=\(0.5,\): give one number for each"),
        ({"mean": 0.5}, "mean=0.5: give one number for each"),
        ({"mean": ("a", "b", "c")}, "mean=.*give one number for each"),
        ({"std": (0.5, 0.5, 0.0)}, "std=.*above 0"),
        ({"std": (float("nan"),) * 3}, "std=.*give one number for each"),
        ({"std": ("1", "2", "3")}, "std=.*give one number for each"),
        ({"on_error": "ignore"}, "on_error='ignore': use 'raise' or 'skip'"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"rank": 1}, "rank=1, world_size=None: give both"),
        ({"rank": 2, "world_size": 2}, "rank=2, world_size=2"),
        ({"rank": True, "world_size": 2}, "rank=True, world_size=2"),
    ],
)
def test_an_argument_out_of_range_is_named(
    photos: Any, kind: Any, options: dict[str, Any], message: str
) -> None:
    before = Leftovers()
    with pytest.raises(ValueError, match=message):
        kind(photos, None, **{"batch_size": 4, **options})
    before.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"seed": "abc"}, "seed='abc'"), ({"drop_last": "no"}, "drop_last='no'"), ({"flip": True}, "flip=True")],
)
def test_an_argument_of_training_out_of_range_is_named(photos, options, message):
    with pytest.raises(ValueError, match=message):
        images.train_loader(photos, None, 4, **options)


@pytest.mark.parametrize("short_side", [223, 300.0])
def test_a_short_side_that_holds_no_crop_is_refused(photos, short_side):
    with pytest.raises(ValueError, match="short_side=.*at least size=224"):
        images.eval_loader(photos, None, 4, short_side=short_side)


def test_no_whole_batch_is_an_error_that_says_what_helps(photos):
    with pytest.raises(
        ValueError, match="batch_size=21 on 2 rank.*40 files make no whole batch.*drop_last=False"
    ):
        images.train_loader(photos, None, 21, rank=0, world_size=2)
    loader = images.train_loader(photos, None, 21, rank=0, world_size=2, drop_last=False, size=8)
    assert [len(x) for x, _ in loader] == [20]
    loader.close()


def test_ranks_come_from_the_process_group(photos, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match="init_process_group"):
        images.train_loader(photos, None, 4)
    monkeypatch.setattr("overlapkit.input.checks.rank_and_world", lambda: (3, 4))
    loader = images.eval_loader(photos, None, 5, size=8)
    assert len(loader) == 2
    assert next(iter(loader))[1].tolist() == [0, 0, 0, 1, 1]  # files 3, 7, 11, 15, 19
    loader.close()


def test_where_images_are_decoded_is_said_once_and_to_whom_did_not_say(photos, caplog):
    make._say_where.cache_clear()
    told: list[str] = []
    with caplog.at_level(logging.INFO, "overlapkit"):
        for device in ("cpu", None, None):
            images.train_loader(photos, None, 4, size=8, device=device).close()
            told.append(",".join(record.message for record in caplog.records))
    where = "by the GPU" if torch.accelerator.is_available() else "on the CPU"
    assert told == ["", f"images are decoded {where}", f"images are decoded {where}"]


def test_threads_are_this_ranks_part_of_the_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(10)))
    assert make._own_cores() == 10
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert make._own_cores() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert make._own_cores() == 1


@pytest.mark.parametrize("kind", BOTH)
def test_without_dali_the_extra_is_named_at_once(photos, kind, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "nvidia.dali" else find(name, *rest)
    )
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(
        ImportError, match=r"nvidia.dali is not installed: pip install 'overlapkit\[images\]'"
    ):
        kind(photos, None, 4)
