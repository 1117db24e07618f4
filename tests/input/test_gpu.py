"""The input lanes on a GPU: who is late, what is reused, what waits, and what grows."""

from typing import Any

import numpy as np
import pytest
import torch

import overlapkit as ok
from overlapkit.input import inputs_and_targets
from overlapkit.lane import Lane
from tests.on_gpu import SPIN_S, assert_flat, no_waits, poison, spin

pytestmark = pytest.mark.gpu

N = 1 << 20  # float32 in a batch
WHO = ["copy", "transform", "consumer", "all"]


def source(count: int = 12) -> list[torch.Tensor]:
    return [torch.full((N,), float(k)) for k in range(count)]


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("late", WHO)
def test_every_value_is_right_whoever_is_late(
    monkeypatch: pytest.MonkeyPatch, late: str, depth: int, reuse: bool
) -> None:
    """And what a batch's memory holds after its life is NaN at once."""
    monkeypatch.setattr(Lane, "delay_s", SPIN_S if late in ("copy", "all") else 0.0)

    def transform(batch: torch.Tensor) -> torch.Tensor:
        if late in ("transform", "all"):
            spin()
        return batch * 2

    loader = ok.DeviceLoader(source(), "cuda", depth=depth, transform=transform, reuse_buffers=reuse)
    seen = []
    for _ in range(2):
        for batch in loader:
            if late in ("consumer", "all"):
                spin()
            seen.append((batch.double().sum(), batch.min(), batch.max()))
            del batch
            poison(4 * N)
    expected = [(2.0 * k * N, 2.0 * k, 2.0 * k) for k in range(12)] * 2
    assert [tuple(value.item() for value in one) for one in seen] == expected
    loader.close()


@pytest.mark.parametrize("reuse", [False, True])
def test_the_loop_does_not_wait_for_the_device(reuse: bool) -> None:
    loader = ok.DeviceLoader(source(), "cuda", transform=lambda batch: batch * 2, reuse_buffers=reuse)
    list(loader)  # what is made once
    total = torch.zeros((), device="cuda")
    with no_waits():
        for batch in loader:
            spin()
            total += batch.sum()
    assert total.item() == 2 * N * sum(range(12))
    loader.close()


@pytest.mark.parametrize("reuse", [False, True])
def test_memory_is_flat(reuse: bool) -> None:
    loader = ok.DeviceLoader(source(8), "cuda", transform=lambda batch: batch + 1, reuse_buffers=reuse)

    def batches() -> Any:
        while True:
            yield from loader

    passing = batches()
    assert_flat(lambda: next(passing).sum(), slack=10 * 4 * N)  # 200 batches are 20 times as much
    passing.close()
    loader.close()


def test_token_shards_arrive_as_on_the_cpu(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lane, "delay_s", SPIN_S)
    documents = [np.random.default_rng(k).integers(50_000, size=3000 + k, dtype=np.uint16) for k in range(20)]
    ok.write_token_shards(documents, tmp_path / "shards", progress=False)
    for pack in ("windows", "documents"):
        here, there = (
            ok.DeviceLoader(
                ok.TokenShards(tmp_path / "shards", 128, 4, seed=3, pack=pack),
                device,
                transform=inputs_and_targets,
            )
            for device in ("cpu", "cuda")
        )
        count = 0
        for expected, batch in zip(here, there, strict=True):
            spin()
            for one, other in zip(expected, batch, strict=True):
                assert other.is_cuda
                assert torch.equal(one, other.cpu())
            count += 1
        assert count > 50
        here.close()
        there.close()
