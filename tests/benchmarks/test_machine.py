"""The commit of a checkout, of a copy without .git, and of a copy inside of another checkout."""

import subprocess

import pytest

import machine


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    for name in [name for name in machine.os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "file").write_text("1")
    for words in (["init", "-q"], ["add", "file"], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    return tmp_path


def test_commit_of_a_checkout(checkout):
    done = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert machine.commit(checkout) == done.stdout.strip()
    (checkout / "file").write_text("2")
    assert machine.commit(checkout) == done.stdout.strip() + "-dirty"


def test_a_copy_inside_of_another_checkout_has_no_commit(checkout):
    inner = checkout / "inner"
    inner.mkdir()
    assert machine.commit(inner) == "unknown"


def test_commit_outside_of_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert machine.commit(tmp_path) == "unknown"
    monkeypatch.setenv("GIT_COMMIT", "abc123")
    assert machine.commit(tmp_path) == "abc123"


def test_commit_without_git_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert machine.commit(tmp_path) == "unknown"


def test_versions_name_peers_that_are_not_there():
    found = machine.versions()
    assert found["numpy"] is not None
    assert "liger-kernel" in found
