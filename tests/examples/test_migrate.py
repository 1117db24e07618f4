"""The migration: every version has the same losses, differs by one part, and its report is compared."""

import ast
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import overlapkit as ok
from tests.examples.scripts import EXAMPLES, beside, refusal, run, run_on_ranks

FOLDER = EXAMPLES / "migrate"
VERSIONS = sorted(path.stem for path in FOLDER.glob("step_*.py"))
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All versions, 11 steps each, in one process; the last one has saved after 10."""
    out = tmp_path_factory.mktemp("alone")
    for version in VERSIONS:
        run(f"migrate/{version}.py", "--steps", 11, "--out", out / version / "0")
    return out


def of_example(name: str) -> Any:
    with beside(f"migrate/{name}.py"):
        return import_module(name)


def losses(out: Path, version: str) -> list[float]:
    return json.loads((out / version / "0" / "result.json").read_text())["losses"]


def test_the_losses_of_all_versions_agree(alone: Path) -> None:
    plain = losses(alone, "step_0_plain")
    assert len(plain) == 11
    assert plain[-1] < plain[0] - 1
    for version in VERSIONS[1:]:
        assert losses(alone, version) == pytest.approx(plain, rel=1e-5), version


def test_the_losses_of_two_ranks_agree(tmp_path: Path) -> None:
    some = [VERSIONS[number] for number in (0, 3, 4, 6)]
    run_on_ranks(2, *((f"migrate/{name}.py", "--steps", 5, "--out", tmp_path / name / "0") for name in some))
    plain = losses(tmp_path, some[0])
    assert len(plain) == 5
    for version in some[1:]:
        assert losses(tmp_path, version) == pytest.approx(plain, rel=1e-5), version
    reports = [json.loads((tmp_path / name / "0" / "report.json").read_text()) for name in some[1:]]
    reduced = [report["parts"]["communication"]["bytes"] for report in reports]
    assert [bool(nbytes) for nbytes in reduced] == [False, True, True]  # measured from step 4 on


def test_each_version_swaps_one_part_of_the_plain_script() -> None:
    parts = ["loss.item()", "pin_memory", "", "DistributedDataParallel(", "clip_grad_norm_(", "torch.save("]
    ours = ["StepMeter", "DeviceLoader", "swap", "replicate", "AdamW", "Checkpointer"]
    assert len(VERSIONS) == 7
    for number, version in enumerate(VERSIONS):
        text = (FOLDER / f"{version}.py").read_text()
        for at, part in enumerate(parts):
            assert part == "" or (part in text) == (at >= number), (version, part)
        called = {
            node.func.attr
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func).startswith("ok.")
        }
        assert called == set(ours[:number]), version


def test_the_last_version_goes_on_bit_for_bit(alone: Path, tmp_path: Path) -> None:
    last = VERSIONS[-1]
    for steps in (10, 11):
        run(f"migrate/{last}.py", "--steps", steps, "--out", tmp_path / last / "0")
    assert losses(tmp_path, last) == losses(alone, last)[10:]


def test_the_plain_version_goes_on_too(tmp_path: Path, alone: Path) -> None:
    out = tmp_path / "step_0_plain" / "0"
    for steps in (10, 11):
        run("migrate/step_0_plain.py", "--steps", steps, "--out", out)
    (after,) = losses(tmp_path, "step_0_plain")
    assert after < losses(alone, "step_0_plain")[0] - 1  # trained already


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_comparison_says_what_the_reports_say(
    rounds: int, alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def stand_in(version: str, out: Path, steps: int, ranks: int) -> None:
        ran.append(version)
        out.parent.mkdir(exist_ok=True, parents=True)
        out.symlink_to(alone / version / "0")

    compare = of_example("compare")
    monkeypatch.setattr(compare, "run", stand_in)
    monkeypatch.setattr("sys.argv", ["compare.py", "--rounds", str(rounds)])
    compare.main()
    assert ran == [*VERSIONS, *VERSIONS[::-1]][: 7 * rounds]
    printed = capsys.readouterr().out
    reports = {name: alone / name / "0" / "report.json" for name in VERSIONS[1:]}
    for before, after in zip(VERSIONS[1:], VERSIONS[2:], strict=False):
        found = ok.StepReport.compare(reports[before], reports[after]).step
        (line,) = (line for line in printed.splitlines() if line.startswith(f"  {after} "))
        assert f"{found.before:.2f}" in line
        assert f"{found.after:.2f}" in line
        assert {"same": "the same within noise"}.get(found.verdict, found.verdict) in line
    (line,) = (line for line in printed.splitlines() if line.split()[:1] == ["checkpoint"])
    assert "measured from here on" in line


def test_a_gain_is_one_that_all_rounds_agree_on() -> None:
    agreed = of_example("compare").agreed
    assert agreed(["faster", "faster"]) == "faster"
    assert agreed(["faster", "slower"]) == "nothing sure: faster, slower"
    assert agreed(["same", "same"]) == "the same within noise"


def test_a_version_runs_as_a_script_and_one_that_fails_ends_the_comparison(tmp_path: Path) -> None:
    compare = of_example("compare")
    compare.run("step_6_checkpointer", tmp_path / "out", 5, 1)
    assert len(json.loads((tmp_path / "out" / "result.json").read_text())["losses"]) == 5
    with pytest.raises(SystemExit, match=r"No such file[\s\S]*step_9 failed with exit status 2"):
        compare.run("step_9", tmp_path, 5, 1)


def test_wrong_options_are_one_line(tmp_path: Path) -> None:
    assert "--steps 0: give at least 1" in refusal("migrate/step_0_plain.py", "--steps", 0)
    assert "--steps 4: give at least 5" in refusal("migrate/compare.py", "--steps", 4)
    assert "--ranks 0: give at least 1" in refusal("migrate/compare.py", "--ranks", 0)
    (tmp_path / "file").touch()
    assert "it is not empty" in refusal("migrate/compare.py", "--out", tmp_path)


def test_the_diffs_in_the_readme_are_those_of_the_files() -> None:
    text = (FOLDER / "README.md").read_text()
    for version in VERSIONS[1:]:
        assert f"```diff {version}\n@@" in text
    assert of_example("diffs").with_diffs(text) == text, "run: python examples/migrate/diffs.py"
