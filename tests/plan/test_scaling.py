"""The table, the picture and the command, against `simulate` itself."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overlapkit.cli import app
from overlapkit.parallel import ShardPlan
from overlapkit.plan import Fabric, Failures, LinkTable, Wire, scale, simulate
from overlapkit.plan.links import OPS
from tests.plan.models import made

FABRIC = Fabric(Wire(400e6, 1e-5), Wire(50e6, 1e-4), node_size=4)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    made().save(path)
    return path


def test_rows_are_those_of_simulate(tmp_path: Path) -> None:
    failures = Failures(1e6, 60.0, 0.5)
    found = scale(made(), FABRIC, [2, 8], failures=failures)
    alone = simulate(made(), FABRIC, 8, failures=failures)
    row = found.rows()[1]
    assert (row["ranks"], row["step_ms"], row["goodput"]) == (8, alone.period_ms, alone.goodput)
    assert row["exposed_ms"] == alone.parts["communication"].mean_ms
    text = str(found)
    assert f"{alone.period_ms:,.1f}" in text
    assert "goodput" in text
    assert "goodput" not in str(scale(made(), FABRIC, [2]))
    found.plot(tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="worlds is empty"):
        scale(made(), FABRIC, [])


def test_the_command_prints_what_scale_finds(profile: Path, tmp_path: Path) -> None:
    fabric = (
        "--node-gb-s",
        0.4,
        "--network-gb-s",
        0.05,
        "--node-size",
        4,
        "--node-us",
        10,
        "--network-us",
        100,
    )
    code, text = run(profile, *fabric, "--ranks", "2..8", "--json", "--plot", tmp_path / "p.png")
    assert code == 0, text
    data = json.loads(text)
    assert [row["ranks"] for row in data["rows"]] == [2, 4, 8]
    assert data["rows"][2]["step_ms"] == pytest.approx(simulate(made(), FABRIC, 8).period_ms)
    assert "0.4 GB/s in nodes of 4, 0.05 GB/s a rank between them (given)" in data["inputs"]["link"]
    assert (tmp_path / "p.png").exists()


def test_the_command_chooses_a_plan_and_takes_one(profile: Path, tmp_path: Path) -> None:
    rows = {op: ((1000, 1e-3), (10**8, 1.0)) for op in OPS}  # noqa: C420 # each of its own
    LinkTable(2, rows).save(tmp_path / "link.json")
    chosen = tmp_path / "plan.json"
    code, text = run(profile, "--link", tmp_path / "link.json", "--ranks", "2", "--choose", chosen)
    assert code == 0, text
    plan = ShardPlan.load(chosen)
    assert plan.units is not None
    code, again = run(profile, "--link", tmp_path / "link.json", "--ranks", "2", "--plan", chosen)
    assert (code, again) == (0, text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "x"), "--ranks x: give numbers as 8,64,512"),
        ((), "give either --link FILE"),
        (("--node-gb-s", 1, "--ranks", "16"), "do not fit a node of 8"),
        (("--node-gb-s", 1, "--ranks", "2", "--wrapper", "ddp"), "wrapper='ddp'"),
        (("--node-gb-s", 1, "--ranks", "2", "--memory-gib", 0.0001, "--choose", "x.json"), "no plan fits"),
        (("--node-gb-s", 1, "--plan", "a", "--choose", "b"), "a: no such file"),
        (("--ranks", "16..2"), "--ranks 16..2: give numbers as 8,64,512, or a range as 2..16384"),
        (("--link", "x.json", "--network-gb-s", 1), "--network-gb-s has no effect without --node-gb-s"),
        (("--link", "x.json", "--node-size", 8), "--node-size has no effect without --node-gb-s"),
        (("--node-gb-s", 1, "--network-us", 1), "--network-us has no effect without --network-gb-s"),
        (("--node-gb-s", 1, "--memory-gib", 1), "--memory-gib has no effect without --choose"),
        (("--node-gb-s", 1, "--stall-s", 1), "--stall-s has no effect without --mtbf-h"),
        (("--node-gb-s", 1, "--choose", "x.json", "--memory-gib", "inf"), "memory_gib=inf: give a finite"),
        (
            ("--node-gb-s", 1, "--ranks", "2", "--wrapper", "replicate", "--shards", 2),
            "shards=2, wrapper='replicate': it keeps every parameter whole",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(profile: Path, arguments: tuple, words: str) -> None:
    code, text = run(profile, *arguments)
    assert code == 2
    assert words in text
    assert "Traceback" not in text


def test_a_file_that_is_no_profile_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    code, text = run(tmp_path / "x.json", "--node-gb-s", 1)
    assert (code, "no profile" in text) == (2, True)
