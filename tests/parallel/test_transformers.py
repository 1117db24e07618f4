"""Models of transformers: units, and initialisation on the meta device equal to the unsharded model's."""

from typing import Any

import pytest
import torch

import overlapkit as ok
from overlapkit.parallel import describe, materialize
from tests.parallel.test_materialize import differences, on_meta
from tests.ranks import run_ranks

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 37}


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=24, tie_word_embeddings=False))


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=37, n_positions=8))


UNITS = {
    _llama: ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm+lm_head", "(root)"],
    _gpt2: ["transformer.h.0", "transformer.h.1", "(root)"],  # tied; its residual projections are scaled
}


@pytest.mark.filterwarnings("ignore")
def test_units_and_values():
    pytest.importorskip("transformers")

    def job(rank: int) -> list[Any]:
        found = []
        for make, units in UNITS.items():
            models = []
            for sharded in (False, True):
                model = on_meta(make)
                found.append([row.name for row in describe(model).units] == units)
                model = ok.shard(model) if sharded else model
                torch.manual_seed(1)
                models.append(materialize(model, lambda model: model.init_weights()))
            found.append(differences(models[1], models[0]))
        return found

    assert run_ranks(2, job) == [[True, True, []] * 2] * 2
