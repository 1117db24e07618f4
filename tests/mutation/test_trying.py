"""The tool on a made checkout: a mutation that matters is caught; what hangs or changes nothing is not."""

import shutil
from pathlib import Path

import pytest

from tests.mutation import recording
from tests.mutation.checkout import PACKAGE
from tests.mutation.points import in_package
from tests.mutation.trying import Trial

MODULE = """
class Work:
    def __init__(self):
        self.value, self.begun = 0, False

    def record(self):
        self.begun = True

    def wait(self):
        self.value = 1

    def query(self):
        return self.begun


def result():
    work = Work()
    work.wait()
    return work.value


def idle():
    Work().wait()
    return 1


def hang():
    work = Work()
    work.record()
    while not work.query():
        pass
    return 1


def late(patient):
    work = Work()
    work.record()
    while patient and not work.query():
        pass
    return work.begun
"""

TESTS = """
import pytest
from overlapkit.made import hang, idle, late, result

@pytest.mark.parametrize("function", [hang, idle, result])
def test_made(function):
    assert function() == 1

@pytest.mark.parametrize("patient", [True, False])
def test_late(patient):
    assert late(patient)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    at = tmp_path / "checkout"
    (at / PACKAGE).mkdir(parents=True)
    (at / PACKAGE / "__init__.py").touch()
    (at / PACKAGE / "made.py").write_text(MODULE)
    (at / "tests/mutation").mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("reporting.py"), at / "tests/mutation")
    (at / "tests/test_made.py").write_text(TESTS)
    (at / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    return at


def test_mutations_are_recorded_tried_and_judged(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "files_of", lambda module: ("tests/test_made.py",))
    points = in_package(root / PACKAGE)
    before = (root / PACKAGE / "made.py").read_text()
    seen = recording.record(root, tmp_path / "recorded", points, ["tests/test_made.py"], jobs=1)
    assert len(seen.seconds) == 5
    tests = {point: sorted(seen.tests_of(point), reverse=True) for point in points}
    names = {
        (point.where, point.text): [test.partition("[")[2] for test in found]
        for point, found in tests.items()
    }
    assert names == {
        ("result", "work.wait()"): ["result]"],
        ("idle", "Work().wait()"): ["idle]"],
        ("hang", "work.record()"): ["hang]"],
        ("hang", "work.query()"): ["hang]"],
        ("late", "work.record()"): ["True]", "False]"],
        ("late", "work.query()"): ["True]"],
    }
    recording.save(seen, tmp_path / "kept.json")
    assert recording.load(tmp_path / "kept.json").seen == seen.seen

    trial = Trial(root, tmp_path / "copies", jobs=2, patience_s=2.0)
    caught = trial.run(tests, {})
    found = {(key[1], key[2]): row.test for key, row in caught.items()}
    assert found == {
        ("result", "work.wait()"): "tests/test_made.py::test_made[result]",
        ("late", "work.record()"): "tests/test_made.py::test_late[False]",  # with True it hangs
    }
    said = capsys.readouterr().out
    assert "hang: work.record()  ->  out of time, no catch: tests/test_made.py::test_made[hang]" in said
    copies = [tmp_path / f"copies/copy-{number}" / PACKAGE / "made.py" for number in range(2)]
    assert [file.read_text() for file in (root / PACKAGE / "made.py", *copies)] == [before] * 3


def test_a_test_that_fails_by_itself_says_nothing(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "tests/test_made.py").write_text(
        "def test_wrong():\n    assert False\n\ndef test_right():\n    pass\n"
    )
    wrong, right = (f"tests/test_made.py::test_{name}" for name in ("wrong", "right"))
    assert Trial(root, tmp_path / "copies", jobs=1).passing({wrong, right}).keys() == {right}
    assert f"fails with nothing taken out: {wrong}" in capsys.readouterr().out
