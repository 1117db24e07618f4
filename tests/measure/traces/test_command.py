"""`overlapkit explain`: exit status, table, JSON and picture."""

import json

import pytest
from typer.testing import CliRunner

from overlapkit.cli import app
from overlapkit.measure import explain
from tests.measure.traces.hand import HandTrace


def call(*words, status=0):
    result = CliRunner().invoke(app, ["explain", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.stdout, result.stderr


@pytest.fixture
def traces(tmp_path):
    files = []
    for rank in (0, 1):
        made = HandTrace(rank, 2)
        made.step(5, 0, 1000)
        made.work("gemm", 100, 400, launch=10)
        made.collective(400 + 100 * rank, 900, launch=20)
        files.append(made.write(tmp_path / f"rank{rank}.json.gz"))
    return files


def test_table(traces):
    out, errors = call(*traces)
    assert (out, errors) == (f"{explain(traces)}\n", "")
    assert out.startswith("Waiting for communication costs 0.5 ms")
    assert "rank 1 arrives last at 1 of 1" in " ".join(out.split())


def test_json_holds_lanes_answers_and_findings(traces):
    told = json.loads(call(traces[0].parent, "--json")[0])
    assert told == json.loads(json.dumps(explain(traces).to_dict()).replace("NaN", "null"))
    names = ["compute", "exposed_communication", "exposed_copy", "idle", "span", "communication", "copy"]
    assert list(told["lanes_us"]) == names
    assert [list(step["lanes_us"]) for step in told["per_step"]] == [names, names]
    assert [(step["step"], step["rank"], step["lanes_us"]["span"]) for step in told["per_step"]] == [
        (5, 0, 800),
        (5, 1, 800),
    ]
    assert told["lanes_us"] == {
        "compute": 300,
        "exposed_communication": 450,
        "exposed_copy": 0,
        "idle": 50,
        "span": 800,
        "communication": 450,
        "copy": 0,
    }
    assert len(told["answers"]) == 7
    assert told["findings"][0]["lane"] == "communication"


def test_picture(traces, tmp_path):
    call(traces[0], "--plot", tmp_path / "lanes.png")
    assert (tmp_path / "lanes.png").read_bytes()[:4] == b"\x89PNG"


def test_perfetto(traces, tmp_path):
    call(*traces, "--perfetto", tmp_path / "lanes.json")
    names = {
        event["args"].get("name")
        for event in json.loads((tmp_path / "lanes.json").read_text())["traceEvents"]
    }
    assert {"rank 0 on device 0", "rank 1 on device 0", "communication: exposed"} <= names
    assert "none" in call(*traces, "--perfetto", tmp_path / "none" / "lanes.json", status=2)[1]


def test_exit_status(traces, tmp_path):
    cut = tmp_path / "cut.json"
    cut.write_text('{"traceEvents": [{"ph"')
    out, errors = call(traces[0], cut, status=1)
    assert (out, errors) == (
        "",
        f"error: {cut}: byte 22: cut off: the file ends here, behind 0 or more whole events\n",
    )
    assert "no such file" in call(tmp_path / "none.json", status=2)[1]
    assert "rank 0 was read from" in call(traces[0], traces[0], status=1)[1]
