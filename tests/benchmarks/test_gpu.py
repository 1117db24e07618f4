"""The frame of the GPU run, over stand-in parts: what each becomes, and that none takes others with it."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch

import gpu
import gpu_parts
from gpu_parts import Result, benchmark_command, run_part
from pytest_deadline import UNTIL

ROOT = Path(gpu.__file__).parent.parent

FIGURE = {
    "name": "f",
    "value": 2.0,
    "unit": "ms",
    "better": "lower",
    "spread": None,
    "peer": None,
    "peer_value": None,
    "ratio": None,
    "goal": "<= 1 ms",
    "met": None,
}


BARE = ("budget", "ceilings", "figure", "gpu", "gpu_parts", "harness", "machine", "pytest_deadline")
"""The files that the frame and the ceilings need."""


def _script(met: bool | None, code: int, *, before_exit: str = "") -> str:
    report = {"figures": [FIGURE | {"met": met}]}
    return (
        "import json, os, signal, subprocess, sys, time\n"
        f"open(sys.argv[sys.argv.index('--json') + 1], 'w').write(json.dumps({report!r}))\n"
        f"print('said', sys.argv[1:], flush=True)\n{before_exit}\nsys.exit({code})\n"
    )


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with nothing in it, which `gpu` takes for its own."""
    root = tmp_path / "checkout"
    (root / "benchmarks").mkdir(parents=True)
    (root / "tests").mkdir()
    monkeypatch.setattr(gpu_parts, "ROOT", root)
    return root


def _run_part(checkout: Path, name: str, share: float = 60.0) -> Result:
    return run_part(name, share, "cpu", checkout.parent)


@pytest.mark.parametrize(
    ("script", "status", "figures", "detail"),
    [
        (_script(True, 0), "passed", 1, ""),
        (_script(False, 3), "missed", 1, "f"),
        (_script(True, 1), "failed", 1, "exit code 1"),
        (_script(True, 0, before_exit="os.kill(os.getpid(), signal.SIGSEGV)"), "failed", 1, "SIGSEGV"),
        ("print(0)", "failed", 0, "0 figures"),
        ("import sys; print(open(sys.argv[2], 'w').write('{'))", "failed", 0, "cannot be read"),
        ("1 / 0", "failed", 0, "exit code 1"),
    ],
)
def test_what_becomes_of_a_benchmark(checkout, script, status, figures, detail):
    (checkout / "benchmarks" / "optim.py").write_text(script)
    result = _run_part(checkout, "optim")
    assert (result.status, len(result.figures)) == (status, figures)
    assert detail in result.detail
    assert (result.output_tail == "") == (status in ("passed", "missed"))


def test_a_benchmark_is_told_device_and_report_and_what_it_says_is_logged(checkout):
    (checkout / "benchmarks" / "gpu_step.py").write_text(_script(True, 0))
    _run_part(checkout, "step")
    log = (checkout.parent / "gpu.log").read_text()
    assert "===== step:" in log
    assert "'--device', 'cpu', '--quick'" in log


def test_what_a_part_reports_beside_its_figures_is_kept(checkout):
    script = _script(True, 0).replace("'figures'", "'details': {'report': [1, 2]}, 'figures'")
    (checkout / "benchmarks" / "gpu_step.py").write_text(script)
    assert _run_part(checkout, "step").details == {"report": [1, 2]}


def test_on_a_gpu_a_benchmark_is_told_how_long_it_may_take(monkeypatch):
    (command,) = benchmark_command("optim", "cuda", Path("report"), 100.0, Path("out"))
    assert command[1:] == ["benchmarks/optim.py", "--json", "report", "--device", "cuda", "--budget", "82"]
    for installed in (True, False):
        monkeypatch.setattr(gpu_parts, "find_spec", lambda name, found=installed: object() if found else None)
        (command,) = benchmark_command("step", "cuda", Path("report"), 100.0, Path("out"))
        assert ("out/step.png" in command) == installed  # drawn with matplotlib


def test_every_part_takes_its_budget():
    """What it would do on a GPU, up to where it looks for one."""
    for name in gpu_parts.WEIGHTS.keys() - {"tests"}:
        (command,) = benchmark_command(name, "cuda", Path("report.json"), 100.0, Path("."))
        source = (ROOT / command[1]).read_text()
        assert "add_budget(options)" in source, name
        assert "Budget(args.budget)" in source, name


def test_a_part_that_hangs_is_ended_with_its_children(checkout, monkeypatch):
    monkeypatch.setattr(gpu_parts, "LEAST_S", 0.1)
    child = "child = subprocess.Popen(['sleep', '300'])\nprint('pid', child.pid, flush=True)\ntime.sleep(300)"
    (checkout / "benchmarks" / "gpu_input.py").write_text(_script(True, 0, before_exit=child))
    result = _run_part(checkout, "input", share=3.0)
    assert result.status == "timeout"
    assert len(result.figures) == 1  # what it wrote before it hung is kept
    pid = int(result.output_tail.split("pid ")[1].split()[0])
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_part_that_is_not_there_or_has_no_time_is_not_passed(checkout):
    (checkout / "benchmarks" / "gpu_input.py").write_text(_script(True, 0))
    assert _run_part(checkout, "optim").status == "absent"
    assert _run_part(checkout, "tests").status == "absent"
    assert _run_part(checkout, "input", share=0.5).status == "no time"


@pytest.fixture
def tests_of(checkout, monkeypatch):
    """Makes tests of a source, which two processes are dealt, and runs them."""
    shutil.copy(ROOT / "benchmarks" / "pytest_deadline.py", checkout / "benchmarks")
    (checkout / "pytest.ini").write_text("[pytest]\nmarkers = gpu: x\nfilterwarnings = error\n")
    monkeypatch.setattr(gpu_parts, "PROCESSES", 2)

    def run(source: str) -> Result:
        (checkout / "tests" / "test_it.py").write_text("import os, pytest, time, warnings\n" + source)
        return _run_part(checkout, "tests")

    return run


@pytest.mark.parametrize(
    ("body", "status", "counts"),
    [
        ("warnings.warn('that only a GPU brings')", "passed", (1, 0, 0)),
        ("assert False", "failed", (0, 1, 0)),
        ("pytest.skip('no')", "skipped", (0, 0, 1)),
    ],
)
def test_what_becomes_of_the_tests(checkout, tests_of, body, status, counts):
    (checkout / "tests" / "test_unmarked.py").write_text("1 / 0")
    result = tests_of(f"@pytest.mark.gpu\ndef test_it():\n    {body}\ndef test_other():\n    1 / 0\n")
    assert result.status == status
    assert (result.tests["passed"], result.tests["failed"], result.tests["skipped"]) == counts
    assert result.tests["failures"] == (["tests.test_it::test_it"] if status == "failed" else [])


def test_tests_that_no_time_is_left_for_are_counted(tests_of):
    """The one that runs when time is up, too."""
    source = f"@pytest.fixture\ndef late():\n    os.environ[{UNTIL!r}] = '0'  # in this process time is up\n"
    source += "@pytest.mark.gpu\n@pytest.mark.parametrize('n', range(3))\ndef test_it(n):\n    pass\n"
    source += "@pytest.mark.gpu\n@pytest.mark.parametrize('n', range(3))\ndef test_late(n, late):\n"
    result = tests_of(source + "    time.sleep(300)\n")
    assert (result.status, result.tests["failed"]) == ("no time", 0), result.output_tail
    assert (result.tests["passed"], result.tests["no_time"]) == (3, 3)


def test_a_process_that_dies_loses_no_other_tests(checkout, tests_of):
    source = "@pytest.mark.gpu\n@pytest.mark.parametrize('n', range(6))\ndef test_it(n):\n"
    result = tests_of(source + "    if n == 4:\n        os.abort()\n")
    assert (result.status, result.tests["passed"]) == ("failed", 3)  # 1, 3 and 5
    assert "without a report: ended by SIGABRT" in result.detail
    assert "test_it.py::test_it[4] Fatal Python error: Aborted" in (checkout.parent / "gpu.log").read_text()


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["passed"], 0),
        (["passed", "missed"], 3),
        (["passed", "absent"], 3),
        (["skipped"], 3),
        (["no time"], 3),
        (["missed", "failed"], 1),
        (["timeout", "passed"], 1),
    ],
)
def test_exit_codes(statuses, code):
    assert gpu.exit_code([Result("x", status) for status in statuses]) == code


def _gpu(
    root: Path, *words: str, options: tuple[str, ...] = (), cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, str(root / "benchmarks" / "gpu.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env, cwd=cwd, timeout=100)


def test_a_whole_run_from_a_bare_checkout(tmp_path):
    """Real frame, real ceilings, one part of each fate; packages that a GPU machine may lack are hidden."""
    for name in ("msgspec", "typer", "xxhash", "torchdata", "matplotlib"):
        hidden = tmp_path / "hidden" / f"{name}.py"
        hidden.parent.mkdir(exist_ok=True)
        hidden.write_text(f"raise ModuleNotFoundError('hidden', name={name!r})")
    root = tmp_path / "checkout"
    (root / "benchmarks").mkdir(parents=True)
    for name in BARE:
        shutil.copy(ROOT / "benchmarks" / f"{name}.py", root / "benchmarks")
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "benchmarks" / "kernels.py").write_text("import os; os.abort()")
    (root / "benchmarks" / "gpu_checkpoint.py").write_text(_script(False, 3))
    (root / "benchmarks" / "gpu_step.py").write_text(_script(True, 0))

    paths = os.pathsep.join([str(tmp_path / "hidden"), sysconfig.get_path("purelib")])
    words = ["--out", "out", "--allow-cpu"]
    # -S: not where ours is installed
    done = _gpu(root, *words, options=("-S",), cwd=tmp_path, PYTHONPATH=paths)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert {part["name"]: part["status"] for part in report["parts"]} == {
        "ceilings": "passed",
        "tests": "absent",
        "kernels": "failed",
        "optim": "absent",
        "input": "absent",
        "checkpoint": "missed",
        "step": "passed",
        "meter": "absent",
    }
    assert {figure["name"] for figure in report["parts"][0]["figures"]} == {"copy", "bf16 matmul"}
    assert "SIGABRT" in report["parts"][2]["detail"]
    assert (report["complete"], report["exit_code"], report["device"]) == (True, 1, "cpu")
    assert (report["hardware"]["gpus"], report["commit"]) == ([], "unknown")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gpu.json", "gpu.log", "gpu.txt"]
    assert "SIGABRT" in done.stdout
    assert "goals: 1 of 2 met" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--out", "{tmp}/out"], "no CUDA device"),
        (["--out", "{tmp}/file", "--allow-cpu"], "name a folder"),
        (["nothing", "--out", "{tmp}/out"], "PART='nothing': choose from tests, kernels"),
        (["--out", "{tmp}/out", "--budget", "0", "--allow-cpu"], "above 0"),
    ],
)
def test_wrong_usage_ends_with_2(tmp_path, monkeypatch, capsys, words, says):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["gpu.py", *(word.format(tmp=tmp_path) for word in words)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
