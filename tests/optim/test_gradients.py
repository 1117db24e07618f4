"""Gradients whose collective has not ended: the optimizer takes them when it has."""

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from overlapkit.optim.gradients import as_placed
from tests.ranks import one_rank_group


def test_a_gradient_that_is_on_its_way_is_waited_for() -> None:
    with one_rank_group():
        mesh = init_device_mesh("cpu", (1,))
        param, grad = (DTensor.from_local(torch.ones(3), mesh, [Replicate()]) for _ in range(2))
        there = grad._local_tensor
        grad._local_tensor = AsyncCollectiveTensor(there)
        found = as_placed(param, grad)
        assert type(found) is torch.Tensor  # the kernels read its address, and would wait for nothing
        assert found.data_ptr() == there.data_ptr()
