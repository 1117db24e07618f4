"""The command line: exit status, plain and JSON output, tables and bars on a terminal only."""

import importlib
import io
import json
import os
import pty
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from overlapkit import __version__
from overlapkit.checkpoint import Checkpointer, tables
from overlapkit.cli import app, main
from tests.checkpoint.loop import build, train_step
from tests.measure.traces.hand import HandTrace

ROOT = Path(__file__).parent.parent


def call(*words, status=0):
    """Runs `overlapkit checkpoint ...`; returns its output, which must not be mixed with its errors."""
    result = CliRunner().invoke(app, ["checkpoint", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.stdout, result.stderr


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cli") / "run"
    state = build()
    with Checkpointer(directory) as checkpointer:
        for step in (1, 2, 3):
            train_step(state)
            checkpointer.save(step, state, metrics={"loss": 1 / step}, block=True)
    return directory


@pytest.fixture
def damaged(tmp_path):
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"t": torch.full((9,), float(step))}, block=True)
    path = tmp_path / "run" / "step-2" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    return tmp_path / "run"


def test_ls(sound):
    lines = [line.split("\t") for line in call("ls", sound)[0].splitlines()]
    assert lines[0] == ["step", "written", "size", "state", "ranks", "keys", "metrics"]
    assert [line[0] for line in lines[1:]] == ["1", "2", "3"]
    assert lines[2][3:] == ["committed", "1", "model optimizer scheduler loader", "loss=0.5"]
    found = json.loads(call("ls", sound, "--json", "--verify")[0])
    assert [(one["step"], one["state"], one["world"]) for one in found] == [
        (n, "verified", 1) for n in (1, 2, 3)
    ]
    assert found[0]["folder"] == str(sound / "step-1")
    assert found[0]["nbytes"] == sum(path.stat().st_size for path in (sound / "step-1").iterdir())
    assert found[1]["metrics"] == {"loss": 0.5}


def test_ls_of_damage_has_status_1(damaged, tmp_path):
    assert [line.split("\t")[3] for line in call("ls", damaged)[0].splitlines()[1:]] == ["committed"] * 2
    out, errors = call("ls", damaged, "--verify", status=1)
    assert [line.split("\t")[3] for line in out.splitlines()[1:]] == ["verified", "damaged"]
    assert "tensor 't', bytes" in errors
    (damaged / "step-1" / "rank-00000.json").unlink()
    out = call("ls", damaged, "--json", status=1)[0]
    assert [one["state"] for one in json.loads(out)] == ["damaged", "committed"]
    out, errors = call("ls", tmp_path)
    assert (out.count("\n"), errors) == (1, f"{tmp_path} holds no checkpoint\n")
    assert "holds no checkpoint" in call("verify", tmp_path, "--all", status=2)[1]


def test_show(sound):
    out = call("show", sound, 2)[0]
    assert f"{sound}/step-2 · step 2 · written by 1 rank(s), shown for rank 0 · 27 tensors" in out
    assert "\nmodel/0.weight\tfloat32\t(10, 6)\t240\trank-00000.safetensors\n" in out
    assert "\nscheduler/last_epoch\t2\n" in out
    found = json.loads(call("show", sound / "step-2", "--json")[0])
    assert found["step"] == 2
    assert found["kinds"]["optimizer"] == "optimizer"
    assert found["tensors"]["model/0.weight"] == {
        "name": "model/0.weight",
        "dtype": "float32",
        "shape": [10, 6],
        "nbytes": 240,
        "files": ["rank-00000.safetensors"],
        "shares": None,
    }
    assert found["values"]["optimizer/param_groups/0/betas"] == {"$": "tuple", "v": [0.9, 0.999]}
    assert json.loads(call("show", sound, "--json")[0])["step"] == 3


def test_verify(sound, damaged):
    assert call("verify", sound) == (f"{sound}/step-3\tsound\n", "")
    assert call("verify", sound, 1)[0] == f"{sound}/step-1\tsound\n"
    out, errors = call("verify", damaged, "--all", status=1)
    assert out == f"{damaged}/step-1\tsound\n{damaged}/step-2\tdamaged\n"
    file = damaged / "step-2" / "rank-00000.safetensors"
    stop = file.stat().st_size
    assert errors == f"{file}: tensor 't', bytes {stop - 36} to {stop}: the checksum differs\n"
    found = json.loads(call("verify", damaged, "--json", status=1)[0])
    place = {
        "file": str(file),
        "what": "the checksum differs",
        "tensor": "t",
        "start": stop - 36,
        "stop": stop,
    }
    assert found == [{"folder": str(damaged / "step-2"), "sound": False, "damage": [place]}]
    assert "not both" in call("verify", damaged, 1, "--all", status=2)[1]
    assert call("verify", sound / "step-2", "--all")[0] == f"{sound}/step-2\tsound\n"


def test_diff(sound, damaged, tmp_path):
    out = call("diff", sound / "step-2", sound, status=1)[0]
    assert "\nmodel/1.num_batches_tracked\tdiffers\tint64 ()\t1 of 1\t1\n" in out
    assert "\nscheduler/last_epoch\tvalue\t2 -> 3\t\t\n" in out
    assert call("diff", sound, sound)[0].startswith("27 tensors are the same, 0 differences")
    found = json.loads(call("diff", sound / "step-2", sound, "--json", status=1)[0])
    assert found["same"] is False
    assert found["values"]["loader/at"] == [8, 12]
    (counted,) = (one for one in found["tensors"] if one["name"] == "model/1.num_batches_tracked")
    assert (counted["differing"], counted["max_abs"]) == (1, 1.0)
    assert "damaged" not in call("diff", damaged / "step-1", damaged, status=1)[0]
    with Checkpointer(tmp_path / "nan") as checkpointer:
        for step, value in ((1, 1.0), (2, float("nan"))):
            checkpointer.save(step, {"t": torch.tensor(value)}, block=True)
    found = json.loads(call("diff", tmp_path / "nan/step-1", tmp_path / "nan", "--json", status=1)[0])
    assert found["tensors"][0]["max_abs"] == "nan"  # JSON has no NaN


def test_export(sound, tmp_path):
    out = call("export", sound, tmp_path / "out", "--dtype", "bf16")[0]
    assert out == f"{tmp_path}/out/model.safetensors\n"
    assert load_file(out.strip())["0.weight"].dtype == torch.bfloat16
    lines = call("export", sound, tmp_path / "more", "--only", "model", "--shard-size", "200")[0].splitlines()
    assert lines[-1] == f"{tmp_path}/more/model.safetensors.index.json"
    assert all(Path(line).is_file() for line in lines)
    assert "has weights already" in call("export", sound, tmp_path / "out", status=2)[1]
    assert "fp16, bf16, fp32, fp64" in call("export", sound, tmp_path / "x", "--dtype", "int8", status=2)[1]
    assert "shard_size='?'" in call("export", sound, tmp_path / "x", "--shard-size", "?", status=2)[1]


def test_import(tmp_path):
    state = build()
    train_step(state)
    torch.save(
        {"net": state["model"].state_dict(), "opt": state["optimizer"].state_dict()}, tmp_path / "a.pt"
    )
    names = tmp_path / "names.json"
    names.write_text(json.dumps([name for name, _ in state["model"].named_parameters()]))
    words = ["import", tmp_path / "a.pt", tmp_path / "run", "--step", 7, "--key", "net=model"]
    out = call(*words, "--key", "opt=optimizer", "--parameters", f"optimizer={names}")[0]
    assert out == f"{tmp_path}/run/step-7\n"
    fresh = build(seed=3)
    with Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.restore(fresh, only=("model", "optimizer")) == 7
    assert torch.equal(fresh["model"][0].weight, state["model"][0].weight)
    assert "has that one already" in call(*words, status=2)[1]
    words[4] = 8
    call(*words, "--kind", "model=object")
    assert json.loads(call("show", tmp_path / "run", "--json")[0])["kinds"] == {"model": "object"}
    assert "--kind model: give it as KEY=" in call(*words, "--kind", "model", status=2)[1]


@pytest.mark.parametrize("words", [(), ("ls",), ("nope",), ("ls", "--nope", "x"), ("import", "a", "b")])
def test_wrong_usage_has_status_2(words):
    call(*words, status=2)


def test_errors_are_one_line_and_no_traceback(sound, damaged, tmp_path):
    for words, status, match in (
        (("ls", tmp_path / "gone"), 2, "gone' does not exist"),
        (("show", sound, "9"), 2, "step=9:"),
        (("show", sound, "--rank", "1"), 2, "rank=1"),
        (("verify", tmp_path), 2, "holds no checkpoint"),
        (("export", damaged, tmp_path / "out", "--only", "t"), 2, "is no model"),
        (("import", tmp_path / "gone", tmp_path / "x", "--step", "1"), 2, "gone' does not exist"),
        (("import", damaged / "step-2" / "manifest.json", tmp_path / "x", "--step", "1"), 1, "torch.save"),
    ):
        out, errors = call(*words, status=status)
        assert out == ""
        assert errors.startswith("error: ")
        assert match in errors
        assert errors.count("\n") == 1


def run(*words, **more):
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        "TERM": "xterm",
    }
    command = [sys.executable, "-m", "overlapkit.cli", *map(str, words)]
    return subprocess.Popen(command, env=env, cwd=ROOT, **more)


def test_the_command_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["overlapkit"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_a_closed_pipe_is_no_traceback(sound):
    process = run("checkpoint", "show", sound, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait(60)


def test_a_terminal_that_knows_no_bars_gets_the_report(tmp_path):
    made = HandTrace()
    made.work("gemm", 0, 400, launch=0)
    trace = made.write(tmp_path / "t.json")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "overlapkit", "explain", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no steps ? rank 0 of 1 ? cuda:0" in done.stdout


def test_help_does_not_wait_for_torch():
    code = "import sys, overlapkit.cli as c\ntry: c.main()\nexcept SystemExit: print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "checkpoint", "--help"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert "export" in done.stdout
    assert "Exit status: 0" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_the_library_brings_no_terminal_library():
    code = "import sys, overlapkit.checkpoint; print(sorted({'rich', 'typer', 'click'} & sys.modules.keys()))"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout == "[]\n"


def test_a_terminal_gets_tables_and_bars(sound):
    ours, theirs = pty.openpty()
    process = run("checkpoint", "ls", sound, "--verify", stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    data = b""
    while True:
        try:
            data += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert process.wait(60) == 0
    text = data.decode()
    assert "step-1 " in text  # a bar's name
    assert "━" in text
    assert "─────" in text  # the table's rule
    assert "\t" not in text


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_names_cannot_move_the_cursor_or_style_a_table(monkeypatch, stream):
    monkeypatch.setattr(sys, "stdout", stream())
    tables.print_table(("name",), [("a\x1b[2Jb\nc\td",), ("[red]x[/red]",)])
    text = sys.stdout.getvalue()
    assert "\x1b[2J" not in text
    assert r"a\x1b[2Jb\nc\td" in text
    assert "[red]x[/red]" in text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**30, "5.0 GiB"), (3 * 2**50, "3072.0 TiB")],
)
def test_sizes_for_people(nbytes, text):
    assert tables.size(nbytes) == text


def test_versions_are_named():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"overlapkit {__version__}, torch {torch.__version__}, Python 3.")


def test_the_package_itself_runs():
    command = [sys.executable, "-m", "overlapkit", "--version"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert done.stdout.startswith(f"overlapkit {__version__}, ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("compare", "{}/gone", "{}/gone"), "{}/gone: no such file or directory"),
        (("compare", "{}", "{}"), "{}: is a directory"),
        (("plan", "{}/gone", "--node-gb-s", "1"), "{}/gone: no such file or directory"),
        (("plan", "{}", "--node-gb-s", "1"), "{}: is a directory"),
        (("plan", "{}/text", "--node-gb-s", "1"), "{}/text: no profile: JSONDecodeError: "),
        (("explain", "{}/gone"), "{}/gone: no such file or folder"),
        (("doctor", "--data", "{}/gone"), "data='{}/gone' is no folder here"),
        (("checkpoint", "show", "{}/gone"), "'{}/gone' does not exist"),
        (("checkpoint", "show", "{}/text"), "'{}/text' does not exist, or is no folder"),
        (("checkpoint", "import", "a", "b", "--step", "1", "--parameters", "k={}/gone"), "{}/gone: no such"),
        (
            ("checkpoint", "import", "a", "b", "--step", "1", "--parameters", "k={}/text"),
            "{}/text is no JSON",
        ),
    ],
)
def test_a_bad_path_is_told_in_words(words, told, tmp_path):
    (tmp_path / "text").write_text("hi")
    result = CliRunner().invoke(app, [word.format(tmp_path) for word in words])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: " + told.format(tmp_path))
    assert result.stderr.count("\n") == 1
    assert "Errno" not in result.stderr
