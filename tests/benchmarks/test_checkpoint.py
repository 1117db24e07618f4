"""The checkpoint benchmark measures at a tiny size, and reports every figure."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "checkpoint.py"


def run(tmp_path: Path, *words: str) -> dict[str, dict]:
    report = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--mib", "1", "--tensors", "8", "--device", "cpu"]
    ran = subprocess.run(
        [*command, "--folder", str(tmp_path), "--json", str(report), *words],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode in (0, 3), ran.stdout + ran.stderr  # goals of time and memory are for large states
    assert list(tmp_path.glob("tmp*")) == []
    return {figure["name"]: figure for figure in json.loads(report.read_text())["figures"]}


def test_a_short_run_reports_every_figure(tmp_path: Path) -> None:
    peers = ("dcp.async_save", "dcp.async_save, one stager", "torch.save", "safetensors.save_file")
    figures = run(tmp_path, "--only", *peers)
    for kind in ("large", "small"):
        where = f"{kind}, 1 rank: "
        for title in ("stall, first save", "stall", "prewarming, ours"):
            assert figures[where + title]["value"] > 0
        for peer in peers:
            for title in ("stall", "until durable"):
                assert figures[f"{where}{title}, {peer}"]["value"] > 0
        durable = figures[where + "until durable"]
        assert durable["peer"] == "write + fsync"
        assert durable["ratio"] > 0
        assert figures[where + "exposed cost, against dcp"]["peer"] == "dcp.async_save"
        assert figures[where + "first load"]["peer"] == "read"
        assert figures[where + "peak memory"]["value"] > 1
    assert figures["planning, 64 ranks: save"]["goal"] is not None
    assert figures["planning, 64 ranks: dcp, global plan"]["value"] > 0


def test_two_ranks(tmp_path: Path) -> None:
    figures = run(tmp_path, "--ranks", "2", "--only", "dcp.save")
    assert figures["large, 2 ranks: until durable"]["value"] > 0
    assert figures["small, 2 ranks: until durable, dcp.save"]["value"] > 0
    assert not any("torch.save" in name for name in figures)
