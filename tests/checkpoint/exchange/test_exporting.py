"""export(): what safetensors and transformers read is the model, whole or not there at all."""

import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from overlapkit.checkpoint import Checkpointer, DamagedCheckpoint, export
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.exchange.exporting import parse_size
from overlapkit.checkpoint.reader import Reader
from tests.checkpoint.test_distributed import full, sharded, step
from tests.ranks import run_ranks


class Tied(nn.Module):
    """An embedding whose weights are the head's too, extra state, and tensors of several dtypes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(2**40))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("none", torch.zeros(0, 3))

    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        pass


NAMES = ["embed.weight", "body.weight", "body.bias", "count", "flags", "none"]


def save(folder, state):
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state, block=True)
    return folder


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tied()


@pytest.fixture
def run(tmp_path, model):
    optimizer = torch.optim.AdamW(model.parameters())
    return save(tmp_path / "run", {"model": model, "optimizer": optimizer, "n": 1})


def read(folder):
    """All tensors of a folder, as safetensors reads them, by the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    where = json.loads(index.read_text())["weight_map"]
    parts = {name: load_file(folder / name) for name in set(where.values())}
    assert sorted(name for part in parts.values() for name in part) == sorted(where)
    return {name: parts[file][name] for name, file in where.items()}


def same(tensors, model, names=NAMES):
    assert sorted(tensors) == sorted(names)
    state = model.state_dict()
    for name, value in tensors.items():
        assert value.dtype == state[name].dtype
        assert torch.equal(value, state[name]), name


def test_one_file_is_the_model(tmp_path, model, run):
    out = tmp_path / "deep" / "out"
    done = export(run, out)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    same(read(out), model)
    assert done.files == (out / "model.safetensors",)
    assert (done.tensors, done.nbytes) == (6, sum(model.state_dict()[name].nbytes for name in NAMES))
    assert done.tied == {"head.weight": "embed.weight"}
    assert done.left_out == ("_extra_state",)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    fresh = Tied()
    assert set(fresh.load_state_dict(read(out), strict=False).missing_keys) == {"head.weight", "_extra_state"}
    assert torch.equal(fresh.head.weight, model.head.weight)


@pytest.mark.parametrize("limit", [1, 80, 200, 300, 10**9])
def test_shards_hold_each_tensor_once_and_no_more_than_their_limit(tmp_path, model, run, limit):
    done = export(run, tmp_path / "out", shard_size=limit)
    same(read(tmp_path / "out"), model)
    sizes = {}
    for path in done.files:
        if path.suffix == ".safetensors":
            tensors = load_file(path).values()
            sizes[path.name] = sum(tensor.nbytes for tensor in tensors)
            assert sizes[path.name] <= limit or len(tensors) == 1
    if limit == 10**9:
        assert list(sizes) == ["model.safetensors"]
        return
    count = len(sizes)
    assert list(sizes) == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    index = json.loads(done.files[-1].read_text())
    elements = sum(math.prod(tensor.shape) for tensor in read(tmp_path / "out").values())
    assert index["metadata"] == {"total_size": done.nbytes, "total_parameters": elements}


def test_every_tensor_begins_aligned(tmp_path, run):
    path = export(run, tmp_path / "out").files[0]
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    sizes = {"F32": 4, "BF16": 2, "I64": 8, "BOOL": 1}
    table = json.loads(data[8 : 8 + length])
    del table["__metadata__"]
    assert all((8 + length + t["data_offsets"][0]) % sizes[t["dtype"]] == 0 for t in table.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_point_is_cast_and_nothing_else(tmp_path, model, run, dtype):
    done = export(run, tmp_path / "out", dtype=dtype)
    found, state = read(tmp_path / "out"), model.state_dict()
    for name in NAMES:
        kept = state[name].to(dtype) if state[name].is_floating_point() else state[name]
        assert found[name].dtype == kept.dtype
        assert torch.equal(found[name], kept), name
    assert done.nbytes == sum(value.nbytes for value in found.values())


def test_a_value_too_large_for_the_dtype_is_an_error_and_infinities_are_none(tmp_path):
    state = {"model": nn.Linear(2, 2)}
    with torch.no_grad():
        state["model"].weight[0, 0] = math.inf
        state["model"].bias[1] = -70000.0
    run = save(tmp_path / "run", state)
    with pytest.raises(ValueError, match=r"'bias' has the value 70000, too large for torch.float16"):
        export(run, tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    export(run, tmp_path / "out", dtype=torch.bfloat16)
    assert read(tmp_path / "out")["weight"][0, 0] == math.inf


def test_prefixes_of_wrappers_are_gone(tmp_path, model):
    state = model.state_dict()
    del state["_extra_state"]
    averaged = AveragedModel(model)
    run = save(
        tmp_path / "run",
        {
            "ddp": {f"module._orig_mod.{name}": value for name, value in state.items()},
            "twice": {f"module.module.{name}": value for name, value in state.items()},
            "average": averaged,
            "own": {"module.a": torch.ones(1), "module": torch.ones(2)},  # a model's own names
        },
    )
    for key in ("ddp", "twice"):
        export(run, tmp_path / key, only=key)
        found = read(tmp_path / key)
        assert found.keys() == {*NAMES, "head.weight"}  # a plain dict's tensors are each their own
        assert torch.equal(found["head.weight"], model.head.weight)
    done = export(run, tmp_path / "average", only="average")
    same(read(tmp_path / "average"), averaged.module)
    assert set(done.left_out) == {"_extra_state", "n_averaged"}
    export(run, tmp_path / "own", only="own")
    assert read(tmp_path / "own").keys() == {"module.a", "module"}


def test_names_that_become_one_are_an_error(tmp_path):
    run = save(tmp_path / "run", {"m": {"a._orig_mod.b": torch.ones(1), "a.b": torch.zeros(1)}})
    with pytest.raises(ValueError, match=r"a\.b.*the same without their wrappers"):
        export(run, tmp_path / "out", only="m")


def test_which_model_must_be_clear(tmp_path, model, run):
    other = save(
        tmp_path / "other",
        {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1), "n": 1, "d": {"x": {"y": torch.ones(1)}}},
    )
    for only, match in {
        None: r"2 modules.*\['a', 'b'\]",
        "c": "no such key, but",
        "n": "is no model",
        "d": "'x' holds tensors in a dict",
    }.items():
        with pytest.raises(ValueError, match=match):
            export(other, tmp_path / "out", only=only)
    with pytest.raises(ValueError, match="is no model"):
        export(run, tmp_path / "out", only="optimizer")
    with pytest.raises(ValueError, match="has no tensors"):
        export(save(tmp_path / "third", {"empty": nn.ReLU()}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(other, tmp_path / "out", only="b")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, "bf16"])
def test_a_dtype_that_weights_do_not_have_is_refused(tmp_path, run, dtype):
    with pytest.raises(ValueError, match="dtype="):
        export(run, tmp_path / "out", dtype=dtype)


SIZES = {
    "5GB": 5 * 10**9,
    "4GiB": 4 * 2**30,
    "1.5 kb": 1500,
    "10": 10,
    "2MIB": 2 * 2**20,
    "3TB": 3 * 10**12,
    7: 7,
}


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size):
    assert parse_size(size) == SIZES[size]


@pytest.mark.parametrize("size", ["", "5XB", "-1GB", 0, "0GB", True, None, 1.5, "GB", "0.1B"])
def test_sizes_that_are_none(size):
    with pytest.raises(ValueError, match="shard_size="):
        parse_size(size)


THERE = ["model.safetensors", "model.safetensors.index.json", "model-00002-of-00003.safetensors"]


@pytest.mark.parametrize("there", THERE)
def test_weights_that_are_there_are_never_mixed_with(tmp_path, run, there):
    (tmp_path / there).write_text("precious")
    with pytest.raises(FileExistsError, match=there):
        export(run, tmp_path)
    assert (tmp_path / there).read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["run", there])


def test_other_files_stay_and_an_unfinished_export_is_named(tmp_path, model, run):
    out = tmp_path / "out"
    (out / ".overlapkit-export").mkdir(parents=True)
    (out / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="another export is writing there, or was killed"):
        export(run, out)
    (out / ".overlapkit-export").rmdir()
    export(run, out)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    for wrong in (tmp_path / "x.safetensors", out / "config.json"):
        with pytest.raises(ValueError, match="give a folder"):
            export(run, wrong)


class Failing(Disk):
    """Fails at the n-th change."""

    left = 0

    def _count(self):
        Failing.left -= 1
        if Failing.left == 0:
            raise OSError(28, "No space left on device")


for _name in ("create", "write", "sync", "sync_folder", "rename"):

    def _failing(self, *args, _name=_name):
        self._count()
        return getattr(Disk, _name)(self, *args)

    setattr(Failing, _name, _failing)


def test_a_failure_anywhere_leaves_nothing(tmp_path, model, run, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr("overlapkit.checkpoint.exchange.export_places.Disk", Failing)
    for at in range(1, 100):
        Failing.left = at
        try:
            export(run, out, shard_size=100)
        except OSError:
            assert not out.exists()
            continue
        break
    assert at > 20
    same(read(out), model)


def test_a_kill_anywhere_leaves_no_half_that_looks_whole(tmp_path, model, run, monkeypatch):
    """After each rename what is visible is nothing, or shards without an index, or all."""
    out = tmp_path / "out"
    seen = []
    rename = Disk.rename

    def looking(self, old, new):
        rename(self, old, new)
        seen.append(sorted(path.name for path in out.iterdir() if path.is_file()))

    monkeypatch.setattr(Disk, "rename", looking)
    done = export(run, out, shard_size=100)
    names = [path.name for path in done.files]
    assert len(names) > 3
    assert names[-1] == "model.safetensors.index.json"
    assert seen == [sorted(names[: n + 1]) for n in range(len(names))]


def test_damage_is_never_exported(tmp_path, run):
    path = run / "step-1" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    at = 8 + int.from_bytes(data[:8], "little")
    for place in range(at, len(data), 50):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            export(run, tmp_path / "out")
        except DamagedCheckpoint:
            assert not (tmp_path / "out").exists()
        else:  # a tensor of the optimizer
            (tmp_path / "out" / "model.safetensors").unlink()


def save_sharded(rank, folder):
    state = sharded()
    for _ in range(2):
        step(state)
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(2, state)
    return {name: value for name, value in full(state).items() if not name.startswith("optimizer")}


@pytest.mark.parametrize("world", [2, 3])
def test_shards_of_ranks_become_whole_tensors(tmp_path, world):
    truth = run_ranks(world, save_sharded, tmp_path / "run")[0]
    export(tmp_path / "run", tmp_path / "out")
    found = read(tmp_path / "out")
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        assert torch.equal(found[name], value), name


def test_memory_is_bounded(tmp_path, monkeypatch):
    model = nn.Linear(10, 600)
    run = save(tmp_path / "run", {"model": model})
    taken = []
    fill = Reader.fill

    def counting(self, target, box, saved):
        taken.append(target.nbytes)
        fill(self, target, box, saved)

    monkeypatch.setattr(Reader, "fill", counting)
    monkeypatch.setattr("overlapkit.checkpoint.slices.SLICE", 200)
    seen = []
    export(run, tmp_path / "out", dtype=torch.bfloat16, progress=lambda *at: seen.append(at))
    assert max(taken) == 200
    assert sum(taken) == 4 * 6600
    assert seen[-1] == (2 * 6600, 2 * 6600)
    found = read(tmp_path / "out")
    assert torch.equal(found["weight"], model.weight.bfloat16())


@pytest.mark.parametrize("shard_size", ["5GB", "10KB"])
def test_transformers_reads_it(tmp_path, shard_size):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    run = save(tmp_path / "run", {"model": model})
    config.save_pretrained(tmp_path / "out")
    export(run, tmp_path / "out", shard_size=shard_size)
    found, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert found.lm_head.weight is found.model.embed_tokens.weight
    for name, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
