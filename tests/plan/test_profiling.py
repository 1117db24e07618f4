"""What is measured of a model, against counts made by hand and a clock that the model moves."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overlapkit.measure.clock import HostClock
from overlapkit.plan import Fabric, Wire, profiling, simulate
from overlapkit.plan.costs import Profile, UnitProfile, fingerprint
from overlapkit.plan.profiling import profile
from tests.plan.models import Small, made


def batch() -> tuple[Tensor, Tensor]:
    return torch.randint(50, (4, 8)), torch.randint(50, (4, 8))


def test_parameters_activations_and_inputs_are_counted() -> None:
    model = Small()
    found = profile(model, batch(), tokens=32, steps=1)
    assert [unit.name for unit in found.units] == [
        "embed",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "norm+head",
        "(root)",
    ]
    assert [unit.block for unit in found.units] == [False, True, True, True, False, False]
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert (found.tokens, found.source, found.device) == (32, "measured", "cpu")
    block = found.units[1]
    assert block.gradients == (16, 16, 16 * 64, 64, 64 * 16, 16)
    assert block.parameters == block.trained == sum(block.gradients)
    assert block.nbytes == 4 * block.parameters
    rows = 4 * 8
    assert block.inputs == rows * 16 * 4
    # The layer norm's input, mean and rstd; up's input; relu's output, which is down's input too.
    assert block.saved == rows * 4 * (16 + 2 + 16 + 64)


def test_frozen_parameters_have_no_gradients() -> None:
    model = Small()
    model.blocks[1].requires_grad_(False)
    found = profile(model, batch(), steps=1)
    assert (found.units[2].trained, found.units[2].parameters) == (0, found.units[1].parameters)


class Ticking(HostClock):
    """Time passes where the model says that it works, and nowhere else."""

    seconds = 0.0

    def now(self) -> int:
        return round(self.seconds * 1e9)


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, clock: Ticking, forward: float, backward: float) -> Tensor:
        clock.seconds += forward
        ctx.left = clock, backward
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        clock, backward = ctx.left
        clock.seconds += backward
        return gradient, None, None, None


class Worker(nn.Module):
    def __init__(self, clock: Ticking, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.work = clock, forward, backward

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(x @ self.weight, *self.work)


class Workers(nn.Module):
    def __init__(self, clock: Ticking) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Worker(clock, 2.0, 6.0), Worker(clock, 4.0, 1.0)])
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(self.blocks[1](self.blocks[0](x)), self.clock, 0.5, 0.25).sum()


def test_time_is_given_to_the_unit_that_spends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking()
    monkeypatch.setattr(profiling, "clock_of", lambda device: clock)
    found = profile(Workers(clock), torch.ones(2, 2), steps=3)
    assert [(unit.forward_s, unit.backward_s) for unit in found.units] == [
        (2.0, 6.0),
        (4.0, 1.0),
        (0.5, 0.25),
    ]
    assert (found.forward_s, found.backward_s) == (6.5, 7.25)


def test_nothing_of_the_model_is_changed() -> None:
    model = Small()
    (model(*batch())).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    profile(model, batch(), steps=1)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert state.shape == torch.get_rng_state().shape


def test_a_loss_of_ones_own_and_a_batch_by_keyword() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found = profile(model, {"input": torch.ones(3, 4)}, loss=lambda out, _: out.square().mean(), steps=1)
    assert [unit.name for unit in found.units] == ["0", "1", "(root)"]
    with pytest.raises(ValueError, match=r"the model's output \(\(3, 4\)\) is no loss.*give loss="):
        profile(model, torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"what loss= returned \(float\)"):
        profile(model, torch.ones(3, 4), loss=lambda out, _: 1.0)


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (lambda x: x, TypeError, "model=function"),
        (nn.Identity(), ValueError, "no parameters"),
        (nn.Linear(2, 2, device="meta"), ValueError, "meta device"),
    ],
    ids=["function", "none", "meta"],
)
def test_what_cannot_be_profiled_is_refused(model: object, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        profile(model, torch.ones(2, 2))  # type: ignore[arg-type]


def test_json_brings_a_profile_back_and_another_model_is_told_apart(tmp_path) -> None:
    model = Small()
    found = profile(model, batch(), tokens=32, steps=1)
    found.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == found
    found.check_model(Small())
    made().check_model(model)  # one that was written by hand is of no model
    with pytest.raises(ValueError, match=r"made of another model \(Small-.*; this one is Small-"):
        found.check_model(Small(width=8))
    assert fingerprint(model) != fingerprint(Small(width=8))
    with pytest.raises(ValueError, match="no profile: KeyError"):
        Profile.from_json("{}")
    with pytest.raises(ValueError, match="format 99"):
        Profile.from_json(found.to_json().replace('"format": 1', '"format": 99'))


@pytest.mark.parametrize(
    ("units", "words"),
    [
        ((), "last unit"),
        ((UnitProfile(("a",), True, 1, (), 4, 0.0, 0.0, 0, 0),), "last unit"),
        ((UnitProfile((), False, 1, (), 4, -1.0, 0.0, 0, 0),), "forward_s=-1.0"),
        ((UnitProfile((), False, -1, (), 4, 0.0, 0.0, 0, 0),), "parameters=-1"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(units: tuple[UnitProfile, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Profile(units)


def test_a_profile_by_hand_names_its_device_as_torch_does() -> None:
    root = (UnitProfile((), False, 1, (), 4, 0.0, 0.0, 0, 0),)
    assert Profile(root, device="cuda:1").device == "cuda:1"
    with pytest.raises(ValueError, match="device='H100': give it as torch does, 'cuda' or 'cpu'"):
        Profile(root, device="H100")


class _Two(nn.Module):
    """Its first output goes nowhere."""

    def __init__(self, clock: Ticking) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.clock = clock

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ self.weight).sum(), _Work.apply(x @ self.weight, self.clock, 2.0, 6.0)


class _Twos(nn.Module):
    def __init__(self, clock: Ticking) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Two(clock), _Two(clock)])

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            _, x = each(x)
        return x.sum()


def test_an_output_that_goes_nowhere_hides_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking()
    monkeypatch.setattr(profiling, "clock_of", lambda device: clock)
    found = profile(_Twos(clock), torch.ones(2, 2), steps=1)
    assert [(unit.forward_s, unit.backward_s) for unit in found.units] == [(2.0, 6.0), (2.0, 6.0), (0.0, 0.0)]


class _Again(nn.Module):
    """Calls one block twice, each time to be recomputed."""

    def __init__(self, clock: Ticking) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Worker(clock, 2.0, 6.0)])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda given: self.blocks[0](given).square(), x, use_reentrant=False)
        return x.sum()


def test_recomputation_is_backward_and_calls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking()
    monkeypatch.setattr(profiling, "clock_of", lambda device: clock)
    found = profile(_Again(clock), torch.ones(2, 2), units=["blocks.0"], steps=1)
    block, root = found.units
    assert block.calls == 2
    assert (block.forward_s, root.forward_s) == (4.0, 0.0)
    assert block.backward_s + root.backward_s == 2 * (2.0 + 6.0)
    assert "gathered once: blocks.0" in simulate(found, Fabric(Wire(1e9)), 2).assumptions[-1]
