"""What objects hold: found once each, the nearest first, with nothing of the user's run."""

import functools
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlapkit.input import reach
from overlapkit.input.reach import reachable


class Goal:
    pass


class Bound:
    def __init__(self, goal: Any) -> None:
        self.goal = goal

    def method(self) -> None:
        pass


def parameter(goal: Any) -> Any:
    made = torch.nn.Parameter(torch.ones(1))
    made.goal = goal  # type: ignore[attr-defined]
    return made


class Slots:
    __slots__ = ("__dict__", "goal", "unset")


class Asked:
    """Fails when it is asked for anything."""

    def __init__(self, goal: Any) -> None:
        self.__dict__["goal"] = goal

    @property
    def value(self) -> Any:
        raise AssertionError

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    def __call__(self) -> Any:
        raise AssertionError

    def __iter__(self) -> Any:
        raise AssertionError

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    __hash__ = None  # type: ignore[assignment]


class Listed(list):  # type: ignore[type-arg]
    pass


def slotted(goal: Any) -> Any:
    made = Slots()
    made.goal = goal
    return made


def late(goal: Any) -> Any:
    def use() -> Any:
        return goal, unset

    if goal is None:
        unset = 1
    return use


HOLDS = {
    "attribute": lambda goal: SimpleNamespace(a=1, b=goal),
    "slot": slotted,
    "nobody asks": Asked,
    "list of tuples": lambda goal: [(1, "a"), (2, goal)],
    "dict": lambda goal: {"a": {"b": goal}},
    "deque": lambda goal: deque([None, goal]),
    "set": lambda goal: {1, goal},
    "own list": lambda goal: Listed([goal]),
    "partial": lambda goal: functools.partial(print, 1, key=goal),
    "method": lambda goal: Bound(goal).method,
    "parameter": parameter,
    "closure": lambda goal: lambda: goal,
    "closure with a variable that has no value": late,
}


@pytest.mark.parametrize("how", HOLDS)
def test_a_goal_is_found_once(how: str) -> None:
    goal = Goal()
    root = SimpleNamespace(first=HOLDS[how](goal), again=HOLDS[how](goal))
    assert sum(one is goal for one in reachable(root, root)) == 1


def test_circles_end_and_the_nearest_come_first() -> None:
    far, near = Goal(), Goal()
    root = SimpleNamespace(a=[[[far]]], b=near)
    root.a.append(root)
    found = [id(one) for one in reachable(root)]
    assert len(set(found)) == len(found) == 6
    assert found.index(id(near)) < found.index(id(far))


def test_there_is_an_end_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    goal = Goal()
    many = [(k,) for k in range(reach.ITEMS)]
    assert not any(one is goal for one in reachable([*many, goal]))
    assert any(one is goal for one in reachable([*many, goal], items=None))
    monkeypatch.setattr(reach, "_OBJECTS", 100)
    assert len(list(reachable(many))) == 100
    assert any(one is goal for one in reachable([*many, goal], items=None))


def test_classes_and_modules_are_not_looked_into() -> None:
    assert list(reachable(SimpleNamespace(a=torch, b=Goal, c="text", d=None, e=torch.float32)))[1:] == []
