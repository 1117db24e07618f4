"""load_pretrained(): bit for bit, each rank its own bytes, and nothing opened that an attacker names."""

import json
import os
import shutil
import struct
import warnings

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from overlapkit.checkpoint import Checkpointer, DamagedCheckpoint, MismatchError, export, load_pretrained
from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.exchange.safetensors_file import Stored, read_box, read_header, runs
from tests.ranks import run_ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 6, bias=False)
        self.down = nn.Linear(6, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """A head tied to the embedding, sizes that shard unevenly, a buffer that is saved and one that is not."""

    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale[0] + self.table[1]


def on_meta(tied=True):
    """As people build large models: nothing has memory, but what no file holds."""
    with torch.device("meta"):
        model = Model(tied)
    model.table = torch.arange(4.0)
    return model


def filled(seed=0, tied=True):
    torch.manual_seed(seed)
    model = Model(tied)
    with torch.no_grad():
        model.scale.normal_()
    return model


def tensors_of(model):
    """What a Hugging Face file holds: tied weights once."""
    state = model.state_dict()
    if model.head.weight is model.embed.weight:
        del state["head.weight"]
    return {name: value.clone() for name, value in state.items()}


def write(folder, tensors, files=1):
    """A folder as transformers writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    where = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number::files]}
        save_file(part, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def same(model, other):
    state, truth = model.state_dict(), other.state_dict()
    assert state.keys() == truth.keys()
    for name, value in state.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(whole, truth[name]), name


class Counted:
    """Bytes that this process reads of tensors."""

    def __init__(self):
        self.nbytes = 0
        self._preadv = os.preadv

    def __call__(self, fd, views, offset):
        got = self._preadv(fd, views, offset)
        self.nbytes += got
        return got


@pytest.fixture
def counted(monkeypatch):
    counted = Counted()
    monkeypatch.setattr(os, "preadv", counted)
    return counted


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("build", [lambda: filled(9), on_meta])
def test_the_model_is_the_files(tmp_path, counted, files, build):
    truth, model = filled(), build()
    done = load_pretrained(model, write(tmp_path, tensors_of(truth), files))
    same(model, truth)
    assert model.head.weight is model.embed.weight
    assert all(p.requires_grad for p in model.parameters())
    x = torch.tensor([[1, 5]])
    assert torch.equal(model(x), truth(x))
    assert (done.missing, done.unexpected) == ((), ())
    assert done.nbytes == counted.nbytes == sum(value.nbytes for value in tensors_of(truth).values())


def test_a_file_or_an_index_may_be_named(tmp_path):
    truth = filled()
    write(tmp_path / "one", tensors_of(truth))
    write(tmp_path / "two", tensors_of(truth), 2)
    (tmp_path / "one" / "model.safetensors").rename(tmp_path / "one" / "other.safetensors")
    for path in ("one/other.safetensors", "two/model.safetensors.index.json"):
        model = filled(9)
        load_pretrained(model, tmp_path / path)
        same(model, truth)
    with pytest.raises(FileNotFoundError, match="has neither"):
        load_pretrained(model, tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_pretrained(model, tmp_path / "nowhere")


def test_wrappers_make_no_difference(tmp_path):
    truth, model = filled(), filled(9)
    write(tmp_path, tensors_of(truth))
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    load_pretrained(torch.compile(model, backend="eager"), tmp_path)
    model.blocks[0] = model.blocks[0]._orig_mod
    same(model, truth)


def test_what_is_exported_is_loaded(tmp_path):
    truth, model = filled(), on_meta()
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": truth}, block=True)
    export(tmp_path / "run", tmp_path / "out", shard_size=200)
    load_pretrained(model, tmp_path / "out")
    same(model, truth)


# --- sharded


def shard(model, placements=None):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, shard_placement_fn=placements)
    fully_shard(model, mesh=mesh)
    return model


def by_columns(parameter):
    from torch.distributed.tensor import Shard

    return Shard(1) if parameter.ndim == 2 else None


def load_sharded(rank, folder, meta, placements):
    """Returns the bytes read, those of this rank's shards, and whether all is as it should be."""
    os.preadv = counted = Counted()
    model = shard(on_meta() if meta else filled(9), placements)
    done = load_pretrained(model, folder)
    truth = filled()
    same(model, truth)
    mine = model.scale.nbytes + sum(parameter.to_local().nbytes for parameter in model.parameters())
    x = torch.tensor([[1, 5]])
    assert torch.allclose(model(x), truth(x), atol=1e-6)
    model(x).sum().backward()  # FSDP2 has all its own buffers
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    assert done.nbytes == counted.nbytes
    return counted.nbytes, mine


@pytest.mark.parametrize(("world", "placements"), [(2, None), (3, None), (2, by_columns)])
@pytest.mark.parametrize("meta", [True, False])
def test_each_rank_reads_its_own_bytes_only(tmp_path, world, meta, placements):
    folder = write(tmp_path, tensors_of(filled()), 2)
    whole = sum(value.nbytes for value in tensors_of(filled()).values())
    for read, mine in run_ranks(world, load_sharded, folder, meta, placements):
        if placements is None:
            assert read == mine < whole
        else:  # rows of less than a page are read whole: see the next test for longer ones
            assert mine <= read <= whole


def load_wide(rank, folder):
    os.preadv = counted = Counted()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    with torch.device("meta"):
        model = nn.Linear(4096, 6, bias=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1))
    load_pretrained(model, folder)
    assert torch.equal(model.weight.full_tensor(), wide()["weight"])
    return counted.nbytes


def wide():
    return {"weight": torch.arange(6 * 4096.0).view(6, 4096)}


def test_columns_longer_than_a_page_are_read_alone(tmp_path):
    folder = write(tmp_path, wide())
    assert run_ranks(2, load_wide, folder) == [3 * 4096 * 4] * 2


def test_a_box_is_read_wherever_it_lies(tmp_path, monkeypatch):
    """Every box of small tensors, against slicing; with and without reading what lies between."""
    shapes = [(), (5,), (3, 4), (2, 3, 4), (1, 5, 2), (2, 2, 2, 3)]
    for page in (0, 16, 4096):
        monkeypatch.setattr("overlapkit.checkpoint.exchange.safetensors_file._PAGE", page)
        for number, shape in enumerate(shapes):
            tensor = torch.randint(0, 99, shape, dtype=torch.int16)
            path = tmp_path / f"{page}-{number}"
            save_file({"t": tensor}, path)
            stored = read_header(path)["t"]
            memory = torch.empty(tensor.nbytes, dtype=torch.uint8)
            with path.open("rb") as file:
                for box in every_box(shape):
                    cut = tensor[box.inside(Box.whole(shape))]
                    assert torch.equal(read_box(file.fileno(), stored, box, memory), cut)


def every_box(shape):
    if not shape:
        return [Box((), ())]
    rest = every_box(shape[1:])
    edges = [(a, n) for a in range(shape[0]) for n in range(1, shape[0] - a + 1)]
    return [Box((a, *box.offset), (n, *box.shape)) for a, n in edges for box in rest]


def test_the_fewest_reads_that_make_up_a_box():
    assert list(runs((4, 6), Box((1, 0), (2, 6)), 2)) == [(12, 24)]
    assert list(runs((4, 6), Box((1, 2), (2, 3)), 2)) == [(16, 6), (28, 6)]
    assert list(runs((2, 3, 4), Box((0, 1, 0), (2, 2, 4)), 1)) == [(4, 8), (16, 8)]
    assert list(runs((2, 3), Box((0, 0), (0, 3)), 1)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_bounded(tmp_path, monkeypatch, dtype):
    """Reads of 256 bytes where rows are shorter, into the tensor's own memory or a buffer to be cast."""
    monkeypatch.setattr("overlapkit.checkpoint.exchange.pretrained_fill._SLICE", 256)
    taken, made = [], []
    preadv, empty = os.preadv, torch.empty

    def reading(fd, views, offset):
        taken.append(sum(view.nbytes for view in views))
        return preadv(fd, views, offset)

    def making(*size, **more):
        made.append(empty(*size, **more))
        return made[-1]

    truth, model = nn.Linear(10, 300), nn.Linear(10, 300, dtype=dtype)
    save_file(truth.state_dict(), tmp_path / "a.safetensors")
    monkeypatch.setattr(os, "preadv", reading)
    monkeypatch.setattr(torch, "empty", making)
    load_pretrained(model, tmp_path / "a.safetensors", dtype="cast")
    assert max(taken) == 256
    assert max(tensor.nbytes for tensor in made) <= 256
    assert torch.equal(model.weight, truth.weight.to(dtype))


def test_a_loaded_parameter_has_changed_to_whoever_looks(tmp_path):
    """Autograd, and a save that is being staged, tell a change by the version."""
    model = nn.Linear(3, 2)
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    before = model.weight._version
    load_pretrained(model, tmp_path / "a.safetensors")
    assert model.weight._version > before


# --- what does not fit


def refused(model, folder, **more):
    """The problems listed; the model is as it was."""
    before = {name: value.clone() for name, value in model.state_dict().items() if not value.is_meta}
    with pytest.raises(MismatchError) as caught:
        load_pretrained(model, folder, **more)
    for name, value in model.state_dict().items():
        assert value.is_meta or torch.equal(value, before[name])
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_all_that_does_not_fit_is_listed(tmp_path):
    tensors = tensors_of(filled())
    tensors["extra"] = torch.ones(1)
    del tensors["blocks.0.up.weight"], tensors["embed.weight"]
    tensors["blocks.1.down.weight"] = tensors["blocks.1.down.weight"].t().contiguous()
    tensors["blocks.1.down.bias"] = tensors["blocks.1.down.bias"].half()
    tensors["scale"] = torch.ones(3, dtype=torch.int64)
    folder = write(tmp_path, tensors)
    listed = [
        "missing: 'embed.weight'",
        "missing: 'head.weight'",
        "missing: 'blocks.0.up.weight'",
        "unexpected: 'extra'",
        "mismatch: 'blocks.1.down.weight' is (8, 6), in the file (6, 8)",
        "mismatch: 'blocks.1.down.bias' is torch.float32, in the file torch.float16; dtype='cast' casts it",
        "mismatch: 'scale' is torch.float32, in the file torch.int64, which cannot be cast to it",
    ]
    assert sorted(refused(filled(9), folder)) == sorted(listed)
    del listed[5]
    assert sorted(refused(filled(9), folder, dtype="cast")) == sorted(listed)


def test_not_strict_loads_what_fits_and_says_what_does_not(tmp_path):
    truth, model, other = filled(), filled(9), filled(9)
    tensors = tensors_of(truth)
    del tensors["blocks.0.up.weight"]
    tensors["extra"] = torch.ones(1)
    tensors["scale"] = torch.ones(4)
    with pytest.warns(
        UserWarning, match=r"missing: 'blocks.0.up.weight'; unexpected: 'extra'; mismatch: 'scale'"
    ):
        done = load_pretrained(model, write(tmp_path, tensors), strict=False)
    assert (done.missing, done.unexpected) == (("blocks.0.up.weight",), ("extra",))
    for name, value in model.state_dict().items():
        source = other if name in ("blocks.0.up.weight", "scale") else truth
        assert torch.equal(value, source.state_dict()[name])


@pytest.mark.parametrize("strict", [True, False])
def test_nothing_is_left_without_a_value(tmp_path, strict):
    tensors = tensors_of(filled())
    del tensors["blocks.0.up.weight"]
    write(tmp_path, tensors)
    with torch.device("meta"):
        model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        listed = refused(model, tmp_path, strict=strict)
    assert "without a value: 'blocks.0.up.weight' is on the meta device" in listed
    assert "without a value: 'table' is on the meta device" in listed
    assert sum("without a value" in line for line in listed) == 2
    assert "build a buffer on a real device" in listed[-1]
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")  # which unties: PyTorch's own
    model.head.weight = model.embed.weight
    with torch.no_grad():
        model.blocks[0].up.weight.fill_(7)
        model.table = torch.arange(4.0)
    with pytest.warns(UserWarning, match="missing"):
        load_pretrained(model, tmp_path, strict=False)
    assert (model.blocks[0].up.weight == 7).all()
    assert torch.equal(model.embed.weight, filled().embed.weight)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.float16)],
)
def test_dtypes_are_cast_when_asked(tmp_path, saved, wanted):
    torch.manual_seed(0)
    truth, model = nn.Linear(40, 3, dtype=saved), nn.Linear(40, 3, dtype=wanted)
    save_file(truth.state_dict(), tmp_path / "a.safetensors")
    refused(model, tmp_path / "a.safetensors")
    load_pretrained(model, tmp_path / "a.safetensors", dtype="cast")
    assert torch.equal(model.weight, truth.weight.to(wanted))
    with pytest.raises(ValueError, match="dtype='auto'"):
        load_pretrained(model, tmp_path / "a.safetensors", dtype="auto")


def test_a_value_too_large_is_an_error_that_says_what_state_the_model_is_in(tmp_path):
    save_file({"weight": torch.full((2, 2), 1e6), "bias": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(
        ValueError, match=r"'weight' has the value 1e\+06, too large for torch.float16"
    ) as caught:
        load_pretrained(nn.Linear(2, 2).half(), tmp_path / "a.safetensors", dtype="cast")
    assert "loaded in part" in caught.value.__notes__[0]


def test_rename(tmp_path):
    truth, model = filled(), filled(9)
    tensors = {f"model.{name}": value for name, value in tensors_of(truth).items()}
    folder = write(tmp_path, {**tensors, "rotary.inv_freq": torch.ones(2)})
    assert "unexpected: 'rotary.inv_freq'" in refused(model, folder)

    def rename(name):
        return None if "rotary" in name else name.removeprefix("model.")

    load_pretrained(model, folder, rename=rename)
    same(model, truth)
    with pytest.raises(ValueError, match="both become 'x'"):
        load_pretrained(model, folder, rename=lambda name: "x")


def test_ties_may_be_in_the_files_twice_if_they_agree(tmp_path):
    truth, model = filled(tied=False), filled(9)
    with torch.no_grad():
        truth.embed.weight[0, 0] = float("nan")
        truth.head.weight.copy_(truth.embed.weight)
    load_pretrained(model, write(tmp_path, tensors_of(truth)))
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight[1:], truth.head.weight[1:])
    with torch.no_grad():
        truth.head.weight[10, 7] += 1
    write(tmp_path, tensors_of(truth))
    with pytest.raises(MismatchError, match="'embed.weight' and 'head.weight' are one tensor in the model"):
        load_pretrained(filled(9), tmp_path)
    untied = filled(9, tied=False)
    load_pretrained(untied, tmp_path)
    assert torch.equal(untied.head.weight[10], truth.head.weight[10])


def test_a_weight_that_is_not_tied_is_missing(tmp_path):
    folder = write(tmp_path, tensors_of(filled()))
    assert refused(filled(9, tied=False), folder) == ["missing: 'head.weight'"]


def test_arguments(tmp_path):
    folder = write(tmp_path, tensors_of(filled()))
    with pytest.raises(ValueError, match="device='cpu': nothing of the model is on the meta device"):
        load_pretrained(filled(9), folder, device="cpu")
    with pytest.raises(ValueError, match="device='tpu'"):
        load_pretrained(on_meta(), folder, device="tpu")
    with pytest.raises(TypeError, match="rename is a dict: give a function"):
        load_pretrained(on_meta(), folder, rename={})
    with pytest.raises(TypeError, match="model is a dict"):
        load_pretrained({}, folder)
    model = on_meta()
    load_pretrained(model, folder, device="cpu")
    same(model, filled())


class WithExtra(nn.Linear):
    def get_extra_state(self):
        return torch.ones(2)

    def set_extra_state(self, state):
        raise AssertionError("left alone")


def test_extra_state_is_left_alone(tmp_path):
    save_file({"weight": torch.ones(1, 1), "bias": torch.ones(1)}, tmp_path / "a.safetensors")
    assert load_pretrained(WithExtra(1, 1), tmp_path / "a.safetensors").missing == ()


# --- hostile and damaged files


def outside(folder):
    """A sound file that is not in the folder, for what leads there."""
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder.parent / "outside.safetensors")
    return folder.parent / "outside.safetensors"


def set_file(name):
    def change(folder):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        first = index["weight_map"]["scale"]
        target = name(folder) if callable(name) else name
        where = index["weight_map"]
        index["weight_map"] = {key: target if file == first else file for key, file in where.items()}
        path.write_text(json.dumps(index))

    return change


def link_outside(folder):
    path = folder / "model-00001-of-00002.safetensors"
    target = outside(folder)
    path.unlink()
    path.symlink_to(target)


def link_up(folder):
    """Not a cache's snapshot: `blobs` beside it means nothing."""
    (folder.parent.parent / "blobs").mkdir(exist_ok=True)
    path = folder / "model-00001-of-00002.safetensors"
    path.rename(folder.parent.parent / "blobs" / "x")
    path.symlink_to("../../blobs/x")


def pipe(folder):
    path = folder / "model-00001-of-00002.safetensors"
    path.unlink()
    os.mkfifo(path)


def index_is(text):
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


HOSTILE_INDEX = {
    "a path outside": set_file("../outside.safetensors"),
    "an absolute path": set_file(lambda folder: str(outside(folder))),
    "a path that comes back": set_file("../model/model-00001-of-00002.safetensors"),
    "a folder": set_file("."),
    "its parent": set_file(".."),
    "nothing": set_file(""),
    "a zero byte": set_file("a\0b"),
    "a missing file": set_file("model-00009-of-00002.safetensors"),
    "a file without it": set_file("model-00002-of-00002.safetensors"),
    "a number": set_file(3),
    "a list": set_file(["model-00001-of-00002.safetensors"]),
    "a link outside": link_outside,
    "a link up": link_up,
    "a pipe": pipe,
    "no map": index_is("{}"),
    "a list of names": index_is('{"weight_map": ["a"]}'),
    "not JSON": index_is("{"),
    "deep": index_is('{"weight_map": ' + "[" * 100_000),
}


@pytest.mark.parametrize("case", HOSTILE_INDEX)
def test_a_hostile_index_is_refused_before_any_file_is_opened(tmp_path, monkeypatch, case):
    folder = write(tmp_path / "x" / "model", tensors_of(filled()), 2)
    outside(folder)
    HOSTILE_INDEX[case](folder)
    opened, real = [], os.open

    def looking(path, *more, **keywords):
        opened.append(str(path))
        return real(path, *more, **keywords)

    monkeypatch.setattr(os, "open", looking)
    with pytest.raises(DamagedCheckpoint):
        load_pretrained(on_meta(), folder)
    if case != "a file without it":  # which only the file itself shows
        assert [path for path in opened if "safetensors" in path and not path.endswith(".json")] == []


def test_a_link_to_itself_in_the_cache_of_hugging_face_is_followed(tmp_path):
    snapshot = write(tmp_path / "models--a--b" / "snapshots" / "1234", tensors_of(filled()), 2)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for number, path in enumerate(list(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    model = on_meta()
    load_pretrained(model, snapshot)
    same(model, filled())
    shutil.copy(blobs / "0", tmp_path / "elsewhere")
    for path in snapshot.glob("*.safetensors"):
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpoint, match="leads out of the folder"):
        load_pretrained(on_meta(), snapshot)


def header(table, data=b"\0" * 16, length=None):
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(4,), ends=(0, 16), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(ends), **more}


SOUND = json.dumps(entry()).encode()
HOSTILE_FILES = {
    "empty": b"",
    "short": b"\1\2",
    "a giant header": header({}, length=2**63),
    "a header beyond the file": header({}, b"", length=3),
    "not JSON": header(b"\xff{}"),
    "a list": header([1]),
    "a name twice": header(b'{"weight": %s, "weight": %s}' % (SOUND, SOUND)),
    "no shape": header({"weight": {"dtype": "F32", "data_offsets": [0, 16]}}),
    "a negative shape": header({"weight": entry(shape=(-2, -2))}),
    "a shape of text": header({"weight": entry(shape=("4",))}),
    "a giant shape": header({"weight": entry(shape=(2**40, 2**40))}),
    "a fraction": header({"weight": entry(shape=(4.0,))}),
    "beyond the file": header({"weight": entry(ends=(8, 24))}),
    "backwards": header({"weight": entry(ends=(16, 0))}),
    "before the data": header({"weight": entry(ends=(-8, 8))}),
    "too few bytes": header({"weight": entry(ends=(0, 12))}),
    "three ends": header({"weight": entry(ends=(0, 8, 16))}),
    "overlapping": header({"weight": entry(), "x": entry(shape=(2,), ends=(8, 16))}),
    "a number for a dtype": header({"weight": entry(dtype=3)}),
    "deep": header(b'{"weight": ' + b"[" * 100_000),
}


@pytest.mark.parametrize("case", HOSTILE_FILES)
def test_a_hostile_file_is_refused(tmp_path, case):
    (tmp_path / "model.safetensors").write_bytes(HOSTILE_FILES[case])
    with pytest.raises(DamagedCheckpoint, match="model.safetensors"):
        load_pretrained(nn.Linear(2, 2, bias=False), tmp_path)


def test_a_dtype_that_torch_does_not_have_is_no_damage(tmp_path):
    tensors = {"weight": entry("F4", (2, 2), (0, 2)), "other": entry("F32", (2, 2), (2, 18))}
    (tmp_path / "model.safetensors").write_bytes(header(tensors, b"\0" * 18))
    model = nn.Linear(2, 2, bias=False)
    assert refused(model, tmp_path, dtype="cast")[1] == (
        "mismatch: 'weight' is torch.float32, in the file F4, which cannot be cast to it"
    )


def test_the_same_name_in_two_files_is_refused(tmp_path):
    write(tmp_path, tensors_of(filled()), 2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    shutil.copy(first, second)
    with pytest.raises(DamagedCheckpoint, match="and so does model-00001"):
        load_pretrained(on_meta(), tmp_path)


def test_a_file_that_ends_early_is_an_error_and_no_hang(tmp_path):
    folder = write(tmp_path, tensors_of(filled()))
    path = folder / "model.safetensors"
    stored = read_header(path)["scale"]
    late = Stored("scale", path, torch.float32, "F32", (3,), path.stat().st_size - 4, 12)
    with path.open("rb") as file, pytest.raises(DamagedCheckpoint, match="ends at byte"):
        read_box(file.fileno(), late, Box.whole((3,)), torch.empty(12, dtype=torch.uint8))
    assert stored.nbytes == 12


def test_a_failed_read_stops_the_others_and_says_so(tmp_path, monkeypatch):
    folder = write(tmp_path, {f"{i}.weight": torch.ones(1, 1) for i in range(200)})
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(200)))
    reads = []

    def broken(fd, views, offset):
        reads.append(offset)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output") as caught:
        load_pretrained(model, folder)
    assert "loaded in part" in caught.value.__notes__[0]
    assert len(reads) <= 4  # one for each thread
