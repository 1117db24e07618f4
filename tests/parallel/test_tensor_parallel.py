"""Tensor-parallel models, sharded over the other dimensions of their mesh."""

import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import overlapkit as ok
from overlapkit.optim import clip_grad_norm_
from overlapkit.parallel import describe
from tests.parallel.models import batch, even_gpt, half, loss_of, split, worst_error
from tests.ranks import run_ranks

TENSOR_PARALLEL = {
    4: ((2, 2), ("dp", "tp"), "dp"),
    8: ((2, 2, 2), ("copy", "share", "tp"), ("copy", "share")),
}


@pytest.mark.parametrize("world", TENSOR_PARALLEL)
def test_tensor_parallel_models_train_and_clip_as_one_process(world: int):
    """pytorch#180346: torch's own clip_grad_norm_ fails on the two meshes that gradients are on."""
    shape, names, data = TENSOR_PARALLEL[world]

    def job(rank: int) -> tuple[float, float, float]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model, truth = split(even_gpt(), mesh["tp"]), even_gpt().double()
        table = describe(model, mesh[data])
        ok.shard(model, mesh[data])
        assert describe(model) == table
        part = half(rank // 2, world // 2)
        optimizers = [
            ok.AdamW(model.parameters(), lr=0.1, max_norm=0.05),
            torch.optim.AdamW(truth.parameters(), lr=0.1),
        ]
        for step in range(2):
            loss_of(model, part(batch(step))).backward()
            loss_of(truth, batch(step)).backward()
            norm = clip_grad_norm_(model.parameters(), 1e9)
            expected = torch.nn.utils.clip_grad_norm_(truth.parameters(), 0.05)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        gathered = next(row.gathered for row in table.units if row.name == "blocks.0")
        return worst_error(model, truth)[0], abs(float(norm) - float(expected)), gathered

    for error, norm_error, gathered in run_ranks(world, job):
        assert error < 1e-4  # Adam's first steps divide by gradients
        assert norm_error < 1e-5
        assert gathered == 4 * (8 + 8 + 6 * 7 + 6 + 8 * 6 + 8)  # of 12 rows 6; 7 rows padded to 8


def test_meshes_that_do_not_go_with_tensor_parallel_ones():
    def job(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        bad = [
            (None, "mesh is not given"),
            (init_device_mesh("cpu", (4,)), "or that one has no names"),
            (mesh["tp"], "mesh has 'tp', too"),
            (mesh, "mesh has 'tp', too"),
        ]
        model = split(even_gpt(), mesh["tp"])
        for other, message in bad:
            with pytest.raises(ValueError, match=rf"blocks.0.up.weight is split .*{message}.*mesh\['dp'\]"):
                ok.shard(model, other)
        with pytest.raises(ValueError, match=re.escape("blocks.0.up.weight is a DTensor")):
            ok.replicate(model)

    run_ranks(4, job)
