"""The optimizer's benchmarks report every figure, on the CPU and, as far as that can be told, on a GPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

import optim
import optim_convergence
from budget import Budget


def run(monkeypatch: pytest.MonkeyPatch, module: object, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["optim.py", *options])
    return module.main()


def test_a_short_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "optim.json"
    code = run(monkeypatch, optim, "--quick", "--device", "cpu", "--json", str(path))
    figures = {figure["name"]: figure for figure in json.loads(path.read_text())["figures"]}
    goals = [figure["met"] for figure in figures.values() if figure["goal"]]
    assert len(goals) == 4
    assert code == (0 if all(goals) else 3)
    assert figures["fp32, 4 large"]["ratio"] > 0
    assert {f"{form}, 1 large" for form in optim.FORMS} <= figures.keys()


def test_what_a_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code with small sets on the CPU: every figure has its peer, its share and its goal."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * 10**7, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    figures = {figure.name: figure for figure in optim.on_gpu(torch.device("cpu"), True, Budget(None))}
    assert figures["5,000 small in 200 groups with clipping, ms"].ratio_limit == pytest.approx(1 / 3)
    assert figures["one tensor beside foreach, ms"].peer == "foreach"
    assert figures["7B layers, share of copy bandwidth"].limit == 90
    assert len(figures) == 3 * 5 + 2 * len(optim.FORMS)
    whole = optim.layers_of_7b(10**9)
    assert 0.7e9 < sum(torch.Size(shape).numel() for shape in whole) <= 1e9


def test_a_short_run_of_convergence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(optim_convergence, "FORMS", dict(list(optim_convergence.FORMS.items())[:2]))
    options = ("--steps", "3", "--figure", str(tmp_path / "loss.png"), "--json", str(tmp_path / "loss.json"))
    assert run(monkeypatch, optim_convergence, *options) in (0, 3)
    figures = json.loads((tmp_path / "loss.json").read_text())["figures"]
    assert [figure["peer"] for figure in figures] == [None, "fp32", "fp32"]
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
