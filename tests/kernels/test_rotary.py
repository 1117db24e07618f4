import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from overlapkit import kernels

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def exact(dim: int, n: int, base: float) -> torch.Tensor:
    """Angles (n, dim / 2) in float64 throughout."""
    return torch.outer(torch.arange(n).double(), base ** -(torch.arange(0, dim, 2).double() / dim))


def test_the_tables_are_right_to_the_last_bit_but_one() -> None:
    module = kernels.RotaryEmbedding(64, 4096, base=500_000)
    angle = exact(64, 4096, 500_000)
    # the frequencies are float32 ones, whose rounding 4,096 positions add up
    assert (module.cos - angle.cos()).abs().max() < 4096 * 2**-23
    few = module.cos[:2] - angle[:2].cos()
    assert few.abs().max() < 2**-23
    assert module.cos.dtype == module.sin.dtype == torch.float32
    assert list(module.state_dict()) == []
    assert repr(module) == "RotaryEmbedding(64, max_positions=4096, base=500000)"


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double", "to"])
def test_converting_the_model_leaves_the_tables_as_they_are(cast: str) -> None:
    module = kernels.RotaryEmbedding(8, 2048)
    before = module.cos.clone(), module.sin.clone()
    model = nn.Sequential(nn.Linear(2, 2), module)
    getattr(model, cast)(*([torch.bfloat16] if cast == "to" else []))
    assert model[0].weight.dtype != torch.float32
    assert torch.equal(module.cos, before[0])
    assert torch.equal(module.sin, before[1])


@pytest.mark.parametrize("moved", ["to", "forward"])
def test_tables_made_in_inference_mode_can_be_trained_with(moved: str) -> None:
    module = kernels.RotaryEmbedding(8, 4, device="meta" if moved == "forward" else "cpu")
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    with torch.inference_mode():  # an evaluation before training
        module.to(torch.float32) if moved == "to" else module(q, q)
    module(q, q)[0].sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_made_where_bfloat16_is_the_default(device: str) -> None:
    expected = kernels.RotaryEmbedding(8, 2048)
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = kernels.RotaryEmbedding(8, 2048, device=device)
    finally:
        torch.set_default_dtype(torch.float32)
    assert module.cos.dtype == torch.float32
    assert torch.equal(module.to_empty(device="cpu").cos, expected.cos)


def test_from_the_meta_device() -> None:
    """to_empty hands out memory with anything in it; assign=True hands out nothing at all."""
    expected = kernels.RotaryEmbedding(8, 16)
    with torch.device("meta"):
        module, other = kernels.RotaryEmbedding(8, 16), kernels.RotaryEmbedding(8, 16)
    assert module.cos.is_meta
    module.to_empty(device="cpu")
    assert torch.equal(module.cos, expected.cos)
    assert torch.equal(module.sin, expected.sin)
    other.load_state_dict({}, assign=True)
    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 1, 8)
    for a, b in zip(other(q, k), expected(q, k), strict=True):
        assert torch.equal(a, b)
    meta = kernels.RotaryEmbedding(8, 16, device="meta")(q.to("meta"), k.to("meta"))
    assert [x.shape for x in meta] == [q.shape, k.shape]


def test_copies_and_pickles(path: str) -> None:
    module = kernels.RotaryEmbedding(8, 16, interleaved=True, scaling={"rope_type": "linear", "factor": 4})
    q, k, positions = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 1, 8), torch.arange(5) + 3
    expected = kernels.rope(q, k, module.cos, module.sin, positions, interleaved=True)
    for other in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        for a, b in zip(other(q, k, positions), expected, strict=True):
            assert torch.equal(a, b)
    assert "interleaved=True, scaling={'rope_type': 'linear', 'factor': 4}" in repr(module)


def test_linear_scaling_is_a_position_between() -> None:
    plain, scaled = (
        kernels.RotaryEmbedding(8, 32, scaling=s) for s in (None, {"type": "linear", "factor": 4.0})
    )
    torch.testing.assert_close(scaled.cos[::4], plain.cos[:8])


def test_llama3_scaling() -> None:
    """Fast pairs keep their frequency, slow ones are 8 times slower, and there is no jump between."""
    plain, scaled = (kernels.RotaryEmbedding(32, 2, scaling=s) for s in (None, LLAMA3))
    turns = (
        64 * plain.sin[1].double().asin() / (2 * torch.pi)
    )  # in the old context; sine is invertible below 1
    ratio = scaled.sin[1].double().asin() / plain.sin[1].double().asin()
    assert torch.allclose(ratio[turns >= 4], torch.ones(()).double())
    assert torch.allclose(ratio[turns <= 1], torch.tensor(1 / 8).double(), rtol=1e-5)
    between = (turns < 4) & (turns > 1)
    assert between.any()
    smooth = (turns[between] - 1) / 3
    torch.testing.assert_close(ratio[between], (1 - smooth) / 8 + smooth, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_frequencies_are_those_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling: dict[str, Any] = {"default": {}, "linear": {"factor": 4.0}, "llama3": LLAMA3}[kind]
    scaling = {"rope_type": kind, "rope_theta": 500_000.0, **scaling}
    config = transformers.LlamaConfig(head_dim=64, rope_parameters=scaling)
    initial = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    frequency, _ = initial(config)
    ours = kernels.RotaryEmbedding(64, 2, base=500_000.0, scaling=scaling)
    torch.testing.assert_close(ours.sin[1], frequency.double().sin().float(), rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dim": 7}, ValueError, "dim=7: allowed are even numbers from 2 up"),
        ({"dim": 8.0}, TypeError, "dim=8.0 is a float"),
        ({"max_positions": 0}, ValueError, "max_positions=0"),
        ({"base": 0}, ValueError, "base=0: allowed are finite numbers above 0"),
        ({"base": "1"}, TypeError, "base='1' is a str"),
        (
            {"scaling": {"rope_type": "yarn"}},
            NotImplementedError,
            "rope_type='yarn': there are 'default', 'linear'",
        ),
        ({"scaling": {"rope_type": "linear"}}, ValueError, r"'linear' has \[\]: needed are \['factor'\]"),
        ({"scaling": {"factor": 2.0}}, ValueError, r"'default' has \['factor'\]: needed are \[\]"),
        ({"scaling": {"rope_type": "linear", "factor": 0}}, ValueError, r"scaling\['factor'\]=0"),
        ({"scaling": {"rope_theta": 5.0}}, ValueError, "rope_theta that is not base=10000.0"),
    ],
)
def test_bad_input(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kernels.RotaryEmbedding(**{"dim": 8, "max_positions": 4, **arguments})
