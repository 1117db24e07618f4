"""Models of transformers from small configs, swapped and trained a step beside themselves as they were."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlapkit import kernels

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NORMS = ["input_layernorm", "post_attention_layernorm"]
FOUR = [*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"]
HEADS = ["self_attn.q_norm", "self_attn.k_norm"]
FAMILIES = {  # what changes in each layer
    "Llama": ["mlp", *NORMS],
    "Mistral": ["mlp", *NORMS],
    "Qwen2": ["mlp", *NORMS],
    "Qwen3": ["mlp", *NORMS, *HEADS],
    "Gemma": ["mlp", *NORMS],
    "Gemma2": ["mlp", *FOUR],
    "Gemma3Text": ["mlp", *FOUR, *HEADS],
    "Phi3": ["mlp", *NORMS],
}


def build(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.2)
        if "norm" in name and not family.startswith("Gemma"):
            parameter.data += 1.0
    return model


def step(model: Any) -> tuple[Tensor, list[Tensor]]:
    ids = torch.arange(18).view(2, 9) * 7 % 64
    out = model(input_ids=ids, labels=ids)
    grads = torch.autograd.grad(out.loss, list(model.parameters()))
    return out.logits.detach(), list(grads)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_found_whole_and_computes_the_same(family: str) -> None:
    check(family)


@pytest.mark.parametrize("family", ["Llama", "Gemma", "Phi3"])
def test_through_triton(interpreted: None, family: str) -> None:
    check(family)


def check(family: str) -> None:
    model = build(family)
    (logits, grads), former = step(model), [type(module) for module in model.modules()]
    parameters = dict(model.named_parameters())
    result = kernels.swap(model)
    layers = [f"model.layers.{i}.{name}" for i in range(2) for name in FAMILIES[family]]
    assert sorted(result.changed) == sorted([*layers, "model.norm"])
    assert list(result.skipped) == ["model.rotary_emb"]
    assert "call kernels.rope" in result.skipped["model.rotary_emb"]
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    again = step(model)
    torch.testing.assert_close(again, (logits, grads), rtol=1e-3, atol=1e-4)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
        assert torch.equal(step(other)[0], again[0])
    result.undo()
    assert [type(module) for module in model.modules()] == former
    assert torch.equal(step(model)[0], logits)


def test_bfloat16_is_no_further_from_the_truth_than_before(path: str) -> None:
    model = build("Llama")
    truth = step(copy.deepcopy(model).double())[0]
    model = model.bfloat16()
    before = (step(model)[0].double() - truth).square().mean().sqrt()
    assert len(kernels.swap(model).changed) == 7
    after = (step(model)[0].double() - truth).square().mean().sqrt()
    assert after <= 1.1 * before


def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()
    layer = build("Llama").model.layers[0].mlp
    kernels.swap(layer)
    x = torch.randn(2, 3, 32)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_its_own_rotary_embedding_is_rope(path: str) -> None:
    """What `skipped` tells to call, in place of apply_rotary_pos_emb."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    embedding = build("Llama").model.rotary_emb
    q, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], list(range(9))])
    cos, sin = embedding(q, positions)
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    y, z = kernels.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    torch.testing.assert_close((y.transpose(1, 2), z.transpose(1, 2)), expected)
    ours = kernels.RotaryEmbedding(8, 64)
    y, z = ours(q.transpose(1, 2), k.transpose(1, 2), positions)
    torch.testing.assert_close((y.transpose(1, 2), z.transpose(1, 2)), expected)
