"""`overlapkit doctor`: exit status, table, JSON, and who prints what; the real machine, whatever it is."""

import json
import os
import subprocess

import pytest
from typer.testing import CliRunner

import overlapkit.doctor
from overlapkit.cli import app
from overlapkit.doctor import Diagnosis, Line, examine
from overlapkit.doctor.diagnosis import render
from overlapkit.doctor.layers import kernels
from overlapkit.doctor.line import LAYERS, STATES
from overlapkit.doctor.subject import Place, Torch
from tests.doctor.looking import trials
from tests.doctor.trees import Node, Tree, torch_on

OK = Line("gpu", "devices", "absent", "no GPU")
DARK = Line("path", "pcie", "unknown", "not said")
WEAK = Line("loop", "/dev/shm", "weak", "64 MiB", "workers end", "more of it", host="a", ranks=(1,))
OTHER = Line("loop", "cores", "ok", "16", host="b", ranks=(0, 2))


def call(monkeypatch, found, *words, status=0):
    asked = {}

    def examine(**options):
        asked.update(options)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(overlapkit.doctor, "examine", examine)
    result = CliRunner().invoke(app, ["doctor", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.stdout, result.stderr, asked


def test_exit_status_is_the_verdict(monkeypatch):
    out, _, _ = call(monkeypatch, Diagnosis((OK,)))
    assert out.startswith("Nothing weak in 1 line.")
    out, _, _ = call(monkeypatch, Diagnosis((OK, DARK)))
    assert out.startswith("Nothing weak in 2 lines; 1 could not be read.")
    out, _, _ = call(monkeypatch, Diagnosis((OK, WEAK)), status=1)
    assert out.startswith("1 weak, the lowest in layer loop: mend from the bottom up.")
    _, errors, _ = call(monkeypatch, ValueError("ranks=1: a link has two ends"), status=2)
    assert errors == "error: ranks=1: a link has two ends\n"


def test_options_arrive(monkeypatch):
    words = "--checkpoints /c --data /d --workers 4 --link --ranks 3 --seconds 0 --timeout 9"
    _, _, asked = call(monkeypatch, Diagnosis((OK,)), *words.split())
    assert asked.pop("progress") is None
    assert asked == {
        "checkpoints": "/c",
        "data": "/d",
        "workers": 4,
        "link": True,
        "ranks": 3,
        "seconds": 0,
        "timeout": 9,
    }


def test_json(monkeypatch):
    out, _, _ = call(monkeypatch, Diagnosis((OK, WEAK), 0, 2, {"storage": []}), "--json", status=1)
    told = json.loads(out)
    assert told["counts"] == {"ok": 0, "weak": 1, "absent": 1, "unknown": 0}
    assert told["lines"][1] == {
        "layer": "loop",
        "name": "/dev/shm",
        "state": "weak",
        "saw": "64 MiB",
        "cost": "workers end",
        "remedy": "more of it",
        "host": "a",
        "ranks": [1],
    }
    assert told["figures"] == {"storage": []}


def test_only_rank_0_prints_and_who_does_not_reach_it_says_so(monkeypatch):
    assert call(monkeypatch, Diagnosis((WEAK,), 1, 2))[:2] == ("", "")
    alone = Diagnosis((WEAK,), 1, 2, {}, "rank 0 is absent: nothing within 9 s")
    assert call(monkeypatch, alone, status=1)[:2] == ("", "rank 1: rank 0 is absent: nothing within 9 s\n")


@pytest.mark.parametrize("columns", [20, 80, 200])
def test_a_line_says_what_where_what_it_costs_and_what_to_do(columns):
    text = render(Diagnosis((OK, WEAK, OTHER), 0, 3), columns)
    assert max(map(len, text.splitlines())) <= max(80, min(120, columns))
    joined = " ".join(text.split())
    assert "/dev/shm WEAK [a, rank 1] 64 MiB costs: workers end do: more of it" in joined
    assert "[b, rank 0, 2] 16" in joined


def test_this_machine_is_read_without_a_traceback(tmp_path):
    found = examine(seconds=0, checkpoints=tmp_path, workers=1, instruments=instruments())
    assert {line.layer for line in found.lines} >= {*LAYERS} - {"path"}
    assert {line.state for line in found.lines} <= {*STATES}
    assert not [line for line in found.lines if line.state == "unknown" and "Error" in line.saw]
    assert json.loads(json.dumps(found.to_dict()))["world"] == 1


def instruments():
    from overlapkit.doctor.examine import Instruments

    def without_slow_ones(checks):
        return tuple(one for one in checks if one.name != "compiler")

    return Instruments(trials=trials(), checks=without_slow_ones)


BAD = [
    ({"workers": -1}, "workers=-1: give the loader's num_workers"),
    ({"link": True, "ranks": 1}, "ranks=1: a link has two ends"),
    ({"ranks": 2}, "ranks=2: it belongs to link=True"),
    ({"seconds": -1}, "seconds=-1: give 0 to 600"),
    ({"seconds": float("nan")}, "seconds=nan"),
    ({"timeout": 0}, "timeout=0: give seconds above 0"),
    ({"checkpoints": "/no/such/folder"}, "checkpoints='/no/such/folder' is no folder"),
    ({"data": __file__}, "is no folder"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        examine(**options)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "x"}, "numbers belong there"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 of WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0"),
    ],
)
def test_a_launcher_that_makes_no_sense(environ, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        Place.launched(environ)
    assert message in str(raised.value)
    assert (
        Place.launched({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}).nodes
        == 2
    )


def test_a_kernel_is_built_by_a_process_of_its_own(tmp_path):
    subject = Node(Tree(tmp_path), "none", torch_on(0)).subject()
    pytest.importorskip("triton")
    (line,) = kernels.compiler(
        subject, lambda environ: kernels.trial({**os.environ, "TRITON_INTERPRET": "1"})
    )
    assert line.state == "ok", line.saw
    assert "a kernel built for sm_80" in line.saw or " ran on " in line.saw


@pytest.mark.parametrize(
    ("out", "err", "saw"),
    [
        ('noise\n{"error": "RuntimeError: no ptxas"}', "", "Triton 3.7.1: RuntimeError: no ptxas"),
        ("", "Traceback\nSegmentation fault", "Triton 3.7.1: Segmentation fault"),
        ("", "", "Triton 3.7.1: exit code -11"),
    ],
)
def test_a_compiler_that_fails_or_dies(tmp_path, monkeypatch, out, err, saw):
    done = subprocess.CompletedProcess([], -11, out, err)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    (line,) = kernels.compiler(Node(Tree(tmp_path), "none", torch_on(0)).subject())
    assert (line.state, line.saw) == ("weak", saw)


def test_the_torch_of_this_process():
    import torch

    found = Torch.imported()
    assert found.version == torch.__version__
    assert len(found.devices) == torch.cuda.device_count()
    assert found.features["own group for reduce-scatter"] == hasattr(
        torch.distributed.fsdp.FSDPModule, "set_separate_reduce_scatter_group"
    )
