"""Device arguments and ranks: what resolves, and what each mistake is told."""

import pytest
import torch

from overlapkit.device import as_device, rank_and_world
from tests.ranks import one_rank_group, run_ranks


@pytest.fixture
def two_gpus(monkeypatch):
    """A process that sees two CUDA devices, the second one current."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
def test_without_a_gpu(device, no_gpu):
    assert as_device(device) == torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "index"),
    [("cuda", 1), (None, 1), ("cuda:0", 0), (0, 0), (1, 1), (torch.device("cuda"), 1), ("cuda:1", 1)],
)
def test_a_gpu_gets_its_index(device, index, two_gpus):
    assert as_device(device) == torch.device("cuda", index)


@pytest.mark.parametrize("device", ["cuda:2", 7, torch.device("cuda", 2)])
def test_a_gpu_that_is_not_there(device, two_gpus):
    with pytest.raises(ValueError, match=r"=.*: this process sees 2 CUDA device\(s\), cuda:0 to cuda:1"):
        as_device(device)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_a_gpu_where_there_is_none(device, no_gpu):
    with pytest.raises(ValueError, match=r"sees no CUDA device; use device='cpu'"):
        as_device(device)


@pytest.mark.parametrize("device", ["gpu", "cpu:x", "", 1.5, -1, True, [], object()])
def test_what_names_no_device(device):
    with pytest.raises(ValueError, match=r"where=.* names no device: use 'cpu', 'cuda'"):
        as_device(device, "where")


@pytest.mark.parametrize("device", ["meta", "mps", "xpu"])
def test_a_device_that_we_do_not_run_on(device):
    with pytest.raises(ValueError, match=f"device='{device}': overlapkit runs on 'cpu' and 'cuda'"):
        as_device(device)


@pytest.mark.parametrize("launched", [None, "", "1"])
def test_one_process_is_rank_0_of_1(launched, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if launched is not None:
        monkeypatch.setenv("WORLD_SIZE", launched)
    assert rank_and_world() == (0, 1)


def test_launched_without_a_process_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE=4 is set .*init_process_group\(\)"):
        rank_and_world()


def test_a_process_group_decides(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with one_rank_group():
        assert rank_and_world() == (0, 1)
    assert run_ranks(2, lambda rank: rank_and_world()) == [(0, 2), (1, 2)]
