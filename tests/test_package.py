"""What importing the package costs and brings, its names, and where it imports what is optional."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import overlapkit

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "overlapkit").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

HARD = {"torch", "msgspec", "safetensors", "numpy", "rich", "typer", "xxhash"}
OPTIONAL = {
    "torchdata": "data",
    "nvidia": "images",
    "matplotlib": "viz",
    "fsspec": "remote",
    "pynvml": "gpu",
    "tensorboard": "tensorboard",
}
"""Module roots of the optional packages, and the extra that brings each."""

PROBE = """
import json, os, sys, threading
import torch

HEAVY = ("triton", "nvidia.dali", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torchdata",
         "matplotlib", "fsspec", "pynvml", "tensorboard")
heavy = lambda: {name for name in sys.modules if any(name == h or name.startswith(h + ".") for h in HEAVY)}
native = lambda: len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0

modules, brought, threads, tasks = set(sys.modules), heavy(), threading.active_count(), native()
found = {}
for name in sys.argv[1:]:
    before = heavy()
    __import__(name)
    found[name] = sorted(heavy() - before)
print(json.dumps({
    "new": sorted(set(sys.modules) - modules),
    "heavy": found,
    "threads": [threading.active_count() - threads, native() - tasks],
    "cuda": torch.cuda.is_initialized(),
}))
"""


def _imported(*names: str) -> dict[str, Any]:
    """What a fresh interpreter that has torch gets from importing `names` one after the other."""
    done = subprocess.run([sys.executable, "-c", PROBE, *names], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_import_brings_one_module_no_thread_and_no_device():
    """Counted, not timed: one module of a few lines is what keeps it far below 50 ms beyond torch."""
    seen = _imported("overlapkit")
    assert seen["new"] == ["overlapkit"]
    assert seen["threads"] == [0, 0]
    assert seen["cuda"] is False


def test_importing_a_part_brings_nothing_heavy():
    parts = sorted(path.parent.name for path in (ROOT / "src" / "overlapkit").glob("*/__init__.py"))
    assert parts
    seen = _imported(*(f"overlapkit.{part}" for part in parts))
    assert seen["heavy"] == {f"overlapkit.{part}": [] for part in parts}
    assert seen["threads"] == [0, 0]
    assert seen["cuda"] is False


def test_names_are_sorted_and_listed():
    assert overlapkit.__all__ == sorted(set(overlapkit.__all__))
    assert dir(overlapkit) == sorted([*overlapkit.__all__, "__version__"])


@pytest.mark.parametrize("name", overlapkit.__all__)
def test_each_name_resolves_to_the_object_in_its_part(name):
    value = getattr(overlapkit, name)
    assert getattr(overlapkit, name) is value
    home = value.__name__ if isinstance(value, ModuleType) else value.__module__
    assert home.startswith("overlapkit.")
    assert value.__doc__


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_what_a_page_writes_behind_the_packages_name_is_there_from_the_beginning(page):
    """And not only once something else has imported that part."""
    assert set(re.findall(r"\bok\.(\w+)", page.read_text())) <= set(overlapkit.__all__)


def test_star_import_gives_the_public_names():
    names: dict[str, Any] = {}
    exec("from overlapkit import *", names)
    assert set(overlapkit.__all__) <= names.keys()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'overlapkit' has no attribute 'Trainer'"):
        _ = overlapkit.Trainer
    assert not hasattr(overlapkit, "_private")
    with pytest.raises(ImportError, match="Trainer"):
        exec("from overlapkit import Trainer")


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if path.name == "__init__.py" and path.parent.name != "overlapkit"],
    ids=lambda path: path.parent.name,
)
def test_a_folder_lists_its_names_sorted_and_does_nothing_else(path):
    body = ast.parse(path.read_text()).body
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr, ast.If, ast.FunctionDef)
    assert [type(node).__name__ for node in body if not isinstance(node, allowed)] == []
    listed = [
        ast.literal_eval(node.value)
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert listed == [sorted(set(names)) for names in listed]
    assert listed or len(body) == 1, "a folder without public names holds its docstring only"


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and module root of every absolute import that runs (those for type checkers do not)."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(inner for statement in node.body for inner in ast.walk(statement))
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name.split(".")[0]) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_optional_packages_come_through_require_with_their_extra(path):
    tree = ast.parse(path.read_text())
    allowed = HARD | {"overlapkit", "triton"} | set(sys.stdlib_module_names)
    assert [(line, root) for line, root in _imports(tree) if root not in allowed] == []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "require":
            module, extra = (ast.literal_eval(argument) for argument in node.args)
            assert OPTIONAL[module.split(".")[0]] == extra, f"{path}:{node.lineno}"


def test_extras_are_what_they_are_said_to_be():
    extras = PROJECT["optional-dependencies"]
    hard = {"torch>=2.11", "msgspec>=0.19", "safetensors", "numpy", "rich", "typer", "xxhash>=2"}
    assert set(PROJECT["dependencies"]) == hard
    assert {name: extras[name] for name in extras.keys() - {"dev", "docs", "bench"}} == {
        "data": ["torchdata"],
        "images": ["nvidia-dali-cuda130"],
        "images-cu12": ["nvidia-dali-cuda120"],
        "viz": ["matplotlib"],
        "tensorboard": ["tensorboard"],
        "remote": ["fsspec"],
        "gpu": ["nvidia-ml-py"],
        "examples": [
            "overlapkit[images,viz]",
            *("accelerate", "lightning", "pillow", "scikit-learn", "tokenizers", "transformers"),
        ],
        "all": ["overlapkit[data,images,viz,tensorboard,remote,gpu]"],
    }
    assert set(OPTIONAL.values()) <= extras.keys()


def test_every_direct_development_dependency_is_pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line and not line.startswith("#")}
    extras = PROJECT["optional-dependencies"]
    brought = [
        name
        for extra in ("data", "docs", "examples", "images", "viz", "remote", "dev", "bench")
        for name in extras[extra]
    ]
    wanted = [*PROJECT["dependencies"], *brought]
    names = {re.split(r"[;>[]", word)[0].strip() for word in wanted}
    assert {name for name in names if not name.startswith("overlapkit")} - pinned == set()
