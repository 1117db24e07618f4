"""Choices of blocks with a timer that is made up: what is measured, kept, read and restored."""

import ast
import json
import os
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overlapkit import kernels, launch
from overlapkit.kernels import raw
from overlapkit.launch import BY_RULE, Choice
from tests.kernels.judge import compare

HALF = Choice(-1, 0)
module = import_module("overlapkit.kernels.autotune")  # the function of that name is before it


class Timer:
    """Times by a table, 1 s where it has none; counts what it was asked."""

    def __init__(self, seconds: dict[Choice, float]) -> None:
        self.seconds, self.asked = seconds, 0

    def __call__(self, call: Callable[[], object]) -> float:
        self.asked += 1
        call()
        return self.seconds.get(launch._chosen.choice, 1.0)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_cache", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OVERLAPKIT_AUTOTUNE", raising=False)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Timer]:
    def put(seconds: dict[Choice, float]) -> Timer:
        timer = Timer(seconds)
        monkeypatch.setattr(module, "_seconds", timer)
        return timer

    return put


def step(n: int = 5) -> None:
    kernels.swiglu(torch.randn(n, 37), torch.randn(n, 37))


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """The choice that each tile is made with."""
    seen: list[Choice] = []
    from overlapkit.kernels.raw import gated

    tile = gated.tile
    monkeypatch.setattr(
        gated,
        "tile",
        lambda *a, **k: (seen.append(getattr(launch._chosen, "choice", BY_RULE)), tile(*a, **k))[1],
    )
    return seen


def test_the_fastest_is_kept_on_disk_and_used(
    interpreted: None, timed: Callable[..., Timer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timer = timed({HALF: 0.5, Choice(1, 1): 0.7})
    (found,) = kernels.autotune(step, directory=tmp_path)
    assert (found.choice, found.seconds, found.by_rule, timer.asked) == (HALF, 0.5, 1.0, 9)
    assert (
        found.name
        == f"gated._launch_forward {module._compiler()} cpu 8x37:float32 8x37:float32 8x37:float32 silu"
    )
    (again,) = kernels.autotune(step, directory=tmp_path)
    assert (again.choice, again.seconds, timer.asked) == (HALF, None, 9)
    seen = recorded(monkeypatch)
    step()
    step(6)  # up to the same power of two
    step(9)  # another size: by the rule
    assert seen == [HALF, HALF, BY_RULE]
    assert timer.asked == 9, "a launch outside of autotune measured"


@pytest.mark.parametrize("asked", ["1", "directory"])
def test_another_process_reads_where_it_is_told_to(
    interpreted: None,
    timed: Callable[..., Timer],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    asked: str,
) -> None:
    value = str(tmp_path / "there") if asked == "directory" else asked
    if asked == "directory":
        monkeypatch.setenv("OVERLAPKIT_AUTOTUNE", value)
    timed({HALF: 0.5})
    kernels.autotune(step)
    place = tmp_path / ("there" if asked == "directory" else "home/overlapkit/autotune")
    assert len(list(place.iterdir())) == 1
    seen = recorded(monkeypatch)
    for value_there in ("0", value):  # the variable when the module is imported
        monkeypatch.setenv("OVERLAPKIT_AUTOTUNE", value_there)
        monkeypatch.setattr(module, "_cache", module._from_environment())
        step()
    assert seen == [BY_RULE, HALF]


def test_other_bits_must_be_worth_it(interpreted: None, timed: Callable[..., Timer], tmp_path: Path) -> None:
    timed({HALF: 0.99})
    assert kernels.autotune(step, directory=tmp_path)[0].choice == BY_RULE


def test_a_tile_that_is_too_large_is_passed_over(
    interpreted: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from triton.runtime.errors import OutOfResources

    def seconds(call: Callable[[], object]) -> float:
        if launch._chosen.choice.elements > 0:
            raise OutOfResources(2, 1, "registers")
        return 1.0 - launch._chosen.choice.warps / 4

    monkeypatch.setattr(module, "_seconds", seconds)
    assert kernels.autotune(step, directory=tmp_path)[0].choice == Choice(0, 1)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"key": ["other"], "choice": [-1, 0]}', '{"choice": [9, 9]}', "{key, [9, 9]}"],
)
def test_a_damaged_file_is_measured_anew_and_replaced(
    interpreted: None, timed: Callable[..., Timer], tmp_path: Path, content: str
) -> None:
    timed({HALF: 0.5})
    kernels.autotune(step, directory=tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    file.write_text(content.replace("{key, [9, 9]}", whole.replace("[-1, 0]", "[9, 9]")))
    assert kernels.autotune(step, directory=tmp_path)[0].seconds == 0.5
    assert file.read_text() == whole
    assert [file] == list(tmp_path.iterdir())


@pytest.mark.parametrize("links", [True, False])
def test_ranks_that_write_at_once_take_one_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """The first one's, where the file system has links; a whole one where it has not."""
    if not links:
        monkeypatch.setattr(os, "link", lambda *paths: (_ for _ in ()).throw(OSError("no links")))
    keys, both = [["kernel", n] for n in range(50)], (HALF, Choice(0, 1))
    found: dict[Choice, list[Choice]] = {}

    def rank(mine: Choice) -> None:
        cache = module._Cache(tmp_path)
        found[mine] = [cache.write(key, mine) for key in keys]

    ranks = [threading.Thread(target=rank, args=(choice,)) for choice in both]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    kept = [module._Cache(tmp_path).read(key) for key in keys]
    assert set(kept) <= set(both)
    if links:
        assert found[both[0]] == found[both[1]] == kept
    assert len(list(tmp_path.iterdir())) == len(keys)


def test_what_is_written_in_place_comes_back(timed: Callable[..., Timer], tmp_path: Path) -> None:
    @module.tuned(restores=("x",))
    def double(x: Tensor, factor: float) -> None:
        x.mul_(factor)

    timer, x = timed({HALF: 0.5}), torch.ones(3)
    kernels.autotune(lambda: double(x, 2.0), directory=tmp_path)
    assert timer.asked == 9
    assert x.tolist() == [2.0] * 3, "as if it had run once"


def test_what_a_choice_depends_on(
    interpreted: None, timed: Callable[..., Timer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timer = timed({})
    x, w = torch.randn(5, 37), torch.randn(37)
    for fn in (
        lambda: kernels.rms_norm(x),
        lambda: kernels.rms_norm(x, w),
        lambda: kernels.rms_norm(x.half(), w),
        lambda: kernels.rms_norm(torch.randn(9, 37), w),
        lambda: kernels.rms_norm(x[:, :36], w[:36]),
        lambda: kernels.rms_norm(x, w, residual=x),
        lambda: kernels.rms_norm(x, w, offset=1.0),
    ):
        before = timer.asked
        kernels.autotune(fn, directory=tmp_path)
        assert timer.asked == before + 9
    monkeypatch.setattr(module, "_gpu", lambda device: "another")
    kernels.autotune(lambda: kernels.rms_norm(x), directory=tmp_path)
    assert timer.asked == before + 18
    (key,) = (json.loads(file.read_text())["key"] for file in list(tmp_path.iterdir())[:1])
    assert key[0] == "norm_forward.forward"
    assert len(key[1]) == 16


def test_a_step_without_kernels_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="launched no kernel that can be tuned"):
        kernels.autotune(step, directory=tmp_path)
    assert module._tuning is None


@pytest.mark.parametrize("choice", [Choice(-1, 0), Choice(1, 1)], ids=str)
def test_every_choice_computes_the_same(interpreted: None, choice: Choice) -> None:
    x, w, target = (
        torch.randn(20, 300, requires_grad=True),
        torch.randn(300, requires_grad=True),
        torch.arange(20),
    )

    def ours(x: Tensor, w: Tensor) -> Any:
        return kernels.swiglu(kernels.rms_norm(x, w), x), kernels.cross_entropy(x, target)

    def torchs(x: Tensor, w: Tensor) -> Any:
        y = torch.nn.functional.silu(torch.nn.functional.rms_norm(x, (300,), w)) * x
        return y, torch.nn.functional.cross_entropy(x, target)

    with launch.choosing(choice):
        compare(ours, torchs, (x, w), (torch.randn(20, 300), torch.tensor(1.0)))


def test_every_launcher_with_a_tile_can_be_tuned() -> None:
    found = 0
    for file in Path(raw.__path__[0]).glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            calls = {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
            if isinstance(node, ast.FunctionDef) and "tile" in calls:
                found += 1
                assert any(ast.unparse(d).startswith("tuned(") for d in node.decorator_list), (
                    file,
                    node.name,
                )
    assert found >= 6


def test_options_and_sources_are_part_of_a_key(
    timed: Callable[..., Timer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def launcher(x: Tensor, options: tuple[float, ...]) -> None:
        pass

    timer, x = timed({}), torch.ones(3)
    for options in ((0.0, 0.0), (0.1, 0.0), (0.0, 0.1), (0.2, 0.0)):  # which of them are there, not how large
        kernels.autotune(lambda options=options: module.tuned()(launcher)(x, options), directory=tmp_path)
    assert timer.asked == 27
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.py").write_text("1")
    before = module._source(tmp_path / "raw")
    (tmp_path / "raw" / "a.py").write_text("2")
    module._source.cache_clear()
    assert module._source(tmp_path / "raw") != before
