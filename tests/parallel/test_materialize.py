"""materialize: values on the meta device become those of one process; nothing stays without a value."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import overlapkit as ok
from overlapkit.parallel import materialize, meta_parameters
from tests.parallel.models import WIDTH, Block, Gpt, even_gpt, half, split, train, trained_alone, worst_error
from tests.ranks import run_ranks


class Angles(nn.Module):
    """A non-persistent buffer that its constructor computes, as rotary embeddings have it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", 1 / torch.arange(1.0, WIDTH + 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.angles


class ResetAngles(Angles):
    def reset_parameters(self) -> None:
        self.angles = 1 / torch.arange(1.0, WIDTH + 1, device=self.angles.device)


class Parts(nn.Module):
    """Initialisation of every kind: views, other distributions, integers, buffers, children from above."""

    def __init__(self, angles: type[nn.Module] = ResetAngles) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, padding_idx=3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 1)
        self.statistics = nn.BatchNorm1d(5)
        self.angles = angles()
        self.mixed = Mixed()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.angles(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.mixed(self.norm(self.statistics(x))))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.empty(2 * WIDTH))
        self.shift = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("count", torch.empty(3, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        first, second = self.scale.chunk(2)  # held while three others are written
        nn.init.orthogonal_(self.square.weight)
        nn.init.zeros_(self.square.bias)
        nn.init.zeros_(self.shift)
        with torch.no_grad():
            first.normal_()
            second.copy_(torch.randn(WIDTH))
            self.square.bias.data.uniform_(1, 2)
        self.count.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.square(x) * self.scale[:WIDTH] + self.scale[WIDTH:] + self.shift


def built(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def differences(model: nn.Module, truth: nn.Module) -> list[str]:
    """Names whose values are not the same to the bit."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wanted = {**dict(truth.named_parameters()), **dict(truth.named_buffers())}
    assert list(found) == list(wanted)
    wholes = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in found.items()}
    return [name for name, whole in wholes.items() if not torch.equal(whole, wanted[name])]


def test_in_one_process_values_are_those_of_the_constructor():
    model = on_meta(Parts)
    torch.manual_seed(3)
    assert materialize(ok.shard(model)) is model
    after = torch.rand(1)
    assert differences(model, built(Parts)) == []
    assert torch.equal(after, torch.rand(1)), "the generator is where the constructor leaves it"


def test_sharded_values_are_those_of_one_process_and_train():
    def job(rank: int) -> list[Any]:
        found: list[Any] = []
        for options in ({}, {"units": []}, {"units": [["embed", "head"], "mixed"]}):
            model = ok.shard(on_meta(Parts), **options)
            torch.manual_seed(3)
            materialize(model)
            found.append(differences(model, built(Parts)))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "share"))
        model = ok.shard(on_meta(lambda: Gpt(tied=True)), mesh)
        torch.manual_seed(3)
        materialize(model)
        found.append(differences(model, built(lambda: Gpt(tied=True))))
        train(model, half(rank, 4))
        return [found, max(worst_error(model, trained_alone(built(lambda: Gpt(tied=True)))))]

    for found, error in run_ranks(4, job):
        assert found == [[], [], [], []]
        assert error < 2e-6


def test_tensor_parallel_values_are_those_of_one_process():
    def job(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = on_meta(even_gpt)
        split(model, mesh["tp"])
        ok.shard(model, mesh["dp"])
        truth = even_gpt()
        for each in (model, truth):
            torch.manual_seed(3)
            if each is model:
                materialize(model)
            else:
                truth.apply(
                    lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None
                )
        return differences(model, truth)

    assert run_ranks(4, job) == [[]] * 4


def test_shards_that_are_offloaded_go_to_the_host(monkeypatch: pytest.MonkeyPatch):
    from overlapkit import meta_device

    def job(rank: int) -> list[Any]:
        model = ok.shard(on_meta(Parts), offload=True)
        monkeypatch.setattr(meta_device, "as_device", lambda device: torch.device("meta"))  # for a GPU
        meta_device.materialise(model, None, shards_on_host=True)
        places = {p.device.type for p in model.parameters()}, {b.device.type for b in model.buffers()}
        monkeypatch.undo()
        model = ok.shard(on_meta(Gpt), offload=True)
        torch.manual_seed(3)
        materialize(model)
        train(model, half(rank))
        return [*places, max(worst_error(model, trained_alone(built(Gpt)))) < 2e-6]

    assert run_ranks(2, job) == [[{"cpu"}, {"meta"}, True]] * 2


class Root(Gpt):
    """Initialised from the top, as torchtitan's models are."""

    def init_weights(self) -> None:
        nn.init.trunc_normal_(self.embed.weight, std=0.1)
        for place, block in enumerate(self.blocks):
            block.norm.reset_parameters()
            for layer in (block.up, block.down):
                nn.init.normal_(layer.weight, std=0.1 / (place + 1))
                nn.init.zeros_(layer.bias)
        if type(self).__module__ == __name__:  # as transformers asks, which skips the rest for other code
            nn.init.eye_(self.head.weight)
        self.norm.reset_parameters()


def test_an_init_from_the_top():
    def job(rank: int) -> list[str]:
        model, truth = ok.shard(on_meta(Root)), built(Root)
        torch.manual_seed(4)
        materialize(model, lambda model: model.init_weights())
        torch.manual_seed(4)
        with torch.no_grad():
            truth.init_weights()
        assert type(model).__module__ != __name__, "as FSDP2 left it"
        return differences(model, truth)

    assert run_ranks(2, job) == [[]] * 2


def test_ranks_that_are_seeded_differently_are_told():
    def job(rank: int) -> str:
        model = ok.shard(on_meta(Gpt))
        torch.manual_seed(rank // 2)
        with pytest.raises(ValueError, match="differ") as error:
            materialize(model)
        return str(error.value)

    for text in run_ranks(4, job):
        assert text.startswith(
            "rank(s) 2, 3 differ from rank 0 in the state of random generators: call torch"
        )


def test_buffers_that_only_the_constructor_knows():
    with pytest.raises(
        ValueError, match=r"(?s)meta_parameters\(\).*angles.angles \(Angles\): was not written"
    ):
        materialize(on_meta(lambda: Parts(Angles)))

    def job(rank: int) -> list[Any]:
        with meta_parameters():
            model = Parts(Angles)
        state = model.embed.weight.is_meta, model.statistics.running_mean.is_meta, model.angles.angles.is_meta
        ok.shard(model)
        torch.manual_seed(3)
        materialize(model)
        return [state, differences(model, built(lambda: Parts(Angles)))]

    assert run_ranks(2, job) == [[(True, False, False), []]] * 2
    assert not nn.Linear(2, 2).weight.is_meta, "outside of it everything is as ever"


def test_without_a_mesh_what_has_values_goes_along():
    with meta_parameters():
        model = Parts(Angles)
    model.embed.register_buffer("real", torch.ones(2))
    materialize(model, device="cpu")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert model.embed.real.tolist() == [1, 1]


class Pair(nn.Module):
    """Resets both of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def reset_parameters(self) -> None:
        for child in (self.first, self.second):
            nn.init.constant_(child.weight, 2.0)


def test_what_has_values_is_not_reset():
    model = on_meta(Pair)
    model.second = nn.Linear(2, 2)
    kept = model.second.weight.clone()
    materialize(model)
    assert torch.equal(model.second.weight, kept)
    assert materialize(on_meta(Pair)).second.weight.tolist() == [[2, 2], [2, 2]]


def _half(model: nn.Module) -> None:
    model.weight[:1].fill_(1.0)
    model.bias.zero_()


def _replace(model: nn.Module) -> None:
    model.weight = nn.Parameter(torch.ones(3, 2))
    model.bias.zero_()


def _away(model: nn.Module) -> None:
    model.weight.zero_()
    model.bias = nn.Parameter(torch.ones(3, device="meta"))


class Flag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flag", torch.zeros(2, dtype=torch.bool))


UNSET = [
    (lambda: nn.Linear(2, 3), lambda model: None, r"weight \(Linear\): was not written.*\n.*bias"),
    (lambda: nn.Linear(2, 3), _half, r"weight \(Linear\): was not written, or not all of it"),
    (lambda: nn.Linear(2, 3), _away, r"bias \(Linear\): is on the meta device again"),
    (Flag, None, r"flag \(Flag\): was not written"),
]


@pytest.mark.parametrize(("make", "init", "message"), UNSET)
def test_nothing_stays_without_a_value(make: Any, init: Any, message: str):
    with pytest.raises(ValueError, match=f"(?s)no value after init.*{message}"):
        materialize(on_meta(make), init)


def test_all_ranks_are_told_what_one_lacks():
    def job(rank: int) -> str:
        model = ok.shard(on_meta(lambda: nn.Linear(2, 2)))
        with pytest.raises(ValueError, match="no value after init") as error:
            materialize(model, _half)  # rank 0 has just the row that is written
        return str(error.value)

    first, second = run_ranks(2, job)
    assert first == second
    assert "weight (FSDPLinear): was not written, or not all" in first


def test_nothing_sharded_stays_without_a_value_or_is_replaced():
    def job(rank: int) -> None:
        for init, message in ((_half, "not all of it"), (_replace, "was replaced by a whole tensor")):
            model = ok.shard(on_meta(lambda: nn.Linear(2, 3)))
            with pytest.raises(ValueError, match=rf"weight \(FSDPLinear\): .*{message}"):
                materialize(model, init)

    run_ranks(2, job)


BAD = [
    ("gpt", {}, TypeError, "model=str"),
    (Gpt(1), {}, ValueError, "nothing of the model is on the meta device"),
    (on_meta(Gpt), {"init": "normal"}, TypeError, "init='normal': give a function"),
    (on_meta(Gpt), {"device": "cuda:99"}, ValueError, "device='cuda:99'"),
]


@pytest.mark.parametrize(("model", "options", "kind", "message"), BAD)
def test_bad_input(model: Any, options: Any, kind: Any, message: str):
    with pytest.raises(kind, match=message):
        materialize(model, **options)


def test_an_optimizer_that_was_made_before_would_hold_nothing():
    model = on_meta(Gpt)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"in a SGD already.*call materialize first"):
        materialize(model)
    del optimizer
    materialize(model)


def test_replicate_asks_for_values_first():
    with pytest.raises(ValueError, match=r"embed.weight is on the meta device.* parallel.materialize"):
        ok.replicate(on_meta(Gpt))
