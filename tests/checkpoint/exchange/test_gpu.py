"""load_pretrained on a CUDA device: through host buffers, from several threads, into memory made there."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from overlapkit.checkpoint import load_pretrained

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_on_meta_gets_its_memory_and_values_on_the_device(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr("overlapkit.checkpoint.exchange.pretrained_fill._SLICE", 4096)
    truth = nn.Sequential(*(nn.Linear(300, 300) for _ in range(8)))
    save_file(truth.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(300, 300, dtype=dtype) for _ in range(8)))
    load_pretrained(model, tmp_path, dtype="cast")
    for name, value in model.state_dict().items():
        assert value.device.type == "cuda"
        assert torch.equal(value.cpu(), truth.state_dict()[name].to(dtype)), name
