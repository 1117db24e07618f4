"""Two reports compared: what was planted is named, what is noise is not, and saved files do as well."""

import json
import random
import statistics

import pytest
from typer.testing import CliRunner

from overlapkit.cli import app
from overlapkit.measure import StepMeter, StepReport, explain
from overlapkit.measure.compare import compare
from overlapkit.measure.noise import noise, standard_error
from tests.measure.test_report import Run
from tests.measure.traces.hand import HandTrace


def run(monkeypatch, seed=0, steps=60, spread=0.02, **planted):
    """A report on steps that vary by chance."""
    loop, chance = Run(monkeypatch), random.Random(seed)
    for _ in range(steps):
        loop.step(inside=abs(chance.gauss(1, spread * 20)), **planted)
    return loop.meter.report()


def by_name(found):
    return {part.name: part for part in found.parts}


def test_a_planted_change_is_named_and_nothing_else(monkeypatch):
    before, after = run(monkeypatch, 1, input=4), run(monkeypatch, 2, input=0.1)
    found = StepReport.compare(before, after)
    parts = by_name(found)
    assert {name for name, part in parts.items() if part.verdict == "faster"} == {"input"}
    assert {name for name, part in parts.items() if part.verdict == "slower"} == set()
    assert parts["input"].difference == pytest.approx(-3.9)
    assert parts["transfer"].verdict == "not measured"
    assert parts["forward"].verdict == "same"
    assert found.step.verdict == "faster"
    speed = before.period_ms / after.period_ms
    assert found.verdict == (
        f"{speed:.2f} times as fast: a step takes {after.period_ms:.1f} ms, before it took "
        f"{before.period_ms:.1f} ms; input 3.9 ms less."
    )
    assert [words.split(":")[0] for words in found.gone] == ["input"]
    assert (found.new, found.differs) == ((), ())
    back = StepReport.compare(after, before)
    assert back.step.verdict == "slower"
    assert "input 3.9 ms more" in back.verdict
    assert (back.new, back.gone) == (found.gone, ())


def test_noise_is_no_change(monkeypatch):
    largest = 0.0
    for seed in range(8):
        pair = [run(monkeypatch, 2 * seed + which, spread=0.2) for which in (10, 11)]
        found = StepReport.compare(*pair)
        largest = max(largest, abs(found.step.difference) / pair[0].period_ms)
        assert {part.verdict for part in (found.step, *found.parts)} <= {"same", "not measured"}
        assert found.verdict.startswith("No faster or slower: a step takes ")
        assert "noise: " in found.verdict
    assert largest > 0.02  # which would be a change, were it known well enough


def test_one_step_of_many_ranks_is_one_step(tmp_path):
    """Ranks wait for each other: that eight of them agree says nothing about the next step."""
    for name, slower in (("before", 1.0), ("after", 1.05)):
        (tmp_path / name).mkdir()
        for rank in range(8):
            made = HandTrace(rank, 8)
            made.step(5, 0, 10_000)
            made.work("gemm", 100, (1100 + rank) * slower, launch=10)
            made.collective(2000 * slower, 3000 * slower, launch=500)
            made.write(tmp_path / name / f"rank{rank}.json")
    before, after = explain(tmp_path / "before"), explain(tmp_path / "after")
    assert set(before.to_dict()["error_ms"].values()) == {None}
    assert StepReport.compare(before, after).verdict.startswith("Too few steps to tell noise")


def test_a_finding_that_just_passes_the_bar_is_not_new(monkeypatch):
    low, high = run(monkeypatch, 1, input=0.38), run(monkeypatch, 2, input=0.44)
    assert [finding.lane for finding in low.findings] == []
    assert [finding.lane for finding in high.findings] == ["input"]
    found = StepReport.compare(low, high)
    assert (found.new, found.gone) == ((), ())


def test_findings_that_stay_and_another_fix_for_the_same_lane(monkeypatch):
    before = run(monkeypatch, 1, input=4, checkpoint=3).to_dict()
    after = json.loads(json.dumps(before))
    after["findings"][1]["component"], after["findings"][1]["fix"] = "rank 3", "rank 3: look at its host"
    found = compare(before, after)
    lane = before["findings"][1]["lane"]
    assert found.gone == (f"{lane}: {before['findings'][1]['fix']}",)
    assert found.new == (f"{lane}: rank 3: look at its host",)
    assert found.kept == (f"{before['findings'][0]['lane']}: {before['findings'][0]['fix']}",)


def test_few_steps_tell_no_noise(monkeypatch):
    found = StepReport.compare(run(monkeypatch, steps=4, input=4), run(monkeypatch, steps=60))
    assert found.step.verdict == by_name(found)["input"].verdict == "unknown"
    assert found.step.noise is None
    assert found.verdict.startswith("Too few steps to tell noise: a step takes ")
    assert by_name(found)["forward"].verdict == "same"  # as long to the digit


def test_what_else_is_not_the_same_is_said(monkeypatch):
    before = run(monkeypatch).to_dict()
    other = before | {"world": 4, "device": "cuda:0", "versions": {**before["versions"], "torch": "2.99"}}
    other |= {"period_ms": before["period_ms"] * 1.5, "tokens_per_s": before["tokens_per_s"] / 2}
    found = compare(before, other)
    assert found.differs == (
        "device: cpu, now cuda:0",
        "world: 1, now 4",
        f"torch: {before['versions']['torch']}, now 2.99",
        "tokens a step: 1,000, now 3,000",
    )
    assert found.tokens_per_s[1] == pytest.approx(2 * before["tokens_per_s"])
    assert found.verdict.startswith("2.00 times as fast: a step takes")
    assert "tokens/s, before" in found.verdict
    assert "not the same: device" in str(found)


def test_saved_reports_compare_as_new_ones_do(monkeypatch, tmp_path):
    before, after = run(monkeypatch, 1, input=4), run(monkeypatch, 2)
    before.save(tmp_path / "a.json")
    after.save(tmp_path / "b.json")
    after.save(tmp_path / "b.json.gz")
    found = StepReport.compare(before, after)
    assert StepReport.compare(tmp_path / "a.json", str(tmp_path / "b.json")) == found
    assert StepReport.compare(tmp_path / "a.json", tmp_path / "b.json.gz") == found
    assert StepReport.compare(before, after.to_dict()) == found
    told = found.to_dict()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["verdict"] == found.verdict
    assert told["step"]["verdict"] == "faster"


def test_the_command(monkeypatch, tmp_path):
    run(monkeypatch, 1, input=4).save(tmp_path / "a.json")
    run(monkeypatch, 2).save(tmp_path / "b.json")
    names = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    found = StepReport.compare(*names)
    result = CliRunner().invoke(app, ["compare", *names])
    assert (result.exit_code, result.stdout) == (0, f"{found}\n")
    assert json.loads(CliRunner().invoke(app, ["compare", *names, "--json"]).stdout) == found.to_dict()
    result = CliRunner().invoke(app, ["compare", names[0], str(tmp_path / "none.json")])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "none.json" in result.stderr


def test_text_fits_and_says_everything(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = StepReport.compare(run(monkeypatch, 1, input=4), run(monkeypatch, 2, communication=3))
    text = str(found)
    assert text.startswith(found.verdict[:70])
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["input"][1:4] == ["4.00", "0.00", "-4.00"]
    assert rows["input"][-1] == "faster"
    assert rows["communication"][-1] == "slower"
    assert rows["transfer"][1:] == ["-", "-", "-", "-", "-", "not", "measured"]
    assert {"step", "tokens/s", "gone:", "new:"} <= rows.keys()
    table = [line for line in text.splitlines() if "──" in line or line.startswith(" ")]
    assert max(map(len, table)) <= 80


def test_reports_of_traces_compare(tmp_path):
    reports = []
    for name, late in (("a", 0), ("b", 300)):
        made = HandTrace(0, 2)
        for step in range(6):
            made.step(step, 2000 * step, 2000 * step + 1900)
            made.work("gemm", 2000 * step + 100, 2000 * step + 1000, launch=2000 * step + 10)
            made.collective(2000 * step + 1000, 2000 * step + 1400 + late, launch=2000 * step + 20)
        reports.append(explain(made.write(tmp_path / f"{name}.json")))
    found = StepReport.compare(*reports)
    assert by_name(found)["communication"].verdict == "slower"
    assert by_name(found)["communication"].difference == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("3", "give a StepReport"),
        ("{}", "is no report"),
        ('{"parts": {"a": 3}, "period_ms": 1}', "is no report"),
        ('{"parts": {}, "period_ms": null}', "covers no step"),
        ('{"traceEvents": []}', "is a trace: overlapkit explain --json .*a.json makes a report of it"),
        (" " * 300, "longer than any report"),
    ],
)
def test_what_is_no_report_is_one_error(monkeypatch, tmp_path, text, words):
    (tmp_path / "a.json").write_text(text)
    if "longer" in words:
        monkeypatch.setattr("overlapkit.measure.compare._LONGEST", 299)
    with pytest.raises((TypeError, ValueError), match=rf"a.json.*{words}"):
        StepReport.compare(tmp_path / "a.json", run(monkeypatch, steps=2))


@pytest.mark.parametrize("damage", [lambda raw: raw[:-20], lambda raw: raw[:99] + b"x" * 99 + raw[198:]])
def test_a_packed_report_that_is_damaged_is_one_error(monkeypatch, tmp_path, damage):
    packed = tmp_path / "a.json.gz"
    run(monkeypatch, steps=2).save(packed)
    packed.write_bytes(damage(packed.read_bytes()))
    with pytest.raises(ValueError, match=r"a\.json\.gz is damaged: "):
        StepReport.compare(packed, packed)


def test_what_cannot_be_compared(monkeypatch):
    with pytest.raises(TypeError, match="after=int: give a StepReport"):
        StepReport.compare(run(monkeypatch, steps=2), 3)
    with pytest.raises(ValueError, match="before=StepReport covers no step"):
        StepReport.compare(StepMeter().report(), run(monkeypatch, steps=2))


def test_the_error_of_a_mean():
    chance = random.Random(3)
    for size in (12, 100, 103):
        errors, means = [], []
        for _ in range(400):
            values = [chance.gauss(50, 3) for _ in range(size)]
            errors.append(standard_error(values))
            means.append(statistics.fmean(values))
        assert statistics.fmean(errors) == pytest.approx(statistics.stdev(means), rel=0.12)
    assert standard_error([5.0] * 40) == 0
    assert standard_error([1.0, 2.0, 3.0]) is None


def test_the_error_of_values_that_depend_on_each_other():
    """Ten in a row alike: a hundred of them tell no more than ten."""
    chance = random.Random(4)
    errors = []
    for _ in range(400):
        draws = [chance.gauss(0, 1) for _ in range(10)]
        errors.append(standard_error([one for one in draws for _ in range(10)]))
    assert statistics.fmean(errors) == pytest.approx(1 / 10**0.5, rel=0.1)


def test_chance_exceeds_the_noise_once_in_a_thousand_times():
    chance, above = random.Random(5), 0
    for _ in range(3000):
        pair = [[chance.gauss(0, 1) for _ in range(size)] for size in (100, 12)]
        means = [statistics.fmean(values) for values in pair]
        above += abs(means[0] - means[1]) > noise(*((standard_error(v), len(v)) for v in pair))
    assert above <= 12  # 3 expected
    assert noise((None, 1), (0.1, 100)) is None
    assert noise((0.0, 100), (0.0, 100)) == 0
    assert noise((1.0, 5), (0.0, 5)) == pytest.approx(8.61, rel=0.05)  # Student's, 4 degrees, 0.1 %
