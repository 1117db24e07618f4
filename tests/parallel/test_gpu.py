"""shard, replicate, accumulate, offload on one GPU, a world of one under NCCL: values, order, waits, memory.

All checks run in one process, which a fork could not do beside CUDA and which takes seconds to start.
"""

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import overlapkit as ok
from tests.on_gpu import assert_flat, no_waits, spin
from tests.parallel.models import VOCABULARY, batch, gpt, loss_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu


def wrapped(how: str, **options: Any) -> nn.Module:
    model = gpt().cuda()
    if how == "shard":
        return ok.shard(model, init_device_mesh("cuda", (1,)), **options)
    return ok.replicate(model, **options)


def values(model: nn.Module) -> list[torch.Tensor]:
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return [value.detach().cpu() for value in whole]


def trained(model: nn.Module, optimizer: Any, steps: int = 4, late: bool = False) -> list[torch.Tensor]:
    for step in range(steps):
        loss_of(model, batch(step).cuda()).backward()
        if late:
            spin()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def alone() -> list[torch.Tensor]:
    model = gpt().cuda()
    return trained(model, ok.AdamW(model.parameters(), lr=0.01, max_norm=0.1))


def close(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def shard_trains_as_one_process() -> None:
    for late in (False, True):
        model = wrapped("shard")
        close(trained(model, ok.AdamW(model.parameters(), lr=0.01, max_norm=0.1), late=late), alone())


def replicate_trains_as_one_process() -> None:
    for late in (False, True):
        model = wrapped("replicate")
        close(trained(model, ok.AdamW(model.parameters(), lr=0.01, max_norm=0.1), late=late), alone())


def offload_trains_as_one_process() -> None:
    model = wrapped("shard", offload=True)
    parameters = list(model.parameters())
    assert {parameter.device.type for parameter in parameters} == {"cpu"}
    close(trained(model, ok.AdamW(parameters, lr=0.01, max_norm=0.1)), alone())
    assert all(parameter.to_local().is_pinned() for parameter in parameters)  # type: ignore[attr-defined]


def accumulated_gradients_are_those_of_one_batch() -> None:
    for how in ("shard", "replicate"):
        model, whole = wrapped(how), gpt().cuda()
        batches = [batch(step).cuda() for step in range(3)]
        for one, scale in ok.accumulate(model, batches):
            spin()
            (loss_of(model, one) * scale).backward()
        sum(loss_of(whole, one) / 3 for one in batches).backward()  # type: ignore[union-attr]
        grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
        torch.testing.assert_close(grads, [p.grad for p in whole.parameters()], rtol=1e-4, atol=1e-6)


def steps(how: str) -> Callable[[], None]:
    model = wrapped(how)
    optimizer = ok.AdamW(model.parameters(), lr=0.01, max_norm=0.1)
    tokens = torch.randint(VOCABULARY, (4, 6), device="cuda")

    def step() -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def no_step_waits_for_the_device() -> None:
    for how in ("shard", "replicate"):
        step = steps(how)
        for _ in range(3):  # what is made once
            step()
        with no_waits():
            for _ in range(3):
                spin()
                step()


def memory_is_flat() -> None:
    for how in ("shard", "replicate"):
        assert_flat(steps(how))


CHECKS = {
    check.__name__: check
    for check in (
        shard_trains_as_one_process,
        replicate_trains_as_one_process,
        offload_trains_as_one_process,
        accumulated_gradients_are_those_of_one_batch,
        no_step_waits_for_the_device,
        memory_is_flat,
    )
}


def every_check(rank: int) -> dict[str, str]:
    """What each raised; empty where all is well."""
    torch.cuda.set_device(0)
    found = {}
    for name, check in CHECKS.items():
        try:
            check()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    return found


def test_on_one_gpu() -> None:
    (found,) = run_ranks(1, every_check, backend="cpu:gloo,cuda:nccl", start="spawn", timeout=100)
    failed = [f"--- {name}\n{said}" for name, said in found.items() if said]
    assert not failed, "\n".join(failed)
    assert found.keys() == CHECKS.keys()
