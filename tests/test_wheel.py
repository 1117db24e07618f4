"""The wheel: what is in it, what it asks for, and that it changes nothing that is installed."""

import email
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import overlapkit

ROOT = Path(__file__).parent.parent


def _pip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_every_source_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for path in (source / "overlapkit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    about = f"overlapkit-{overlapkit.__version__}.dist-info"
    packaged = {name for name in inside if not name.startswith(about)}
    assert packaged == expected
    assert "overlapkit/py.typed" in inside
    assert f"{about}/licenses/LICENSE" in inside


def test_the_metadata_asks_for_what_is_stated(metadata):
    assert metadata["Name"] == "overlapkit"
    assert metadata["Version"] == overlapkit.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    needs = metadata.get_all("Requires-Dist")
    assert {need for need in needs if "extra ==" not in need} == {
        "torch>=2.11",
        "msgspec>=0.19",
        "safetensors",
        "numpy",
        "rich",
        "typer",
        "xxhash>=2",
    }
    extras = {
        "data",
        "images",
        "images-cu12",
        "viz",
        "tensorboard",
        "remote",
        "gpu",
        "examples",
        "all",
        "dev",
        "docs",
        "bench",
    }
    assert set(metadata.get_all("Provides-Extra")) == extras


def test_each_extra_names_packages_and_extras_that_there_are(metadata):
    """That each resolves from the index is `make check-package`'s to see."""
    extras = set(metadata.get_all("Provides-Extra"))
    for word in metadata.get_all("Requires-Dist"):
        need = Requirement(word)
        if need.name == "overlapkit":
            assert need.extras <= extras, word
        else:
            assert not need.extras - {"python"}, word


SMOKE = """
import pathlib, sys
sys.modules["triton"] = None  # as on macOS: there is none
import overlapkit
here = pathlib.Path(sys.prefix).resolve()
assert here in pathlib.Path(overlapkit.__file__).resolve().parents, overlapkit.__file__
assert not list(pathlib.Path(overlapkit.__file__).parents[1].glob("tests*"))
exec(compile(pathlib.Path(sys.argv[1]).read_text(), "README.md", "exec"))
assert not [name for name in sys.modules if name.startswith("triton.")]
"""


def test_it_trains_in_an_empty_environment_outside_of_the_checkout_without_triton(wheel, tmp_path):
    """The wheel is unpacked there, as pip does it; what it needs is lent by the environment of the tests."""
    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    lent = Path(torch.__file__).parents[1]
    (site / "lent.pth").write_text(str(lent))  # a .pth of a lent folder is not read: no editable installs
    readme = (ROOT / "README.md").read_text()
    (tmp_path / "readme.py").write_text(re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S)[0])
    (tmp_path / "smoke.py").write_text(SMOKE)
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(tmp_path / "env/bin/python"), "-W", "error", "smoke.py", "readme.py"],
        cwd=tmp_path,
        env=clean | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 batch ready" in done.stdout
    assert (tmp_path / "runs/a/step-60").is_dir()


def test_the_sdist_makes_the_same_wheel(wheel, tmp_path):
    def build(kind, where):
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(tmp_path / kind)]
        done = subprocess.run(command, cwd=where, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return next((tmp_path / kind).iterdir())

    with tarfile.open(build("sdist", ROOT)) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("overlapkit-*")
    tops = {path.name for path in source.iterdir()}
    assert {"src", "tests", "examples", "docs", "README.md", "LICENSE", "CHANGELOG.md"} <= tops
    assert not tops & {".venv", "runs", "build"}
    contents = []
    for built in (wheel, build("wheel", source)):
        with zipfile.ZipFile(built) as archive:
            contents.append({one.filename: one.CRC for one in archive.infolist()})
    assert contents[0] == contents[1]


def test_release_notes_are_the_section_of_the_version(tmp_path):
    found = runpy.run_path(str(ROOT / ".ci/release_notes.py"))
    text = (
        "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n### Added\n- one\n\n## [0.1.0]\n- two\n"
    )
    assert found["own_version"]() == overlapkit.__version__
    assert found["section"](text, "0.2.0") == "### Added\n- one"
    assert found["section"](text, "0.1.0") == "- two"
    for version, words in (
        ("0.3.0", r"no section\(s\) \[0.3.0\], but Unreleased, 0.2.0"),
        ("Unreleased", "nothing"),
    ):
        with pytest.raises(SystemExit, match=words):
            found["section"](text, version)


TORCH_211 = {"torch": "2.11.0+cu128", "triton": "3.6.0"}
NIGHTLY = {"torch": "2.14.0.dev20260901+cu130", "triton": "3.8.0+git1234567"}
VENDOR = {"torch": "2.12.0a0+5d1e9f2.nv26.5", "triton": "3.6.0"}


@pytest.fixture(scope="module")
def index_there():
    """Skip where nothing can be looked up: no pip, or no package index."""
    done = _pip("install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed", "--retries=0", "typer")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no word"]
        pytest.skip(f"pip reaches no package index: {lines[-1]}")


def _fake(site: Path, name: str, version: str, needs: list[str]) -> None:
    """A package as pip sees an installed one: its dist-info folder."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (folder / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {need}" for need in needs), ""]))
    (folder / "INSTALLER").write_text("pip\n")
    (folder / "RECORD").write_text("")


@pytest.mark.parametrize(
    "installed",
    [
        TORCH_211 | {"numpy": "1.26.4", "rich": "13.8.0"},
        TORCH_211 | {"numpy": "2.0.0", "rich": "13.9.4", "typer": "0.12.5", "click": "8.1.7"},
        NIGHTLY | {"numpy": "2.2.6", "safetensors": "0.4.5"},
        VENDOR | {"numpy": "1.26.4", "safetensors": "0.4.5", "rich": "13.9.4"},
    ],
    ids=["old", "old-typer", "nightly", "vendor"],
)
@pytest.mark.usefixtures("index_there")
def test_installing_beside_torch_changes_nothing_installed(installed, wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    for name, version in installed.items():
        needs = {"torch": [f"triton=={installed['triton']}"], "typer": ["click", "rich"]}
        _fake(site, name, version, needs.get(name, []))
    report = tmp_path / "report.json"
    python = str(tmp_path / "env" / "bin" / "python")
    words = ["--python", python, "install", "--dry-run", "--quiet", "--report", str(report), str(wheel)]
    done = _pip(*words)
    assert done.returncode == 0, done.stderr
    added = {item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]}
    assert added & installed.keys() == set()
    hard = {"torch", "msgspec", "safetensors", "numpy", "rich", "typer", "xxhash"}
    assert hard | {"overlapkit"} <= added | installed.keys()
