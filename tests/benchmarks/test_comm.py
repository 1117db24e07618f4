"""The benchmark of communication: its bounds and figures from made-up numbers, and one short real run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import comm
import netlab


def made(world: int) -> list[dict[str, Any]]:
    """Ranks that took round numbers: 100 bytes of parameters, 10 bytes a second, the last rank slower."""
    names = [comm.ALONE, *comm.PEERS, *comm.OURS]
    return [
        {
            "steps": {name: (1.0 + place + rank, 3.0 + place) for place, name in enumerate(names)},
            "forward": [0.5, 0.7],
            "rates": [9.0 - rank, 10.0 + rank],
            "first_ready": 0.25,
            "gathered": 180,
            "reduced": 100,
            "parameters": 100,
            "sent": dict.fromkeys(names, [10_000_000]),
            "cpu": dict.fromkeys(names, [0.5]),
        }
        for rank in range(world)
    ]


def test_the_bounds_are_those_of_the_issue():
    bounds = comm.bounds_of(made(2))
    assert comm.rate_of(made(2)) == 10.0  # of each link its fastest, of the links the slowest
    compute = (2.0 + 3.0) / 2  # the slowest rank's steps
    assert bounds["shard"] == max(compute, 180 / 2 / 10) + 100 / 2 / 10
    assert bounds["all beside"] == max(compute, 280 / 2 / 10)
    assert bounds["replicate"] == max(compute, 0.6 + 0.25 + 2 * 100 / 2 / 10)
    assert comm.bounds_of(made(4))["shard"] == pytest.approx(180 * 0.75 / 10 + 100 * 0.75 / 10)


def test_goals_and_names_of_the_figures():
    setting = comm.Setting(2, 1000, 0.5, depth=4, rounds=2)
    figures = {figure.name: figure for figure in comm.figures_of(setting, made(2))}
    group = "2 hosts 1000 Mbit/s wire-bound"
    goals = {name: (figure.peer, figure.ratio_limit) for name, figure in figures.items() if figure.goal}
    assert goals == {
        f"{group}, ours, shard": ("the bound", 1.4),
        f"{group}, ours, replicate, 8 MiB": ("the bound", 1.1),
        f"{group}, ours at best": ("fully_shard", 1 / 0.98),
    }
    assert figures[f"{group}, ours at best"].value == figures[f"{group}, ours, shard"].value
    assert figures[f"{group} socket, plain"].value == pytest.approx(80 / 1e6)
    assert {f"{group} sent, {name}" for name in (*comm.PEERS, *comm.OURS)} <= figures.keys()


def test_compute_is_given_in_crossings_of_the_parameters():
    one = comm.Setting(2, 1000, 2.0, depth=12, rounds=1)
    assert one.compute_s == pytest.approx(2.0 * (12 * 8.4 + 8.2) / 2 * 8 / 1000)
    assert comm.Setting(4, 1000, 2.0, depth=12, rounds=1).compute_s == pytest.approx(one.compute_s * 1.5)


def test_a_machine_without_a_lab_measures_nothing(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(netlab, "missing", lambda: "network namespaces need root")
    monkeypatch.setattr(sys, "argv", ["comm.py", "--quick"])
    assert comm.main() == 1
    assert "not measured: network namespaces need root" in capsys.readouterr().err


@pytest.mark.netns
def test_a_short_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(comm, "QUICK", (comm.Setting(2, 2000, 0.5, depth=2, rounds=1),))
    report, picture = tmp_path / "comm.json", tmp_path / "comm.png"
    words = ["comm.py", "--quick", "--json", str(report), "--figure", str(picture)]
    monkeypatch.setattr(sys, "argv", words)
    assert comm.main() in (0, 3)
    figures = {figure["name"]: figure for figure in json.loads(report.read_text())["figures"]}
    sent = {
        name.split(" sent, ")[1]: figure["value"] for name, figure in figures.items() if " sent, " in name
    }
    # One host of two sends half of each collective, and headers: counts of bytes, not times.
    block, ends = 8.4, 4.1
    parameters = 2 * block + 2 * ends
    assert sent["DDP"] == pytest.approx(parameters, rel=0.1)
    assert sent["ours, replicate"] == pytest.approx(parameters, rel=0.1)  # as many as by a ring
    assert sent["ours, shard"] == pytest.approx((parameters + 2 * block + parameters) / 2, rel=0.1)
    assert sent["fully_shard"] > 1.3 * sent["ours, shard"]  # gloo's reduce-scatter sends all twice
    assert picture.read_bytes()[:4] == b"\x89PNG"
