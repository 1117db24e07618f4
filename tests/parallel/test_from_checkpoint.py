"""A sharded model on the meta device is filled from a checkpoint, and no rank ever holds it whole."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import overlapkit as ok
from overlapkit.parallel import materialize
from tests.parallel.models import even_gpt, half, split, train, trained_alone
from tests.parallel.test_materialize import Angles, Parts, ResetAngles, built, differences, on_meta
from tests.ranks import run_ranks


def _save(folder: Path, **state: Any) -> None:
    with ok.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state)


def _restored(folder: Path, **state: Any) -> int:
    with ok.Checkpointer(folder) as checkpointer:
        return checkpointer.restore(state)


def test_restore_and_load_pretrained_fill_shards_and_buffers_are_right(tmp_path: Path):
    from safetensors.torch import save_file

    truth = built(Parts)
    _save(tmp_path / "run", model=truth)
    save_file(truth.state_dict(), tmp_path / "model.safetensors")

    def job(rank: int) -> list[Any]:
        loads: dict[str, Callable[[nn.Module], Any]] = {
            "restore": lambda model: _restored(tmp_path / "run", model=model),
            "load_pretrained": lambda model: ok.checkpoint.load_pretrained(model, tmp_path),
        }
        found = []
        for load in loads.values():
            model = ok.shard(on_meta(Parts))
            materialize(model, loads=True)
            assert all(bool(p.to_local().isnan().all()) for p in model.parameters()), (
                "values come from the file"
            )
            load(model)
            found.append(differences(model, truth))
        return found

    assert run_ranks(3, job) == [[[], []]] * 3


def test_buffers_that_no_file_has_must_get_a_value():
    def job(rank: int) -> None:
        model = ok.shard(on_meta(lambda: Parts(Angles)))
        with pytest.raises(ValueError, match=r"angles.angles \(Angles\): was not written") as error:
            materialize(model, loads=True)
        assert str(error.value).count("was not written") == 1, "the rest is the checkpoint's"

        def angles(model: Any) -> None:
            model.angles.angles.copy_(ResetAngles().angles)

        materialize(ok.shard(on_meta(lambda: Parts(Angles))), angles, loads=True)

    run_ranks(2, job)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path):
    truth = built(Parts)
    _save(tmp_path / "whole", model=truth)
    del truth.mixed.count
    _save(tmp_path, model=truth)

    def job(rank: int) -> None:
        model = ok.shard(on_meta(Parts))
        with pytest.raises(ok.checkpoint.MismatchError, match="on the meta device"):
            _restored(tmp_path / "whole", model=model)
        materialize(model, loads=True)
        with pytest.raises(ok.checkpoint.MismatchError, match="mixed.count"):
            _restored(tmp_path, model=model)
        assert all(bool(p.to_local().isnan().all()) for p in model.parameters()), "nothing was changed"

    run_ranks(2, job)


def _peak_mib(work: Callable[[], Any]) -> float:
    """By how much this process's memory rises at most while it works."""
    ctypes.CDLL(None).malloc_trim(0)  # freed pages are in memory yet: who gets them adds nothing
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here

    def read(name: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split(f"{name}:")[1].split()[0])

    before = read("VmRSS")
    work()
    return (read("VmHWM") - before) / 1024


class Wide(nn.Module):
    """96 MiB in blocks of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_no_rank_ever_holds_the_whole_model(tmp_path: Path):
    _save(tmp_path, model=built(Wide))

    def job(rank: int) -> list[float]:
        fresh, loaded = ok.shard(on_meta(Wide)), ok.shard(on_meta(Wide))
        torch.manual_seed(1)
        made = _peak_mib(lambda: materialize(fresh))

        def load() -> None:
            materialize(loaded, loads=True)
            _restored(tmp_path, model=loaded)

        return [made, _peak_mib(load)]

    # A shard is 24 MiB. Making it takes two whole weights of 4 more; restoring it as much for what was read,
    # and for the saves to come. Who held the model would hold 96 on top of the shard.
    for made, loaded in run_ranks(4, job):
        assert 20 < made < 90
        assert 20 < loaded < 115


def test_a_tensor_parallel_model_is_saved_and_restored_at_other_shapes(tmp_path: Path):
    def job(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = ok.shard(split(even_gpt(), mesh["tp"]), mesh["dp"])
        train(model, half(mesh["dp"].get_local_rank()))
        _save(tmp_path, model=model)
        turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
        fresh = [
            ok.shard(on_meta(even_gpt)),
            ok.shard(split(on_meta(even_gpt), mesh["tp"]), mesh["dp"]),
            ok.shard(split(on_meta(even_gpt), turned["tp"]), turned["dp"]),
        ]
        truth = dict(trained_alone(even_gpt()).named_parameters())
        errors = []
        for again in fresh:
            materialize(again, loads=True)
            assert _restored(tmp_path, model=again) == 1
            errors += [
                (each.full_tensor() - truth[name]).abs().max().item()
                for name, each in again.named_parameters()
            ]
        return errors

    for errors in run_ranks(4, job):
        assert max(errors) < 2e-6
