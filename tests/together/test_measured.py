"""The meter on real parts, whatever is done to loader and model: values stay, each step is whole, once."""

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import overlapkit as ok
from overlapkit.input import images
from overlapkit.measure.record import StepRecord
from overlapkit.measure.summary import PARTS
from tests.input.images.photos import write_photos
from tests.ranks import run_ranks

# The compiler asks every tensor for its gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

DATA = TensorDataset(torch.arange(24.0).reshape(24, 1), torch.ones(24, 1))


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))


def is_whole(record: StepRecord) -> bool:
    return record.period == sum(getattr(record, part) or 0 for part in PARTS) > 0


def train(model: nn.Module, optimizer: torch.optim.Optimizer, meter: Any, steps: int = 3) -> None:
    for step in range(steps):
        with meter.step():
            model(DATA.tensors[0][step : step + 4]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def compiled_in_place(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    model.compile(backend="eager", fullgraph=True)
    return model


WRAPPERS = {
    "compile()": compiled_in_place,
    "DistributedDataParallel": DistributedDataParallel,
    "replicate": ok.replicate,
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_meter_on_a_model_that_is_wrapped_later_sees_every_step(kind: str) -> None:
    def run(rank: int) -> tuple[bool, list[torch.Tensor]]:
        model = model_of()
        optimizer = ok.AdamW(model.parameters())
        with closing(ok.StepMeter(model, optimizer)) as meter:
            train(WRAPPERS[kind](model), optimizer, meter)
            last = meter.last
            seen = is_whole(last) and min(last.forward, last.backward, last.optimizer) > 0
            assert meter.report().steps == 3 - 1  # the first has no beginning
        return seen, [p.detach() for p in model.parameters()]

    plain = model_of()
    optimizer = ok.AdamW(plain.parameters())
    with closing(ok.StepMeter()) as meter:
        train(plain, optimizer, meter)
    for seen, found in run_ranks(2, run):
        assert seen
        for value, wanted in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(value, wanted.detach())


def test_a_meter_that_is_not_on_what_torch_compile_returned_says_what_to_do() -> None:
    torch._dynamo.reset()
    model = model_of()
    optimizer = ok.AdamW(model.parameters())
    wrapped = torch.compile(model, backend="eager")
    with closing(ok.StepMeter(model, optimizer)) as meter:
        train(wrapped, optimizer, meter)
        assert "on what torch.compile(model) returned" in " ".join(str(meter.report()).split())
    with closing(ok.StepMeter(wrapped, optimizer)) as meter:
        train(wrapped, optimizer, meter)
        assert min(meter.last.forward, meter.last.backward, meter.last.optimizer) > 0


def test_a_meter_attached_twice_counts_each_step_once_and_leaves_with_the_last() -> None:
    model = model_of()
    optimizer = ok.AdamW(model.parameters())
    loader = ok.DeviceLoader(DataLoader(DATA, batch_size=4), "cpu")
    first, second = (ok.StepMeter(model, optimizer, loader) for _ in range(2))
    for x, y in first.steps(loader):
        with second.step():
            (model(x) - y).square().mean().backward()
            optimizer.step()
    assert first.last.index == second.last.index
    assert is_whole(first.last)
    assert is_whole(second.last)
    first.close()
    train(model, optimizer, second)
    second.close()
    hooks = (model._forward_hooks, model._forward_pre_hooks, optimizer._optimizer_step_pre_hooks)
    assert not any(hooks)


def test_images_through_a_loader_and_a_meter_with_early_breaks(tmp_path: Path) -> None:
    """An early break ends its pass: the next one is what it is without any break."""
    pytest.importorskip("nvidia.dali", reason="needs DALI (extra images)")
    write_photos(tmp_path, 20)

    def loader_of() -> images.ImageLoader:
        return images.train_loader(tmp_path, None, 4, size=16, threads=1)

    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))
    before = threading.active_count()
    with closing(loader_of()) as bare:
        truth = [[y.tolist() for _, y in bare] for _ in range(3)]
    source = loader_of()
    loader = ok.DeviceLoader(source, "cpu", depth=2)
    with closing(ok.StepMeter(loader=loader)) as meter:
        for number in range(3):
            taken = []
            for x, y in meter.steps(loader):
                taken.append(y.tolist())
                model(x).sum().backward()
                if len(taken) == 2:
                    break
            assert taken == truth[number][:2]
            loader.set_epoch(number + 1)
        assert is_whole(meter.last)
        assert meter.report().steps > 0
    del loader
    source.close()
    assert threading.active_count() == before


def test_two_loaders_at_once_an_evaluation_inside_of_a_step() -> None:
    train_set = ok.DeviceLoader(DataLoader(DATA, batch_size=4, num_workers=1), "cpu")
    test_set = ok.DeviceLoader(DataLoader(DATA, batch_size=6), "cpu")
    model = model_of()
    optimizer = ok.AdamW(model.parameters())
    seen, sums = [], []
    with closing(ok.StepMeter(model, optimizer, train_set)) as meter:
        for _ in range(2):
            for x, _ in meter.steps(train_set):
                seen.append(x.sum().item())
                model(x).square().mean().backward()
                optimizer.step()
                with torch.no_grad():
                    sums.append(sum(x.sum().item() for x, _ in test_set))
                for _ in test_set:  # and one that is left in the middle
                    break
        assert is_whole(meter.last)
    whole = DATA.tensors[0].sum().item()
    assert sums == [whole] * 12
    assert seen == [sum(range(at, at + 4)) for at in range(0, 24, 4)] * 2
