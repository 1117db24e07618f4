"""The example with transformers: what it leaves is loaded by transformers, and goes on from there."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from overlapkit.checkpoint import diff
from tests.examples.scripts import refusal, run, run_on_ranks

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(300)
SCRIPT = "finetune_transformers.py"
SHORT = ("--device", "cpu", "--window", 32, "--megabytes", 0.1, "--batch", 4, "--lr", 0.05, "--steps", 5)
SMALL = (*SHORT, "--width", 32, "--layers", 2, "--vocab", 300)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the first run, used by all that take the same tokenizer and text."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole")
    run(SCRIPT, *SMALL, "--data", data, "--out", out)
    return out


def result(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())


def test_what_it_leaves_is_the_trained_model(whole: Path, data: Path) -> None:
    folder = whole / "model-5"
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    saved = load_file(folder / "model.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved.get(name, saved["model.embed_tokens.weight"])), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "def f(x):\n\treturn 'é ' + x  # 東京\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == model.config.vocab_size == 300
    found = result(whole)
    assert found["difference"] < 1e-4
    assert 3.0 < found["held_out"] < math.log(300) - 0.05  # what all tokens alike would leave


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    whole: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*SMALL, "--data", data, "--out", tmp_path)
    run(SCRIPT, *words, "--stop-at", 2)
    run(SCRIPT, *words)
    assert "going on after step 2" in (printed := capsys.readouterr().out)
    assert "loaded by transformers, goes on like this:\ndef __init__" in printed
    difference = diff(tmp_path, whole)
    assert difference.same_tensors > 40
    assert difference.same, difference
    assert result(tmp_path)["held_out"] == result(whole)["held_out"]


def test_two_ranks_export_whole_tensors(whole: Path, data: Path, tmp_path: Path) -> None:
    words = (*SMALL, "--data", data, "--out", tmp_path)
    run_on_ranks(2, (SCRIPT, *words))  # compares logits itself
    one, two = (load_file(out / "model-5" / "model.safetensors") for out in (whole, tmp_path))
    assert {name: value.shape for name, value in one.items()} == {n: v.shape for n, v in two.items()}
    found = result(tmp_path)
    assert found["world"] == 2
    assert found["report"]["parts"]["communication"]["bytes"] > 0
    assert found["held_out"] == pytest.approx(result(whole)["held_out"], rel=0.02)  # other windows in a batch


def test_it_goes_on_from_what_it_left(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    words = ("--pretrained", whole / "model-5", "--data", tmp_path / "data", "--out", out, "--lr", 0.0)
    run_on_ranks(2, (SCRIPT, *SHORT, *words, "--steps", 1))
    before = load_file(whole / "model-5" / "model.safetensors")
    after = load_file(out / "model-1" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name  # a learning rate of 0 changes nothing
    (tokens,) = (tmp_path / "data").iterdir()  # its own tokenizer's
    kept = (tokens / "tokenizer" / "tokenizer.json").read_text()
    assert json.loads(kept) == json.loads((whole / "model-5" / "tokenizer.json").read_text())


def test_wrong_options_are_one_line_before_anything_is_written(tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out", "--data", tmp_path / "data")
    assert "--width 30: give a multiple of 8" in refusal(SCRIPT, *out, "--width", 30)
    assert "--megabytes 0: give more than 0" in refusal(SCRIPT, *out, "--megabytes", 0)
    assert "--vocab 256: give at least 257" in refusal(SCRIPT, *out, "--vocab", 256)
    given = refusal(SCRIPT, *out, "--pretrained", tmp_path, "--layers", 2)
    assert f"--layers: leave it out, --pretrained {tmp_path} has one" in given
    missing = refusal(SCRIPT, *out, "--pretrained", tmp_path)
    assert f"--pretrained {tmp_path}: there is no config.json in it" in missing
    assert list(tmp_path.iterdir()) == []
