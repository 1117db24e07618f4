import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from overlapkit import kernels
from overlapkit.measure.operators import Operators, Product
from tests.cuda_fake import fake_cuda, on_device


def counting(work, phase=lambda: "forward"):
    with Operators(phase) as seen:
        work()
    return seen


def transformer():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(4, 8, 3, padding=1), nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
    )
    return lambda: model(torch.ones(2, 4, 6)).sum().backward()


def head():
    weight = torch.randn(11, 6, requires_grad=True)
    x = torch.randn(5, 6, requires_grad=True)
    target = torch.arange(5)
    return lambda: kernels.linear_cross_entropy(x, weight, target).backward()


@pytest.mark.parametrize("build", [transformer, head])
def test_flops_are_those_of_torchs_own_counter(build):
    work = build()
    work()  # the kernels register their formulas when they are first used
    with FlopCounterMode(display=False) as truth:
        work()
    assert sum(counting(build()).flops.values()) == truth.get_total_flops() > 0


def test_products_have_their_shapes_and_flops():
    x, y = torch.randn(3, 5), torch.randn(5, 7)
    batch = torch.randn(2, 3, 5, dtype=torch.bfloat16)
    seen = counting(lambda: (x @ y, x @ y, torch.addmm(torch.ones(7), x, y), batch @ batch.transpose(1, 2)))
    assert seen.products == {
        Product("aten.mm", 1, 3, 5, 7, torch.float32, "cpu"): 2 * 2 * 3 * 5 * 7,
        Product("aten.addmm", 1, 3, 5, 7, torch.float32, "cpu"): 2 * 3 * 5 * 7,
        Product("aten.bmm", 2, 3, 5, 3, torch.bfloat16, "cpu"): 2 * 2 * 3 * 5 * 3,
    }
    assert set(seen.flops) == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("phase", ["paused", "recompute", "optimizer"])
def test_what_is_not_the_models_is_not_counted(phase):
    seen = counting(lambda: torch.ones(3, 3) @ torch.ones(3, 3), lambda: phase)
    assert (seen.flops, seen.products) == ({}, {})


def test_a_dtensors_work_is_that_of_this_rank(tmp_path):
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = DTensor.from_local(torch.ones(3, 5), mesh, [Replicate()])
        seen = counting(lambda: x @ x.t())
    finally:
        dist.destroy_process_group()
    assert sum(seen.flops.values()) == 2 * 3 * 5 * 3


def test_where_the_host_waits_for_the_device():
    with fake_cuda():
        x = on_device(torch.tensor([1.0, 2.0]))
        host = torch.ones(2)

        def work():
            for _ in range(3):
                x.sum().item()
            torch.ops.aten._to_copy(x, device="cpu")
            torch.ops.aten._to_copy(x, device="cpu", non_blocking=True)
            x.copy_(host, non_blocking=True)
            x.copy_(host)
            x[x > 1]
            x[0:1].add_(1)
            host.sum().item()

        seen = counting(work)
        first = work.__code__.co_firstlineno
    here = {
        (name, int(place.rpartition(":")[2]) - first): times for (name, place), times in seen.syncs.items()
    }
    assert here == {
        ("aten._local_scalar_dense", 2): 3,
        ("aten._to_copy", 3): 1,
        ("aten.copy_", 6): 1,
        ("aten.index", 7): 1,
    }
    assert all(place.startswith(__file__) for _, place in seen.syncs)


def test_on_the_cpu_the_host_waits_for_nothing():
    seen = counting(lambda: (torch.ones(3).sum().item(), torch.ones(3).nonzero(), torch.ones(3).tolist()))
    assert seen.syncs == {}


def test_higher_order_operators_pass():
    from torch._higher_order_ops.wrap import wrap

    assert counting(lambda: None).flops == {}
    with Operators(lambda: "forward"):
        assert torch.equal(wrap(lambda x: x + 1, torch.ones(2)), torch.full((2,), 2.0))
