"""torch.distributed.checkpoint through our writer, reader and planners, in one process."""

import json
import pickle
import threading
from collections import Counter, deque
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException

from overlapkit import checkpoint
from overlapkit.checkpoint import (
    Checkpointer,
    SafetensorsLoadPlanner,
    SafetensorsReader,
    SafetensorsSavePlanner,
    SafetensorsWriter,
)
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.pieces import DTYPES
from tests.checkpoint.faults import Faulty
from tests.ranks import one_rank_group


@pytest.fixture(autouse=True)
def group():
    with one_rank_group():
        yield


@pytest.fixture
def where(tmp_path):
    return tmp_path / "run" / "step-7"


def save(state, where, **options):
    return dcp.save(state, storage_writer=SafetensorsWriter(where), **options)


def load(state, where, **options):
    dcp.load(state, storage_reader=SafetensorsReader(where), **options)
    return state


def failure(caught, rank=0):
    """The error of a rank, whole, out of DCP's."""
    return caught.value.failures[rank][0]


def numbers(shape, dtype):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


def zeros_like(state):
    return {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in state.items()}


def bits(tensor):
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).tolist()


def test_the_names_resolve_when_they_are_asked_for():
    for name in (
        "SafetensorsLoadPlanner",
        "SafetensorsReader",
        "SafetensorsSavePlanner",
        "SafetensorsWriter",
    ):
        assert getattr(checkpoint, name).__module__.startswith("overlapkit.checkpoint.dcp.")
    with pytest.raises(AttributeError, match=r"'overlapkit\.checkpoint' has no attribute 'SafetensorsThing'"):
        _ = checkpoint.SafetensorsThing


LAYOUTS = {
    "plain": lambda t: t,
    "scalar": lambda t: t[0, 0],
    "empty": lambda t: t[:0],
    "empty inside": lambda t: t[:, :0],
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[::2, 1::3],
    "expanded": lambda t: t[:1].expand(4, 6),
    "offset": lambda t: t[2:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype_and_layout_comes_back_bit_for_bit(where, layout):
    state = {str(dtype): LAYOUTS[layout](numbers((4, 6), dtype)) for dtype in DTYPES}
    save(state, where)
    there = load(zeros_like(state), where)
    for key, value in state.items():
        assert there[key].dtype == value.dtype, key
        assert bits(there[key]) == bits(value), key


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        torch.nn.Parameter(torch.randn(3, 2)),
        torch.randn(5, requires_grad=True),
    ],
    ids=["conj", "neg", "parameter", "requires_grad"],
)
def test_what_a_view_says_is_saved(where, tensor):
    save({"t": tensor}, where)
    assert bits(load(zeros_like({"t": tensor}), where)["t"]) == bits(tensor)


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded out"])
def test_a_tensor_that_is_not_contiguous_is_filled(where, layout):
    target = torch.zeros(4, 12)
    view = target.view(12, 4).t() if layout == "transposed" else target[:, ::2]
    value = torch.randn(view.shape)
    save({"t": value}, where)
    load({"t": view}, where)
    assert torch.equal(view, value)


def test_a_parameter_is_filled_in_place(where):
    value, parameter = torch.randn(3, 2), torch.nn.Parameter(torch.zeros(3, 2))
    save({"t": value}, where)
    load({"t": parameter}, where)
    assert torch.equal(parameter, value)
    assert parameter.grad_fn is None


def test_tensors_of_many_blocks_one_after_the_other(where):
    """Odd sizes, so that no tensor begins or ends where a block, a write or a read does."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"a": (9 << 20) + 3, "b": 5, "c": (17 << 20) + 1, "d": 4 << 20, "e": 0, "f": (6 << 20) + 7}
    state = {
        key: torch.randint(256, (n,), dtype=torch.uint8, generator=generator) for key, n in sizes.items()
    }
    state["g"] = state["c"][: 1 << 24].view(1 << 10, 1 << 14).t()
    state["h"] = state["d"].view(torch.float32)
    save(state, where)
    there = load(zeros_like(state), where)
    for key, value in state.items():
        assert torch.equal(there[key].view(torch.uint8), value.contiguous().view(torch.uint8)), key
    with safe_open(where / "rank-00000.safetensors", "pt") as file:
        assert all(torch.equal(file.get_tensor(key), state[key]) for key in "abcdefg")


def test_any_safetensors_reader_and_any_json_reader_reads_the_files(where):
    state = {
        "model": {"w": torch.randn(5, 3), "b": torch.randn(3, dtype=torch.bfloat16)},
        "n": torch.tensor(4),
    }
    save(state, where)
    assert sorted(path.name for path in where.iterdir()) == [
        "manifest.json",
        "rank-00000.json",
        "rank-00000.safetensors",
    ]
    with safe_open(where / "rank-00000.safetensors", "pt") as file:
        assert set(file.keys()) == {"model/w", "model/b", "n"}
        assert torch.equal(file.get_tensor("model/w"), state["model"]["w"])
        assert torch.equal(file.get_tensor("model/b"), state["model"]["b"])
        assert file.get_tensor("n").item() == 4
    assert json.loads((where / "manifest.json").read_text())["checkpoint"]["step"] == 7
    assert [path.name for path in where.parent.iterdir()] == ["step-7"]


VALUES = {
    "int keys": {1: "a", 2: {3: "b"}},
    "Counter": Counter({4: 1, 7: 2}),
    "tuple": (1, (2.5, None)),
    "set": {1, 2},
    "deque": deque([1, 2], maxlen=3),
    "bytes": b"\x80\x04pickle",
    "numpy": np.float32(0.1),
    "array": np.arange(6).reshape(2, 3),
    "dtype": torch.bfloat16,
    "nan": float("inf"),
    "empty": {},
    "none": None,
    "list": [1, [2, {"x": 3}]],
    "true": True,
    "text": "ä\n",
}


def test_values_come_back_exactly_and_nothing_is_pickled(where, monkeypatch):
    def pickled(*args, **kwargs):
        raise AssertionError("pickled")

    for module, name in [(torch, "save"), (torch, "load")]:
        monkeypatch.setattr(module, name, pickled)
    state = {"values": dict(VALUES), "mixed": {"t": torch.ones(2), "d": {1: (2,)}}, "top": 5}
    save(state, where, planner=SafetensorsSavePlanner())
    there = {
        "values": dict.fromkeys(VALUES),
        "mixed": {"t": torch.zeros(2), "d": {}},
        "top": None,
    }
    load(there, where, planner=SafetensorsLoadPlanner())
    assert (there["values"].pop("array") == VALUES["array"]).all()
    assert there["values"] == {key: value for key, value in VALUES.items() if key != "array"}
    assert all(type(there["values"][key]) is type(VALUES[key]) for key in there["values"])
    assert there["values"]["deque"].maxlen == 3
    assert there["mixed"]["t"].tolist() == [1, 1]
    assert there["mixed"]["d"] == {1: (2,)}
    assert there["top"] == 5


def test_schedulers_go_on_where_they_were(where):
    def build(milestones):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)

    optimizer, scheduler = build([1, 3])
    optimizer.step()
    scheduler.step()
    save({"scheduler": scheduler}, where, planner=SafetensorsSavePlanner())
    other_optimizer, other = build([50])
    load({"scheduler": other}, where, planner=SafetensorsLoadPlanner())
    assert other.state_dict() == scheduler.state_dict()
    for _ in range(2):
        other_optimizer.step()
        other.step()
    assert other.get_last_lr() == pytest.approx([0.1])  # its own optimizer starts at 1.0, and decays once


def test_the_default_planner_may_not_pickle_values(where):
    state = {"t": torch.ones(1), "a": {"lr": 0.1}, "b": 2}
    with pytest.raises(CheckpointException) as caught:
        save(state, where)
    error = failure(caught)
    assert isinstance(error, TypeError)
    assert "'a.lr' (float), 'b' (int). Give planner=SafetensorsSavePlanner()" in str(error)
    assert not where.exists()


def test_many_values_are_named_in_part(where):
    with pytest.raises(CheckpointException) as caught:
        save({f"v{i}": i for i in range(9)}, where)
    assert "'v4' (int) and 4 more" in str(failure(caught))


def test_the_default_planner_may_not_unpickle_values(where):
    save({"t": torch.ones(1), "step": 3, "s": {"lr": 1}}, where, planner=SafetensorsSavePlanner())
    assert load({"t": torch.zeros(1)}, where)["t"].item() == 1  # tensors alone need no planner
    for state, key in [({"step": 0}, "'step'"), ({"s": {"lr": 0}}, "'s'")]:
        with pytest.raises(CheckpointException) as caught:
            load(state, where)
        assert f"{key}: no tensors" in str(failure(caught))
        assert "SafetensorsLoadPlanner()" in str(failure(caught))


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (object(), "'a' is a builtins.object, which cannot be kept without pickling"),
        ({"x": [lambda: 0]}, "'a/x/0' is a builtins.function"),
        ((torch.ones(1),), "'a/0' is a tensor inside of a tuple"),
        ({"t": torch.ones(1), "s": {torch.ones(1)}}, r"'a\.s/0' is a tensor inside of a tuple, set"),
    ],
)
def test_what_cannot_be_kept_is_named_before_anything_is_written(where, value, match):
    with pytest.raises(CheckpointException, match=match) as caught:
        save({"a": value}, where, planner=SafetensorsSavePlanner())
    assert isinstance(failure(caught), TypeError)
    assert not where.parent.exists()


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (torch.ones(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "meta device"),
    ],
)
def test_tensors_that_cannot_be_kept_are_named(where, tensor, match):
    with pytest.raises(CheckpointException, match=match):
        save({"a": {"t": tensor}}, where)
    assert [path.name for path in where.parent.iterdir()] == []


def test_other_planners_than_dcps_are_refused(where):
    class Planner(SavePlanner):
        set_up_planner = create_local_plan = create_global_plan = finish_plan = resolve_data = None

    writer = SafetensorsWriter(where)
    writer.set_up_storage_writer(True)
    writer.prepare_global_plan([dcp.SavePlan([])])
    with pytest.raises(TypeError, match="planner is a Planner: SafetensorsWriter needs a DefaultSavePlanner"):
        writer.write_data(dcp.SavePlan([]), Planner())
    assert list(where.parent.iterdir()) == []


class WithoutFlattening(DefaultSavePlanner):
    def __init__(self):
        super().__init__(flatten_state_dict=False)


def test_a_planner_that_derives_from_the_default_one_is_as_good(where):
    save({"a": torch.ones(2), "b.c": torch.zeros(1)}, where, planner=WithoutFlattening())
    there = load({"a": torch.zeros(2), "b": {"c": torch.ones(1)}}, where)
    assert there["a"].tolist() == [1, 1]
    assert there["b"]["c"].tolist() == [0]


def test_two_parts_of_a_tensor_on_one_rank_are_refused(where):
    class Twice(DefaultSavePlanner):
        def finish_plan(self, new_plan):
            return dcp.SavePlan(new_plan.items * 2)

    with pytest.raises(CheckpointException, match="'t' has several parts on this rank"):
        save({"t": torch.ones(2)}, where, planner=Twice())
    assert list(where.parent.iterdir()) == []


def test_dtypes_that_dcp_would_cast_and_shapes_are_errors_that_list_all(where):
    save(
        {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(2, 2), "d": 4},
        where,
        planner=SafetensorsSavePlanner(),
    )
    state = {
        "a": torch.zeros(2, dtype=torch.int32),
        "b": torch.zeros(3, dtype=torch.float64),
        "c": torch.zeros(2, 2),
    }
    with pytest.raises(CheckpointException) as caught:
        load(state, where)
    expected = [
        "mismatch: 'a' is torch.int32 (2,), in the checkpoint torch.float32 (2,)",
        "mismatch: 'b' is torch.float64 (3,), in the checkpoint torch.float32 (3,)",
    ]
    assert str(failure(caught)).split("\n    ")[1:] == expected
    assert (state["c"] == 0).all()
    state |= {"c": torch.zeros(4), "d": torch.zeros(1), "e": 1, "f": torch.zeros(1), "a": 5}
    with pytest.raises(CheckpointException) as caught:
        load(state, where, planner=SafetensorsLoadPlanner())
    assert str(failure(caught)).split("\n    ")[1:] == [
        "mismatch: 'a' is no tensor, in the checkpoint torch.float32 (2,)",
        expected[1],
        "mismatch: 'c' is torch.float32 (4,), in the checkpoint torch.float32 (2, 2)",
        "mismatch: 'd' is torch.float32 (1,), in the checkpoint no tensor",
        "missing: 'e'",
        "missing: 'f'",
    ]
    assert state["e"] == 1


def test_part_of_a_checkpoint_and_part_of_a_state(where):
    save({"a": torch.ones(2), "b": torch.ones(3)}, where)
    assert load({"b": torch.zeros(3)}, where)["b"].tolist() == [1, 1, 1]
    for planner in (
        DefaultLoadPlanner(allow_partial_load=True),
        SafetensorsLoadPlanner(allow_partial_load=True),
    ):
        state = load({"a": torch.zeros(2), "z": torch.zeros(1)}, where, planner=planner)
        assert state["a"].tolist() == [1, 1]
        assert state["z"].item() == 0


def test_an_empty_optimizer_state_is_not_loaded_in_silence(where):
    save({"o": {"state": {0: {"m": torch.ones(1)}}}}, where)
    with pytest.raises(CheckpointException, match=r"missing: 'o'"):
        load({"o": {"state": {}}}, where, planner=SafetensorsLoadPlanner())


def test_values_of_other_types_stay_when_a_load_fails(where):
    """DCP's own planner puts None in place of them before it has read anything."""
    save({"t": torch.ones(2), "s": {"dtype": torch.float16}}, where, planner=SafetensorsSavePlanner())
    state = {"t": torch.zeros(3), "s": {"dtype": torch.float32}}
    with pytest.raises(CheckpointException):
        load(state, where, planner=SafetensorsLoadPlanner())
    assert state["s"] == {"dtype": torch.float32}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of a function that torch itself calls
def test_a_tensor_on_the_meta_device_is_made_where_the_group_is(where):
    save({"m": {"w": torch.arange(4)}}, where)
    there = load(
        {"m": {"w": torch.zeros(4, dtype=torch.int64, device="meta")}},
        where,
        planner=SafetensorsLoadPlanner(),
    )
    assert there["m"]["w"].tolist() == [0, 1, 2, 3]


def test_a_save_replaces_a_checkpoint_of_the_same_step(where):
    writer = SafetensorsWriter(where)
    for value in (1.0, 2.0):
        dcp.save({"t": torch.full((3,), value)}, storage_writer=writer)
        assert load({"t": torch.zeros(3)}, where)["t"].tolist() == [value] * 3
        assert [path.name for path in where.parent.iterdir()] == ["step-7"]


def test_one_writer_and_one_reader_serve_many_checkpoints(tmp_path):
    writer, reader = SafetensorsWriter(), SafetensorsReader()
    for step in (1, 2):
        dcp.save({"t": torch.tensor(step)}, checkpoint_id=tmp_path / f"step-{step}", storage_writer=writer)
    for step in (1, 2):
        state = {"t": torch.tensor(0)}
        dcp.load(state, checkpoint_id=str(tmp_path / f"step-{step}"), storage_reader=reader)
        assert state["t"].item() == step
        assert reader.checkpoint_id == str(tmp_path / f"step-{step}")
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [1, 2]


@pytest.mark.parametrize("make", [SafetensorsWriter, SafetensorsReader])
@pytest.mark.parametrize(
    ("path", "error", "match"),
    [
        (
            "runs/latest",
            ValueError,
            r"checkpoint_id='runs/latest': give a path that ends in step-.*'runs/latest/step-100'",
        ),
        ("runs/step-01", ValueError, "ends in step-"),
        ("", ValueError, "is no path"),
        (3, TypeError, "checkpoint_id=3: give a path"),
        ("memory://bucket/run", ValueError, "ends in step-"),
        ("nosuch://bucket/step-1", ValueError, "nosuch"),
        (Path("s3://bucket/step-1"), NotImplementedError, "give it as text"),
    ],
)
def test_a_wrong_path_is_an_error_at_once(make, path, error, match):
    with pytest.raises(error, match=match):
        make(path)
    with pytest.raises(error, match=match):
        make().reset(path)
    assert make.validate_checkpoint_id(path) is False
    assert make.validate_checkpoint_id("a/step-0") is True
    assert make("a/step-0").checkpoint_id == "a/step-0"
    assert make("memory://a/step-0").checkpoint_id == "memory://a/step-0"
    assert make("file:///a/step-0").checkpoint_id == "/a/step-0"
    assert make().checkpoint_id is None


def test_no_path_is_an_error_that_says_so():
    for call in (
        lambda: dcp.save({"t": torch.ones(1)}, storage_writer=SafetensorsWriter()),
        lambda: dcp.load({"t": torch.ones(1)}, storage_reader=SafetensorsReader()),
    ):
        with pytest.raises(CheckpointException, match="no checkpoint_id: give one to dcp"):
            call()


def test_what_is_no_checkpoint_is_never_replaced(where):
    where.mkdir(parents=True)
    (where / "thesis.tex").write_text("x")
    writer = SafetensorsWriter(where)
    writer._disk = disk = Faulty()
    with pytest.raises(CheckpointException, match="exists and is no checkpoint: move it away"):
        dcp.save({"t": torch.ones(1)}, storage_writer=writer)
    assert disk.calls == []  # at once, and not when all is written
    assert (where / "thesis.tex").read_text() == "x"
    assert [path.name for path in where.parent.iterdir()] == ["step-7"]


def test_plan_caching_saves_what_the_state_is_now(tmp_path):
    states = [
        {"t": torch.full((2,), 1.0), "v": {"n": 1}},
        {"t": torch.full((2,), 2.0), "v": {"n": 2}},
        {"t": torch.full((2,), 3.0), "v": {"n": 3}, "u": torch.tensor(3.0)},  # another structure
        {"t": torch.full((2,), 4.0), "v": {"n": 4}, "u": torch.tensor(4.0)},
        {"t": torch.full((2,), 5.0, dtype=torch.float64), "v": {"n": 5}, "u": torch.tensor(5.0)},
    ]
    usable = []
    for step, state in enumerate(states):

        class Planner(SafetensorsSavePlanner):
            def create_local_plan(self):
                plan = super().create_local_plan()
                usable.append(plan.usable)
                return plan

        save(state, tmp_path / f"step-{step}", planner=Planner(enable_plan_caching=True))
    assert usable == [True, False, True, False, False]
    for step, state in enumerate(states):
        there = {key: torch.zeros_like(value) if key != "v" else {} for key, value in state.items()}
        load(there, tmp_path / f"step-{step}", planner=SafetensorsLoadPlanner())
        assert there["v"] == {"n": step + 1}
        assert (there["t"] == step + 1).all()


def test_a_plan_that_another_writer_has_cached_is_good(tmp_path):
    for writer in (dcp.FileSystemWriter(tmp_path / "theirs"), SafetensorsWriter(tmp_path / "step-1")):
        dcp.save(
            {"t": torch.arange(3)},
            storage_writer=writer,
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
    assert load({"t": torch.zeros(3, dtype=torch.int64)}, tmp_path / "step-1")["t"].tolist() == [0, 1, 2]


def test_our_planners_work_with_dcps_own_storage(tmp_path):
    state = {"t": torch.ones(2), "s": {"milestones": Counter({3: 1})}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), planner=SafetensorsSavePlanner())
    there = {"t": torch.zeros(2), "s": {"milestones": Counter({9: 9})}}
    dcp.load(there, storage_reader=dcp.FileSystemReader(tmp_path), planner=SafetensorsLoadPlanner())
    assert there["s"] == state["s"]
    assert there["t"].tolist() == [1, 1]


def test_what_another_planner_pickled_is_not_unpickled(tmp_path):
    dcp.save({"s": {"x": 1}}, storage_writer=dcp.FileSystemWriter(tmp_path), planner=WithoutFlattening())
    with pytest.raises(CheckpointException, match="'s' is not typed JSON .* is never unpickled"):
        dcp.load({"s": {}}, storage_reader=dcp.FileSystemReader(tmp_path), planner=SafetensorsLoadPlanner())


def test_async_save_in_a_thread_saves_what_was_there_at_the_call(where):
    state = {"t": torch.ones(1000), "n": {"x": 1}}
    future = dcp.async_save(
        state, checkpoint_id=where, storage_writer=SafetensorsWriter(), planner=SafetensorsSavePlanner()
    )
    state["t"].fill_(2)
    assert isinstance(future, Future)
    future.result(30)
    there = load({"t": torch.zeros(1000), "n": {}}, where, planner=SafetensorsLoadPlanner())
    assert (there["t"] == 1).all()
    assert there["n"] == {"x": 1}


def test_a_writer_travels_to_another_process_without_its_save(where):
    writer = SafetensorsWriter(where)
    writer.set_up_storage_writer(True)
    writer.prepare_global_plan([dcp.SavePlan([])])
    there = pickle.loads(pickle.dumps(writer))
    assert there.checkpoint_id == str(where)
    del there
    assert [path.name[:5] for path in where.parent.iterdir()] == [".run-"]
    writer.reset()
    assert list(where.parent.iterdir()) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_async_saves_of_one_writer_may_overlap(tmp_path):
    """The first is in the middle of a write when the second is given to the same writer, and runs through."""
    go_on, begun = threading.Event(), threading.Event()

    class Slow(Disk):
        def create(self, path):
            if threading.current_thread() not in known:
                known.append(threading.current_thread())
                if len(known) == 1:
                    begun.set()
                    assert go_on.wait(30)
            return super().create(path)

    known, writer = [], SafetensorsWriter()
    writer._disk = Slow()
    futures = []
    for step in (1, 2):
        options = {"checkpoint_id": tmp_path / f"step-{step}", "storage_writer": writer, "no_dist": True}
        futures.append(dcp.async_save({"t": torch.tensor(step)}, **options))
        assert begun.wait(30)
    futures[1].result(30)
    go_on.set()
    futures[0].result(30)
    for step in (1, 2):
        assert load({"t": torch.tensor(0)}, tmp_path / f"step-{step}")["t"].item() == step


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_saves_in_two_threads_do_not_meet(tmp_path):
    """Two runs' saves into one directory, at the same time."""
    errors = []

    def saves(first):
        try:
            for step in range(first, first + 6, 2):
                dcp.save(
                    {"t": torch.tensor(step)},
                    storage_writer=SafetensorsWriter(tmp_path / f"step-{step}"),
                    no_dist=True,
                )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=saves, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [0, 1, 2, 3, 4, 5]
        for step in range(6):
            checkpointer.verify(step)
